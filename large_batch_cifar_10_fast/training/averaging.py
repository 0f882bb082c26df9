"""Averaged weights, for the end of a run."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


class PulledToAverage(Optimizer):
    """Every few steps puts weights back to their own moving average, while a group's `averaging` is not 0:

        average = decay * average + (1 - decay) * w;  w = average

    At a small rate it takes the noise out of the last steps. Comes after the optimizers that move the weights.
    """

    def __init__(self, groups: Iterable[dict], decay: float, every: int) -> None:
        super().__init__(groups, {"averaging": 0.0, "steps": 0})
        self.decay, self.every = decay, every

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["averaging"]:
                continue
            if not group["steps"]:
                group["averages"] = [weight.clone() for weight in group["params"]]
            elif group["steps"] % self.every == 0:
                torch._foreach_lerp_(group["averages"], group["params"], 1 - self.decay)
                torch._foreach_copy_(group["params"], group["averages"])
            group["steps"] += 1
