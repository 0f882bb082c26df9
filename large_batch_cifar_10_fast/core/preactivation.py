"""The pre-activation block of page and fastai."""

from collections.abc import Callable

from torch import Tensor, nn

from .layers import convolution

# With torch 2.12.1 the gradient of a strided 1x1 convolution in channels-last memory crashes the process if there are
# fewer channels than floats in a vector register (8 with AVX2, 16 with AVX-512).
NARROWEST = 16


class PreactivationBlock(nn.Module):
    """shortcut + convolution(f(norm(convolution(a)))), with a = f(norm(x)) and an activation f.

    The first convolution has the stride. The shortcut is x, or a with `shortcut_after_activation`. If the shape
    changes, the shortcut is a 1x1 convolution of a.
    Input [B, channels_in, H, W], output [B, channels_out, H / stride, W / stride].
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        stride: int,
        norm: Callable[[int], nn.Module],
        activation: Callable[[Tensor], Tensor],
        shortcut_after_activation: bool = False,
    ) -> None:
        super().__init__()
        changes = stride > 1 or channels_in != channels_out
        self.from_activated = changes or shortcut_after_activation
        self.activation = activation
        self.norm1 = norm(channels_in)
        self.conv1 = convolution(channels_in, channels_out, stride=stride)
        self.norm2 = norm(channels_out)
        self.conv2 = convolution(channels_out, channels_out)
        self.shortcut = convolution(channels_in, channels_out, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(self.norm1(x))
        shortcut = self.shortcut(activated if self.from_activated else x)
        return shortcut + self.conv2(self.activation(self.norm2(self.conv1(activated))))
