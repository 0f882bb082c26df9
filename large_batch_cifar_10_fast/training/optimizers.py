"""How the weights move: schedules, and Nesterov's momentum with the rate inside the velocity (method, section 4)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class PiecewiseLinear:
    """A figure as a function of the time in epochs: through `values` at `knots`, constant before and after.

    Two knots at one time are a jump; at that time the later value holds.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, epoch: float) -> float:
        return float(np.interp(epoch, self.knots, self.values))

    def __mul__(self, factor: float) -> "PiecewiseLinear":
        return PiecewiseLinear(self.knots, tuple(value * factor for value in self.values))


def follow_schedules(optimizers: Iterable[Optimizer], epoch: float) -> None:
    """Set what moves in a parameter group (its `schedules`: lr, momentum, ...) to its value at a time in epochs."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, schedule in group["schedules"].items():
                group[name] = schedule(epoch)


def step_all(optimizers: Iterable[Optimizer]) -> None:
    """Step each optimizer, then clear its gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class NesterovSGD(Optimizer):
    """SGD with Nesterov momentum that keeps the learning rate inside the velocity:

        d = -lr * (grad + wd * w);  v = momentum * v + d;  w = w + d + momentum * v

    torch.optim.SGD multiplies the whole velocity by the current rate, which is another method as soon as
    the rate changes.
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
    """One step of the formula above, in place, a few launches for all tensors together."""
    d = torch._foreach_add(grad, w, alpha=weight_decay)
    torch._foreach_mul_(d, -lr)
    torch._foreach_mul_(v, momentum)
    torch._foreach_add_(v, d)
    torch._foreach_add_(w, d)
    torch._foreach_add_(w, v, alpha=momentum)
