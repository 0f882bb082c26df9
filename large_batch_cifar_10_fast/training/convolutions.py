"""3x3 convolutions that leave out what does not reach the result."""

import torch
from torch import Tensor, nn

from .pooling import compiled_for_cpu

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
