"""Schedules, and two optimizers that PyTorch lacks: Nesterov with the rate inside the velocity, and Muon."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor] | tuple[Tensor, ...]

# ---- Schedules


def interpolate(epoch: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate linearly between `values` at `knots` (epochs); constant before the first and after the last.

    Two equal knots make a jump. Exactly at the jump, the later value applies.
    """
    return float(np.interp(epoch, knots, values))


def set_rate(group: dict, rate: float) -> None:
    """Set the learning rate of a parameter group; on a GPU the rate is a tensor, which captured graphs read."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# ---- Nesterov


class NesterovSGD(Optimizer):
    """SGD with Nesterov momentum that keeps the learning rate inside the velocity:

        d = -lr * (grad + wd * w);  v = momentum * v + d;  w = w + d + momentum * v

    torch.optim.SGD multiplies the whole velocity by the current rate. The two differ when the rate changes.
    """

    def __init__(self, groups: Iterable[dict], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})
        self.update = nesterov_update
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for weights in by_dtype(weight for weight in group["params"] if weight.grad is not None):  # not frozen
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                velocities = [self.state[weight]["momentum_buffer"] for weight in weights]
                self.update(weights, gradients, velocities, group["lr"], group["weight_decay"], group["momentum"])


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return one list of tensors per dtype, because torch._foreach is slow on mixed dtypes."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.dtype, []).append(tensor)
    return list(lists.values())


def nesterov_update(
    w: Tensors, grad: Tensors, v: Tensors, lr: float | Tensor, weight_decay: float, momentum: float
) -> None:
    """Apply the formula above in place, to all tensors at once."""
    d = torch._foreach_add(grad, w, alpha=weight_decay)
    torch._foreach_mul_(d, -lr)
    torch._foreach_mul_(v, momentum)
    torch._foreach_add_(v, d)
    torch._foreach_add_(w, d)
    torch._foreach_add_(w, v, alpha=momentum)


# ---- Muon

# Coefficients of a step X <- A X + B X(X'X) + C X(X'X)^2, which moves singular values in (0, 1] towards 1. They are
# chosen for speed, not accuracy: after three steps most singular values lie between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 3
MOST_PADDED = 2.25  # largest factor by which padding may raise a batch's work: all filters of muon fit in one batch
TINY = 1e-15  # smallest norm to divide by: squares of smaller gradients would underflow in float32


class Muon(Optimizer):
    """Nesterov momentum with orthogonalized updates, for weights [out, ...] that are kept at norm sqrt(out):

        m = momentum * m + grad;  d = grad + momentum * m
        w = w * sqrt(out) / |w|;  w = w - lr * orthogonal(d)

    All directions of an update have about the same size, so the network also learns rare directions. The scale of the
    gradients has no effect (docs/why_it_is_fast.md#muon). docs/use_muon.md explains how to use it for other networks.
    torch.optim.Muon (2.9) takes only matrices, one by one, and keeps no norm.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 0.1, momentum: float = 0.6) -> None:
        """`params` are weights or parameter groups. A normalization layer must follow each weight's layer.

        Raise ValueError for a weight with fewer than two dimensions. A weight must not be all zeros. Under autocast the
        products are in half precision.
        """
        self.update = muon_update
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            if weight.ndim < 2:
                raise ValueError(f"Muon has no update for a weight {list(weight.shape)}: give it to SGD or AdamW")
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]  # not frozen
            if weights:
                matrices = [as_matrix(weight, weight) for weight in weights]
                gradients = [as_matrix(weight.grad, weight) for weight in weights]
                momenta = [as_matrix(self.state[weight]["momentum_buffer"], weight) for weight in weights]
                self.update(matrices, gradients, momenta, group["lr"], group["momentum"])


def as_matrix(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return a view [out, rest] of a weight [out, ...], or of its gradient or momentum. Columns are in memory order.

    Newton-Schulz commutes with a permutation of columns, so channels-last memory needs no copy. Raise RuntimeError if
    the memory of `tensor` and `weight` has different orders.
    """
    by_stride = sorted(range(1, weight.ndim), key=lambda dimension: -weight.stride()[dimension])
    return tensor.permute(0, *by_stride).view(len(tensor), -1)


def muon_update(w: Tensors, grad: Tensors, m: Tensors, lr: float | Tensor, momentum: float) -> None:
    """Apply the formula above in place, to all matrices at once."""
    torch._foreach_mul_(m, momentum)
    torch._foreach_add_(m, grad)
    directions = orthogonal_each(torch._foreach_add(grad, m, alpha=momentum))
    norms = torch._foreach_norm(w)
    torch._foreach_mul_(w, [norm.reciprocal() * math.sqrt(len(matrix)) for norm, matrix in zip(norms, w, strict=True)])
    torch._foreach_add_(w, torch._foreach_mul(directions, -lr))


def orthogonal_each(matrices: Tensors) -> list[Tensor]:
    """Orthogonalize each matrix, in few batches. They are padded with zeros, which Newton-Schulz leaves zero."""
    wide = [matrix.mT if len(matrix) > matrix.shape[1] else matrix for matrix in matrices]  # is less work
    found: dict[int, Tensor] = {}
    for batch in batches_of([matrix.shape for matrix in wide]):
        own = [wide[index] for index in batch]
        rows, columns = padded_shape([matrix.shape for matrix in own])
        padded = [F.pad(m, (0, columns - m.shape[1], 0, rows - len(m))) for m in own]
        found |= dict(zip(batch, orthogonal(torch.stack(padded)), strict=True))
    cut = [found[index][: len(matrix), : matrix.shape[1]] for index, matrix in enumerate(wide)]
    return [x.mT if len(matrix) > matrix.shape[1] else x for x, matrix in zip(cut, matrices, strict=True)]


def batches_of(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Split matrices into batches, the largest first, in which padding multiplies the work by at most `MOST_PADDED`."""
    batches: list[list[int]] = []
    for index in sorted(range(len(shapes)), key=lambda index: -work_of(shapes[index])):
        together = [shapes[member] for member in (*batches[-1], index)] if batches else []
        if together and len(together) * work_of(padded_shape(together)) <= MOST_PADDED * sum(map(work_of, together)):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def padded_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    return torch.Size(map(max, zip(*shapes, strict=True)))


def work_of(shape: torch.Size) -> int:
    """Return the multiply-adds of X X' for a matrix X [rows, columns]."""
    rows, columns = shape
    return rows * rows * columns


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about U V' for each matrix [..., out, rest] = U S V' (singular values), by Newton-Schulz iteration."""
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.to(matrices.dtype)
