"""The one norm of all recipes (method, section 3)."""

import torch
from torch import Tensor, nn


class GhostBatchNorm(nn.Module):
    """Batch norm in which every `ghost_batch` images in a row are normalised by their own statistics.

    Small groups add the noise that lets large batches generalise. As no group reaches beyond a worker's batch, many
    workers can be computed as one larger batch; `ghost_batch` = a worker's batch is plain batch norm per worker, whose
    short last batch is a group of its own. The bias is always trained, the scale with `affine` (else it is 1); both,
    and the statistics, are float32 (float64 if the input is). Takes and returns [B, C, H, W], B a multiple of
    ghost_batch unless the batch is a short one.

    While `tracking`, the first `groups` groups (so worker 0's) each feed running statistics of their own, [groups, C];
    evaluation uses their mean.
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
        self.tracking, self.workers = False, 1  # how many workers' images a training batch holds
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(groups, channels))
        self.register_buffer("running_var", torch.ones(groups, channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            scale, shift = self._scale_and_shift(self.running_mean.mean(0), self.running_var.mean(0))
            return torch.addcmul(shift.view(-1, 1, 1), x.to(shift.dtype), scale.view(-1, 1, 1)).to(x.dtype)
        ghost_batch = min(self.ghost_batch, len(x) // self.workers)
        # [groups, ghost_batch, H, W, C], as in memory: a compiler for CPUs stores what it keeps in the order of the
        # dimensions, and would transpose [..., C, H, W] there and back.
        groups = x.permute(0, 2, 3, 1).unflatten(0, (-1, ghost_batch)).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 2, 3), correction=0)  # [groups, C]
        if self.tracking:
            self._track(mean, variance, ghost_batch * x.shape[2] * x.shape[3])
        scale, shift = (y[:, None, None, None] for y in self._scale_and_shift(mean, variance))
        return torch.addcmul(shift, groups, scale).to(x.dtype).flatten(0, 1).permute(0, 3, 1, 2)

    def _scale_and_shift(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """The norm is x * scale + shift: a single pass over x, [C] or [groups, C] like the statistics."""
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        return scale, self.bias - mean * scale

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        self.running_mean.lerp_(mean[: self.groups], self.momentum)
        self.running_var.lerp_(variance[: self.groups] * (count / (count - 1)), self.momentum)  # unbiased


def norms_of(network: nn.Module) -> list[GhostBatchNorm]:
    return [module for module in network.modules() if isinstance(module, GhostBatchNorm)]


def prepare_norms(network: nn.Module, workers: int, tracking: bool) -> None:
    """Say of the training batch to come how many workers' images it holds, and whether worker 0's come first: then it
    feeds the running statistics."""
    for norm in norms_of(network):
        norm.workers, norm.tracking = workers, tracking
