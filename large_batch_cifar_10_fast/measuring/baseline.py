"""The same mathematics without any of our speed, for the bench to compare with and the tests to agree with."""

import torch
from torch import Tensor, nn

from ..training.networks import cast, make_network, weight_dtype
from ..training.norm import GhostBatchNorm, norms_of
from ..training.optimizers import NesterovSGD
from ..training.recipe import Recipe
from ..training.world import World


class BaselineNorm(GhostBatchNorm):
    """Ghost batch norm as one would write it down."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        groups = x.reshape(-1, self.ghost_batch, *x.shape[1:]).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, correction=0)
        x_hat = (groups - mean) / torch.sqrt(variance + self.eps)
        if self.weight is not None:
            x_hat = x_hat * self.weight.view(-1, 1, 1)
        return (x_hat + self.bias.view(-1, 1, 1)).reshape(x.shape).to(x.dtype)


def baseline_network(recipe: Recipe, precision: str, world: World) -> nn.Module:
    network = cast(make_network(recipe, seed=0), weight_dtype(recipe, precision), world.device)
    for norm in norms_of(network):
        norm.__class__ = BaselineNorm
    return network.to(memory_format=torch.contiguous_format)


def baseline_optimizers(recipe: Recipe, network: nn.Module, world: World) -> list[torch.optim.Optimizer]:
    """The recipe's own: NesterovSGD in a slow form, torch's and Muon as they are."""
    made = recipe.optimizers(network, world)
    return [BaselineNesterov(o.param_groups) if isinstance(o, NesterovSGD) else o for o in made]


class BaselineNesterov(torch.optim.Optimizer):
    """The update of NesterovSGD, one parameter and one operation at a time."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            for w in group["params"]:
                self.state[w] = torch.zeros_like(w)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                v = self.state[w]
                d = -group["lr"] * (w.grad + group["weight_decay"] * w)
                v.copy_(group["momentum"] * v + d)
                w.copy_(w + d + group["momentum"] * v)
