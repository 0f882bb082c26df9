"""Layers that the recipes share: ghost batch norm, whitening, max-pooling, convolutions, the pre-activation block."""

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GhostBatchNorm(nn.Module):
    """Batch norm over groups of `ghost_batch` consecutive images instead of the whole batch.

    Small groups add noise that helps large batches generalize. A group never crosses the boundary of a worker's batch,
    so several workers can be computed as one larger batch. With `ghost_batch` = a worker's batch it is plain batch norm
    per worker. In a shorter last batch each worker's images are one group.

    Input and output are [B, C, H, W]. The bias is trained, the scale only with `affine`; both and the statistics are
    float32 (float64 if the input is).

    Unlike nn.BatchNorm2d's, a forward pass in training mode leaves the running statistics alone: it stores mean and
    unbiased variance of its first `groups` groups as `batch_statistics`, for `update_running_statistics`. Each group
    has running statistics of its own, [groups, C]; evaluation uses their mean.
    """

    def __init__(
        self,
        channels: int,
        ghost_batch: int,
        affine: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.ghost_batch, self.momentum, self.eps, self.groups = ghost_batch, momentum, eps, groups
        self.workers = 1  # whose images a training batch holds, as many of each
        self.batch_statistics: tuple[Tensor, ...] = ()
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels))
        self.running_mean = nn.Buffer(torch.zeros(groups, channels))
        self.running_var = nn.Buffer(torch.ones(groups, channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            scale, shift = self._scale_and_shift(self.running_mean.mean(0), self.running_var.mean(0))
            return torch.addcmul(shift.view(-1, 1, 1), x.to(shift.dtype), scale.view(-1, 1, 1)).to(x.dtype)
        ghost_batch = min(self.ghost_batch, len(x) // self.workers)
        # [groups, ghost_batch, H, W, C], as in memory: the CPU compiler stores intermediate tensors in the order of
        # their dimensions, and would transpose [..., C, H, W] there and back.
        groups = x.permute(0, 2, 3, 1).unflatten(0, (-1, ghost_batch)).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 2, 3), correction=0)  # [groups, C]
        count = ghost_batch * x.shape[2] * x.shape[3]
        unbiased = variance[: self.groups].detach() * (count / (count - 1))
        self.batch_statistics = mean[: self.groups].detach(), unbiased
        scale, shift = (y[:, None, None, None] for y in self._scale_and_shift(mean, variance))
        return torch.addcmul(shift, groups, scale).to(x.dtype).flatten(0, 1).permute(0, 3, 1, 2)

    def _scale_and_shift(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift, [C] or [groups, C] like the statistics: the norm is x * scale + shift, one pass."""
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        return scale, self.bias - mean * scale


def norms_of(network: nn.Module) -> list[GhostBatchNorm]:
    return [module for module in network.modules() if isinstance(module, GhostBatchNorm)]


def running_statistics(network: nn.Module) -> list[Tensor]:
    """Return running mean and variance of each norm."""
    return [buffer for norm in norms_of(network) for buffer in (norm.running_mean, norm.running_var)]


@torch.no_grad()
def update_running_statistics(network: nn.Module) -> None:
    """Move the running statistics of all norms towards those of the last training batch, in one launch."""
    norms = norms_of(network)
    latest = [statistic for norm in norms for statistic in norm.batch_statistics]
    torch._foreach_lerp_(running_statistics(network), latest, norms[0].momentum)


class WhiteningConvolution(nn.Conv2d):
    """A convolution whose filters are a buffer: set by a recipe's `whiten`, never trained, kept from run to run."""

    def __init__(self, channels_in: int, channels_out: int, size: int, padding: int = 0, bias: bool = True) -> None:
        super().__init__(channels_in, channels_out, size, padding=padding, bias=bias)
        filters = self.weight.data
        del self.weight
        self.register_buffer("weight", filters)


def whitening_buffers(network: nn.Module) -> list[Tensor]:
    """Return the filters of all WhiteningConvolutions."""
    return [module.weight for module in network.modules() if isinstance(module, WhiteningConvolution)]


def whitening_filters(images: Tensor, size: int, epsilon: float) -> Tensor:
    """Return filters [3 size², 3, size, size] whose outputs on these images are uncorrelated, with variance near 1.

    `images` [n, H, W, 3] are normalized and unpadded. X has all their patches as rows. The filters are the eigenvectors
    of X'X / (rows - 1), largest eigenvalue first, divided by sqrt(eigenvalue + epsilon); epsilon keeps weak directions
    small. Computed in float32, or float64 if the images are.
    """
    dtype = torch.promote_types(images.dtype, torch.float32)
    patches = images.unfold(1, size, 1).unfold(2, size, 1)  # [n, 30, 30, 3, 3, 3] for 3x3 of 32x32
    rows = patches.reshape(-1, 3 * size * size).to(dtype)
    eigenvalues, eigenvectors = torch.linalg.eigh(rows.T @ rows / (len(rows) - 1))
    filters = eigenvectors.T / (eigenvalues[:, None] + epsilon).sqrt()
    return filters.flip(0).view(-1, 3, size, size)


class MaxPool(nn.Module):
    """nn.MaxPool2d(size), from [B, C, H, W] to [B, C, H // size, W // size]; without a size over the whole image."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        size = self.size or x.shape[-1]
        compiled = torch.compiler.is_compiling() and (x.is_cuda or size == 2)
        if compiled and x.shape[2] % size == x.shape[3] % size == 0:
            return MaxPoolFunction.apply(x, size)
        if self.training and not self.size:
            return F.adaptive_max_pool2d(x, 1)
        return F.max_pool2d(x, size)  # which ONNX has, too


class MaxPoolFunction(torch.autograd.Function):
    """MaxPool2d for sides divisible by `size`. Compiled, PyTorch's own scatters gradients: on a CPU one by one, by
    int64 indices, on a GPU by atomic additions to a zeroed float32 NCHW buffer.

    This one stores in a byte which of a window is the largest (the first if equal); the backward pass compares it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, size: int) -> Tensor:
        window = [x[:, :, row::size, column::size] for row in range(size) for column in range(size)]
        largest = reduce(torch.maximum, window)
        place = torch.full_like(largest, len(window) - 1, dtype=torch.float32)
        for index in reversed(range(len(window) - 1)):
            place = torch.where(window[index] == largest, float(index), place)
        ctx.save_for_backward(place.to(torch.int8))
        ctx.size = size
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        # Channels last, as in memory: the compiler stores intermediate values in the order of their dimensions.
        places, gradients = (
            x.permute(0, 2, 3, 1).repeat_interleave(ctx.size, 1).repeat_interleave(ctx.size, 2)
            for x in (ctx.saved_tensors[0], gradient)
        )
        row, column = (torch.arange(side, device=places.device) % ctx.size for side in places.shape[1:3])
        own = (ctx.size * row[:, None, None] + column[:, None]).float()  # a CPU compares int64 one by one
        return torch.where(places.float() == own, gradients, 0).permute(0, 3, 1, 2), None


class Convolution(nn.Conv2d):
    """A 3x3 convolution from [B, C, S, S] to [B, D, S, S], with a padding of 1 and without bias.

    If it is pooled next, it leaves out the last row and column of an odd side, which pooling drops: up to 15% of a
    step's work.
    """

    def __init__(self, channels_in: int, channels_out: int, pooled: bool = False) -> None:
        super().__init__(channels_in, channels_out, 3, padding=1, bias=False)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        compiled_for_cpu = torch.compiler.is_compiling() and x.device.type == "cpu"
        side = x.shape[-1] // 2 * 2 if self.pooled else x.shape[-1]
        if compiled_for_cpu and side <= 4:
            return convolve_by_position(x, self.weight, side)
        if side == x.shape[-1]:
            return F.conv2d(x, self.weight, padding=1)
        if compiled_for_cpu:  # the compiler would compute `pad` under a mask, slowly
            x = torch.cat([torch.zeros_like(x[..., :1]), x], 3)
            x = torch.cat([torch.zeros_like(x[..., :1, :]), x], 2)
        else:
            x = F.pad(x, (1, 0, 1, 0))
        return F.conv2d(x, self.weight)


def convolve_by_position(x: Tensor, weight: Tensor, side: int) -> Tensor:
    """Return the first `side` rows and columns of a 3x3 convolution with a padding of 1.

    There is a matrix product for each output position, without the taps that fall on padding.
    """
    x, weight = x.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)  # channels last, as in memory
    seen = [slice(max(place - 1, 0), min(place + 2, x.shape[1])) for place in range(side)]
    taps = [slice(near.start - place + 1, near.stop - place + 1) for place, near in enumerate(seen)]
    places = [
        x[:, seen[row], seen[column]].flatten(1) @ weight[taps[row], taps[column]].flatten(0, 2)
        for row in range(side)
        for column in range(side)
    ]
    return torch.stack(places, 1).unflatten(1, (side, side)).permute(0, 3, 1, 2)


# With torch 2.12.1 the gradient of a strided 1x1 convolution in channels-last memory crashes the process if there are
# fewer channels than floats in a vector register (8 with AVX2, 16 with AVX-512).
NARROWEST = 16

Norm = Callable[[int], nn.Module]  # from the number of channels


class PreactivationBlock(nn.Module):
    """x + convolution(ReLU(norm(convolution(a)))), with a = ReLU(norm(x)); the first convolution has the stride.

    The shortcut is x, or a with `shortcut_after_activation`; where the shape changes it is a 1x1 convolution of a.
    Input [B, channels_in, H, W], output [B, channels_out, H / stride, W / stride].
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, norm: Norm, shortcut_after_activation: bool = False
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels_in), convolution(channels_in, channels_out, 3, stride)
        self.norm2, self.conv2 = norm(channels_out), convolution(channels_out, channels_out, 3)
        changes = stride > 1 or channels_in != channels_out
        self.shortcut = convolution(channels_in, channels_out, 1, stride) if changes else nn.Identity()
        self.from_activated = changes or shortcut_after_activation

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        shortcut = self.shortcut(activated if self.from_activated else x)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(activated))))


def convolution(channels_in: int, channels_out: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image size at stride 1."""
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
