"""Pooling that a compiler for CPUs makes fast (docs/performance.md)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
