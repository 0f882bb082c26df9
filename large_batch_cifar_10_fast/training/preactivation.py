"""The residual block of the systems of 2018: norm and ReLU come before each convolution (He et al., 2016)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

# Seen with torch 2.12.1: the gradient of a strided 1x1 convolution, channels-last, of fewer channels than a vector has
# floats (8 with AVX2, 16 with AVX-512) ends the process.
TOO_NARROW = "a strided convolution of less than 16 channels makes PyTorch crash on a CPU"

Norm = Callable[[int], nn.Module]  # made for so many channels


class PreactivationBlock(nn.Module):
    """x + convolution(ReLU(norm(convolution(a)))), with a = ReLU(norm(x)); the first convolution has the stride.

    Where the shape changes, a 1x1 convolution of a takes the place of x; elsewhere a itself does, with
    `shortcut_after_activation`. Takes [B, channels_in, H, W], returns [B, channels_out, H / stride, W / stride].
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, norm: Norm, shortcut_after_activation: bool
    ) -> None:
        super().__init__()
        self.shortcut_after_activation = shortcut_after_activation
        self.norm1, self.conv1 = norm(channels_in), convolution(channels_in, channels_out, 3, stride)
        self.norm2, self.conv2 = norm(channels_out), convolution(channels_out, channels_out, 3)
        changes = stride > 1 or channels_in != channels_out
        self.shortcut = convolution(channels_in, channels_out, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(activated)
        elif self.shortcut_after_activation:
            x = activated
        return x + self.conv2(F.relu(self.norm2(self.conv1(activated))))


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
