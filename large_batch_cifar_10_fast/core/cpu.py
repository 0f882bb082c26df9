"""What only a CPU uses: a convolution of small images as matrix products, and memory that the process keeps."""

import contextlib
import ctypes

import torch
from torch import Tensor


def convolve_by_position(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """Return the first `side` rows and columns of a 3x3 convolution with a padding of 1.

    Compute one matrix product for each output position, without the taps that fall on padding. On a CPU this makes a
    step of muon at 24 pixels 7 to 11% faster.
    """
    x = x.permute(0, 2, 3, 1)  # channels last, as in memory
    weight = weight.permute(2, 3, 1, 0)
    outputs = []
    for row in range(side):
        for column in range(side):
            rows, row_taps = window(row, x.shape[1])
            columns, column_taps = window(column, x.shape[2])
            seen = x[:, rows, columns].flatten(1)
            outputs.append(seen @ weight[row_taps, column_taps].flatten(0, 2))
    return torch.stack(outputs, 1).unflatten(1, (side, side)).permute(0, 3, 1, 2)


def window(index: int, size: int) -> tuple[slice, slice]:
    """Return which of `size` positions a filter of three taps covers around one, and which taps, as slices."""
    seen = slice(max(index - 1, 0), min(index + 2, size))
    return seen, slice(seen.start - index + 1, seen.stop - index + 1)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory. Otherwise the system clears large blocks again, which takes a quarter of a step."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: allocate all blocks on the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the end of the heap
