"""Fast paths for the CPU. docs/performance.md has what each of them gains."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compiled_for_cpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


class Convolution(nn.Conv2d):
    """A 3x3 convolution from [B, C, S, S] to [B, D, S, S], with a padding of 1."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, x.shape[-1])


class ConvolutionToPool(nn.Conv2d):
    """A Convolution without the last row and column of an odd side, which pooling drops: up to 15% of a step's work."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, x.shape[-1] // 2 * 2)


def convolve(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """Return the first `side` rows and columns, all or all but one, of a 3x3 convolution with a padding of 1."""
    if compiled_for_cpu(x) and side <= 4:
        return convolve_by_position(x, weight, side)
    if side == x.shape[-1]:
        return F.conv2d(x, weight, padding=1)
    if compiled_for_cpu(x):  # the compiler would compute `pad` under a mask, slowly
        x = torch.cat([torch.zeros_like(x[..., :1]), x], 3)
        x = torch.cat([torch.zeros_like(x[..., :1, :]), x], 2)
    else:
        x = F.pad(x, (1, 0, 1, 0))
    return F.conv2d(x, weight)


def convolve_by_position(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """Compute `convolve` by a matrix product for each output position, without the taps that fall on padding."""
    x, weight = x.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)  # channels last, as in memory
    seen = [slice(max(place - 1, 0), min(place + 2, x.shape[1])) for place in range(side)]
    taps = [slice(near.start - place + 1, near.stop - place + 1) for place, near in enumerate(seen)]
    places = [
        x[:, seen[row], seen[column]].flatten(1) @ weight[taps[row], taps[column]].flatten(0, 2)
        for row in range(side)
        for column in range(side)
    ]
    return torch.stack(places, 1).unflatten(1, (side, side)).permute(0, 3, 1, 2)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory. The system would clear large blocks again, page by page: a quarter of a step."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no blocks apart from the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the end of the heap
