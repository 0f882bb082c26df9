"""Layers that the programs share: ghost batch norm, whitening, max-pooling, convolutions."""

from collections.abc import Iterable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cpu import convolve_by_position

# ---- Ghost batch norm


class GhostBatchNorm(nn.Module):
    """Batch norm over each of `groups` equal parts of the batch, from [B, C, H, W] to the same shape.

    Statistics of few images are noisy. Large batches lack this noise and generalize worse
    (docs/why_it_is_fast.md#ghost-batches). Several workers can be computed as one larger batch: if `groups` is a
    multiple of their number, each group has images of one worker only. With one group per worker this is plain batch
    norm per worker.

    The bias is trained. The scale is trained only with `scaled`. Scale, bias and statistics are float32, or float64 if
    the input is.

    Unlike nn.BatchNorm2d, a forward pass in training mode does not change the running statistics. It stores mean and
    unbiased variance of the first `tracked` groups as `batch_statistics`, for `update_running_statistics`. Each tracked
    group has its own running statistics, [tracked, C]. Evaluation uses their mean.
    """

    def __init__(
        self,
        channels: int,
        groups: int = 1,
        momentum: float = 0.1,
        eps: float = 1e-5,
        tracked: int = 1,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.momentum = momentum
        self.eps = eps
        self.tracked = tracked
        self.batch_statistics: tuple[Tensor, ...] = ()
        self.weight = nn.Parameter(torch.ones(channels)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(channels))
        self.running_mean = nn.Buffer(torch.zeros(tracked, channels))
        self.running_var = nn.Buffer(torch.ones(tracked, channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            scale = self.scale(self.running_var.mean(0))
            shift = self.bias - self.running_mean.mean(0) * scale
            return torch.addcmul(shift.view(-1, 1, 1), x.to(shift.dtype), scale.view(-1, 1, 1)).to(x.dtype)
        # [groups, images, H, W, C], as in memory. The CPU compiler stores intermediate tensors in the order of their
        # dimensions, so it would transpose [..., C, H, W] there and back.
        grouped = x.permute(0, 2, 3, 1).unflatten(0, (self.groups, -1)).to(self.bias.dtype)
        variance, mean = torch.var_mean(grouped, dim=(1, 2, 3), correction=0)  # [groups, C]
        values = grouped[0, ..., 0].numel()
        unbiased = variance[: self.tracked].detach() * (values / (values - 1))
        self.batch_statistics = mean[: self.tracked].detach(), unbiased
        scale = self.scale(variance)
        shift = self.bias - mean * scale
        normalized = torch.addcmul(shift[:, None, None, None], grouped, scale[:, None, None, None])
        return normalized.to(x.dtype).flatten(0, 1).permute(0, 3, 1, 2)

    def scale(self, variance: Tensor) -> Tensor:
        """Return the factor of each channel, for a variance [C] or [groups, C]."""
        inverse = torch.rsqrt(variance + self.eps)
        return inverse if self.weight is None else inverse * self.weight


def ghost_norms(network: nn.Module) -> list[GhostBatchNorm]:
    return [module for module in network.modules() if isinstance(module, GhostBatchNorm)]


def batch_statistics(network: nn.Module) -> list[Tensor]:
    """Return the mean and variance of each ghost norm's last training batch."""
    return [statistic for norm in ghost_norms(network) for statistic in norm.batch_statistics]


@torch.no_grad()
def update_running_statistics(network: nn.Module, latest: Iterable[Tensor]) -> None:
    """Move the running statistics of all ghost norms towards the `batch_statistics` of a pass, in one kernel launch."""
    norms = ghost_norms(network)
    running: list[Tensor] = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    if running:
        torch._foreach_lerp_(running, list(latest), [norm.momentum for norm in norms for _ in range(2)])


# ---- Whitening


def whitening_filters(images: Tensor, size: int, epsilon: float) -> Tensor:
    """Return filters [3 size², 3, size, size] whose outputs on these images are uncorrelated, with variance near 1.

    `images` [n, H, W, 3] are normalized and unpadded. X has all their patches as rows. The filters are the eigenvectors
    of X'X / (rows - 1), largest eigenvalue first, divided by sqrt(eigenvalue + epsilon). The epsilon keeps weak
    directions small (docs/why_it_is_fast.md#whitening). All is computed in float32, or float64 if the images are.
    """
    dtype = torch.promote_types(images.dtype, torch.float32)
    patches = images.unfold(1, size, 1).unfold(2, size, 1)  # [n, 30, 30, 3, 3, 3] for 3x3 of 32x32
    rows = patches.reshape(-1, 3 * size * size).to(dtype)
    eigenvalues, eigenvectors = torch.linalg.eigh(rows.T @ rows / (len(rows) - 1))
    filters = eigenvectors.T / (eigenvalues[:, None] + epsilon).sqrt()
    return filters.flip(0).view(-1, 3, size, size)


# ---- Pooling


class MaxPool(nn.Module):
    """nn.MaxPool2d(size): [B, C, H, W] to [B, C, H // size, W // size]. Without a size, pool the whole image."""

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
        return F.max_pool2d(x, size)  # ONNX has this operation, too


class MaxPoolFunction(torch.autograd.Function):
    """Max-pooling for sides divisible by `size`, faster than PyTorch's when compiled.

    Compiled, PyTorch's backward pass scatters gradients: on a CPU one by one, by int64 indices; on a GPU by atomic
    additions to a zeroed float32 NCHW buffer. This class stores the position of the largest value of a window in a byte
    (the first of equal values). Its backward pass compares positions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, size: int) -> Tensor:
        window = [x[:, :, row::size, column::size] for row in range(size) for column in range(size)]
        largest = reduce(torch.maximum, window)
        where = torch.full_like(largest, len(window) - 1, dtype=torch.float32)
        for index in reversed(range(len(window) - 1)):
            where = torch.where(window[index] == largest, float(index), where)
        ctx.save_for_backward(where.to(torch.int8))
        ctx.size = size
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        stored = unpool(ctx.saved_tensors[0], ctx.size)
        gradients = unpool(gradient, ctx.size)
        rows = torch.arange(stored.shape[1], device=stored.device) % ctx.size
        columns = torch.arange(stored.shape[2], device=stored.device) % ctx.size
        own = (ctx.size * rows[:, None, None] + columns[:, None]).float()  # a CPU does not vectorize int64 comparisons
        return torch.where(stored.float() == own, gradients, 0).permute(0, 3, 1, 2), None


def unpool(x: Tensor, size: int) -> Tensor:
    """Repeat each value of [B, C, H, W] over its window. Return [B, H * size, W * size, C], as in memory."""
    return x.permute(0, 2, 3, 1).repeat_interleave(size, 1).repeat_interleave(size, 2)


# ---- Convolutions


class Convolution(nn.Conv2d):
    """A 3x3 convolution from [B, C, S, S] to [B, D, S, S], with a padding of 1 and without bias.

    With `pooled`, it leaves out the last row and column of an odd side, because the pooling that follows drops them.
    This saves up to 15% of a step's work.
    """

    def __init__(self, channels_in: int, channels_out: int, pooled: bool = False) -> None:
        super().__init__(channels_in, channels_out, 3, padding=1, bias=False)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        compiled_for_cpu = torch.compiler.is_compiling() and not x.is_cuda
        side = x.shape[-1] // 2 * 2 if self.pooled else x.shape[-1]
        if compiled_for_cpu and side <= 4:
            return convolve_by_position(x, self.weight, side)
        if side == x.shape[-1]:
            return F.conv2d(x, self.weight, padding=1)
        if compiled_for_cpu:  # compiled `pad` is slow
            x = torch.cat([torch.zeros_like(x[..., :1]), x], 3)
            x = torch.cat([torch.zeros_like(x[..., :1, :]), x], 2)
        else:
            x = F.pad(x, (1, 0, 1, 0))
        return F.conv2d(x, self.weight)


def convolution(channels_in: int, channels_out: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image size at stride 1."""
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
