"""Fast paths for the CPU. docs/performance.md has what each of them gains."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compiled_for_cpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


class MaxPool2x2(nn.Module):
    """nn.MaxPool2d(2), from [B, C, H, W] to [B, C, H // 2, W // 2]."""

    def forward(self, x: Tensor) -> Tensor:
        if compiled_for_cpu(x) and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return MaxPool2x2Function.apply(x)
        return F.max_pool2d(x, 2)


class MaxPool2x2Function(torch.autograd.Function):
    """MaxPool2d(2) for even sides. Compiled for a CPU, PyTorch's own scatters gradients one by one, by int64 indices.

    This one stores in a byte which of the four is the largest (the first if equal); the backward pass compares it.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        a, b, c, d = (x[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1))
        largest = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        place = torch.where(a == largest, 0.0, torch.where(b == largest, 1.0, torch.where(c == largest, 2.0, 3.0)))
        ctx.save_for_backward(place.to(torch.int8))
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # Channels last, as in memory: the compiler stores intermediate values in the order of their dimensions.
        places, gradients = (
            x.permute(0, 2, 3, 1).repeat_interleave(2, 1).repeat_interleave(2, 2)
            for x in (ctx.saved_tensors[0], gradient)
        )
        row, column = (torch.arange(side, device=places.device) % 2 for side in places.shape[1:3])
        own = (2 * row[:, None, None] + column[:, None]).float()  # a CPU compares float32 in vectors, int64 one by one
        return torch.where(places.float() == own, gradients, 0).permute(0, 3, 1, 2)


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
