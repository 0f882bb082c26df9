"""How the weights move: a piecewise-linear rate and Nesterov's momentum (method, section 4)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from .settings import Settings

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4  # per image of a batch and per unit of the peak rate
BIAS_FACTOR = 64  # biases learn this much faster, with as much less decay

Schedule = Callable[[float], float]


def learning_rate(settings: Settings) -> Schedule:
    """L as a function of the time in epochs: up from 0 to the peak, down, then constant.

    The rate at the end does for the weights what an average over them would: hence `ema_ep`.
    """
    peak, end = settings.lr_scaler, settings.lr_scaler * settings.lr_scaler_end_fraction
    knots = (0, settings.epochs / settings.warmup_fraction, settings.epochs - settings.ema_ep)
    return lambda epoch: float(np.interp(epoch, knots, (0, peak, end)))


class NesterovSGD:
    """SGD with Nesterov momentum that keeps the learning rate inside the velocity:

        d = -lr * (grad + wd * w);  v = 0.9 * v + d;  w = w + d + 0.9 * v

    torch.optim.SGD multiplies the whole velocity by the current rate, which is another method as soon as
    the rate changes. Weights have lr = L / batch and wd = 5e-4 x lr_scaler x batch, the norms' biases 64
    times that lr and a 64th of that wd. Gradients are sums over a worker's batch, averaged over the workers:
    they arrive as sums over all workers' batches and are divided here. (Dividing the loss instead would push
    half-precision gradients towards zero.)
    """

    def __init__(self, network: nn.Module, settings: Settings, steps_per_epoch: int) -> None:
        self.rate = learning_rate(settings)
        self.steps_per_epoch = steps_per_epoch
        self.workers = settings.workers
        self.step_count = 0
        batch = settings.batch_size
        decay = WEIGHT_DECAY * settings.lr_scaler * batch
        weights = [p for p in network.parameters() if p.ndim > 1]
        biases = [p for p in network.parameters() if p.ndim == 1]
        self.groups = [
            (group, [torch.zeros_like(p) for p in group], factor / batch, decay / factor)
            for group, factor in ((weights, 1), (biases, BIAS_FACTOR))
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients, and clear these. The first step is number 1."""
        self.step_count += 1
        rate = self.rate(self.step_count / self.steps_per_epoch)
        for weights, velocities, factor, decay in self.groups:
            descend(weights, [p.grad for p in weights], velocities, rate * factor, decay, self.workers)
            for weight in weights:
                weight.grad = None


def descend(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], velocities: Sequence[torch.Tensor],
    lr: float, decay: float, workers: int,
) -> None:  # fmt: skip
    """One step of the formula above, in place, a few launches for all tensors together."""
    change = torch._foreach_div(gradients, workers)
    torch._foreach_add_(change, weights, alpha=decay)
    torch._foreach_mul_(change, -lr)
    torch._foreach_mul_(velocities, MOMENTUM)
    torch._foreach_add_(velocities, change)
    torch._foreach_add_(weights, change)
    torch._foreach_add_(weights, velocities, alpha=MOMENTUM)
