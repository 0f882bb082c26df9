"""The same mathematics without any of our speed, for the bench to compare with and the tests to agree with."""

import torch
from torch import Tensor

from .distributed import Team
from .network import EPSILON, GhostNorm, Network
from .optimizer import MOMENTUM, NesterovSGD
from .settings import GROUP, Settings


class PlainNorm(GhostNorm):
    """Ghost norm as one would write it down; autograd keeps what it needs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        groups = x.reshape(-1, GROUP, *x.shape[1:]).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, correction=0)
        y = (groups - mean) / torch.sqrt(variance + EPSILON) + self.bias.view(-1, 1, 1)
        return y.reshape(x.shape).to(x.dtype)


def plain_network(settings: Settings, team: Team) -> Network:
    network = Network(torch.zeros(27, 3, 3, 3), settings.width, seed=0).cast(settings.precision, team.device)
    for norm in network.norms():
        norm.__class__ = PlainNorm
    return network.to(memory_format=torch.contiguous_format)


@torch.no_grad()
def plain_update(optimizer: NesterovSGD) -> None:
    """The update of optimizer.py, one parameter and one operation at a time."""
    optimizer.step_count += 1
    rate = optimizer.rate(optimizer.step_count / optimizer.steps_per_epoch)
    for weights, velocities, factor, decay in optimizer.groups:
        for w, v in zip(weights, velocities, strict=True):
            d = -rate * factor * (w.grad / optimizer.workers + decay * w)
            v.copy_(MOMENTUM * v + d)
            w.copy_(w + d + MOMENTUM * v)
            w.grad = None
