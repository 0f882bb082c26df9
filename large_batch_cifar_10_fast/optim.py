"""Schedules, and two optimizers that PyTorch lacks: Nesterov with the rate inside the velocity, and Muon."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .distributed import DistContext

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class PiecewiseLinear:
    """Interpolate linearly between `values` at `knots` (epochs); constant before the first and after the last.

    Two equal knots make a jump; at that time the later value holds.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, epoch: float) -> float:
        return float(np.interp(epoch, self.knots, self.values))

    def __mul__(self, factor: float) -> "PiecewiseLinear":
        return PiecewiseLinear(self.knots, tuple(value * factor for value in self.values))


def follow_schedules(optimizers: Iterable[Optimizer], epoch: float) -> None:
    """Set lr, momentum, ... of every parameter group from its `schedules`, at a time in epochs."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, schedule in group["schedules"].items():
                group[name] = schedule(epoch)


def step_all(optimizers: Iterable[Optimizer]) -> None:
    """Step each optimizer and clear its gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class NesterovSGD(Optimizer):
    """SGD with Nesterov momentum that keeps the learning rate inside the velocity:

        d = -lr * (grad + wd * w);  v = momentum * v + d;  w = w + d + momentum * v

    torch.optim.SGD multiplies the whole velocity by the current rate instead, which differs when the rate changes.
    """

    def __init__(self, groups: Iterable[dict], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})
        for group in self.param_groups:
            dtypes = dict.fromkeys(weight.dtype for weight in group["params"])  # torch._foreach is slow on a mixture
            group["lists"] = [[weight for weight in group["params"] if weight.dtype == dtype] for dtype in dtypes]
            group["velocities"] = [[torch.zeros_like(weight) for weight in weights] for weights in group["lists"]]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            rates = [group[name] for name in ("lr", "weight_decay", "momentum")]
            for weights, velocities in zip(group["lists"], group["velocities"], strict=True):
                nesterov_update(weights, [weight.grad for weight in weights], velocities, *rates)


def nesterov_update(w: Tensors, grad: Tensors, v: Tensors, lr: float, weight_decay: float, momentum: float) -> None:
    """Apply the formula above in place, to all tensors at once."""
    d = torch._foreach_add(grad, w, alpha=weight_decay)
    torch._foreach_mul_(d, -lr)
    torch._foreach_mul_(v, momentum)
    torch._foreach_add_(v, d)
    torch._foreach_add_(w, d)
    torch._foreach_add_(w, v, alpha=momentum)


# Coefficients of a step X <- A X + B X(X'X) + C X(X'X)^2, which moves singular values in (0, 1] towards 1. It favours
# speed over accuracy: after three steps most lie between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 3
TINY = 1e-30  # least norm to divide by


class Muon(Optimizer):
    """Nesterov momentum with orthogonalized updates, for weights [out, ...] that are kept at norm sqrt(out):

        m = momentum * m + grad;  d = grad + momentum * m
        w = w * sqrt(out) / |w|;  w = w - lr * orthogonal(d)

    All directions of an update have the same size, so that directions that gradients rarely show are learned, too, and
    the scale of the gradients has no effect. Each process orthogonalizes some of the matrices; those of one shape are
    one batch of products, in half precision under autocast. torch.optim.Muon (2.9) takes only matrices, one by one, and
    keeps no norm.
    """

    def __init__(self, groups: Iterable[dict], momentum: float, ctx: DistContext) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum})
        self.ctx = ctx
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]  # not frozen
            if not weights:
                continue
            gradients, momenta = [w.grad for w in weights], [self.state[w] for w in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            directions = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
            lengths = torch._foreach_norm(weights)
            factors = [math.sqrt(len(w)) / length for w, length in zip(weights, lengths, strict=True)]
            torch._foreach_mul_(weights, factors)
            torch._foreach_add_(weights, orthogonal_all(directions, self.ctx), alpha=-group["lr"])


def orthogonal_all(directions: list[Tensor], ctx: DistContext) -> list[Tensor]:
    """Return each direction [out, ...] orthogonalized as a matrix [out, rest]; the processes share the work."""
    message = directions[0].new_zeros(sum(map(torch.numel, directions)))  # zeros where other processes add theirs
    parts = message.split([direction.numel() for direction in directions])
    made = [part.view(direction.shape) for part, direction in zip(parts, directions, strict=True)]
    largest_first = sorted(range(len(directions)), key=lambda place: -directions[place].numel())
    mine = largest_first[ctx.rank :: ctx.world_size]
    for shape in dict.fromkeys(directions[place].shape for place in mine):
        places = [place for place in mine if directions[place].shape == shape]
        batch = orthogonal(torch.stack([directions[place].flatten(1) for place in places]))
        torch._foreach_copy_([made[place].flatten(1) for place in places], list(batch))
    ctx.all_reduce(message)
    return made


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about U V' for each matrix [..., out, rest] = U S V' (singular values), by Newton-Schulz iteration."""
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.to(matrices.dtype)
