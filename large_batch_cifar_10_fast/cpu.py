"""Fast paths that a CPU alone takes; each says what it gains."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def compiled_for_cpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


class HalvingPool(nn.Module):
    """nn.MaxPool2d(2), from [B, C, H, W] to [B, C, H // 2, W // 2]."""

    def forward(self, x: Tensor) -> Tensor:
        if compiled_for_cpu(x) and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return LargestOfFour.apply(x)
        return F.max_pool2d(x, 2)


class LargestOfFour(torch.autograd.Function):
    """The same, of even sides. Compiled for a CPU, PyTorch's own sends each gradient to its place by a number of 8
    bytes, one by one, between two copies of everything. Here a byte says which of the four was largest, the first of
    equals, and each of the four asks whether it was."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        a, b, c, d = (x[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1))
        largest = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        place = torch.where(a == largest, 0.0, torch.where(b == largest, 1.0, torch.where(c == largest, 2.0, 3.0)))
        ctx.save_for_backward(place.to(torch.int8))
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # Channels last, as in memory: a compiler for CPUs stores what it keeps in the order of its dimensions.
        places, gradients = (
            x.permute(0, 2, 3, 1).repeat_interleave(2, 1).repeat_interleave(2, 2)
            for x in (ctx.saved_tensors[0], gradient)
        )
        row, column = (torch.arange(side, device=places.device) % 2 for side in places.shape[1:3])
        # In float32, which a CPU compares in vectors; integers of 8 bytes would go one by one.
        own = (2 * row[:, None, None] + column[:, None]).float()
        return torch.where(places.float() == own, gradients, 0).permute(0, 3, 1, 2)


FEW = 4  # places a side, up to which a CPU computes one at a time (docs/performance.md)


class Convolution(nn.Conv2d):
    """From [B, C, S, S] to [B, D, S, S], with a padding of 1."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, x.shape[-1])


class ConvolutionToPool(nn.Conv2d):
    """Where a side is odd, pooling drops the last row and column: they are left out, with up to 15% of a step's work,
    and nothing of the result."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, x.shape[-1] // 2 * 2)


def convolve(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """The first places, side x side, of a convolution with a padding of 1: of as many as there are, or of one less."""
    if compiled_for_cpu(x) and side <= FEW:
        return convolve_by_place(x, weight, side)
    if side == x.shape[-1]:
        return nn.functional.conv2d(x, weight, padding=1)
    if compiled_for_cpu(x):  # which would compute what is padded under a mask, slowly
        x = torch.cat([torch.zeros_like(x[..., :1]), x], 3)
        x = torch.cat([torch.zeros_like(x[..., :1, :]), x], 2)
    else:
        x = nn.functional.pad(x, (1, 0, 1, 0))
    return nn.functional.conv2d(x, weight)


def convolve_by_place(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """The same, a product of matrices for each place: of the places that it sees and the taps that fall on them. What
    falls on the padding, 20 taps of 36 in 2x2 places, is not multiplied."""
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
    """Have the C library keep what a step frees for the next one. Blocks of hundreds of megabytes would go back to the
    system, and come back page by page, cleared: a quarter of a step's time on a CPU (docs/performance.md)."""
    with contextlib.suppress(AttributeError):  # this is glibc's; another library has its own ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)  # blocks apart from the heap
        mallopt(M_TRIM_THRESHOLD, -1)  # never
