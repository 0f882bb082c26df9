"""David Page, 2018: Johnson's network reproduced, its surplus norm and kink removed (docs/recipes.md).

One worker of 128 images; 35 epochs, rate 0, 0.1, 0.005, 0 at epochs 0, 15, 30, 35; Nesterov 0.9 with the rate inside
the velocity, decay 5e-4 x 128; summed cross-entropy, the rate divided by 128; pad 4, independent crops and flips.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from ..distributed import DistContext
from ..layers import GhostBatchNorm
from ..optim import NesterovSGD, PiecewiseLinear
from ..recipe import option
from .basenet import SGD_MOMENTUM, WEIGHT_DECAY, Basenet, Network

RATE = PiecewiseLinear((0, 15, 30, 35), (0, 0.1, 0.005, 0))
RATE_WITH_KINK = PiecewiseLinear((0, 15, 15, 30, 35), (0, 0.1, 0.105, 0.005, 0))


@dataclass(frozen=True)
class Page(Basenet):
    """The article's settings: Johnson's but for the loss, the optimizer, the network's details and the schedule."""

    epochs: int = option(35, "epochs of a run: the first so many of the schedule, which is not stretched", 1, 35)
    starting_point: bool = option(False, "Page's first version: one norm and ReLU more, and the kink in the rate")

    name = "page"
    reduction = "sum"  # type: ignore[assignment]  # Basenet's is inferred as "mean" alone

    def network(self) -> Network:
        """5,205,834 parameters at width 64; 5,205,962 with the surplus norm."""
        norm = partial(GhostBatchNorm, ghost_batch=self.batch_size)
        return Network(self.width, self.classes, norm, first_norm=self.starting_point, pages=True)

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        rate = (RATE_WITH_KINK if self.starting_point else RATE) * (1 / self.batch_size)
        decay = WEIGHT_DECAY * self.batch_size
        group = {"params": list(network.parameters()), "schedules": {"lr": rate}, "weight_decay": decay}
        return [NesterovSGD([group], SGD_MOMENTUM)]
