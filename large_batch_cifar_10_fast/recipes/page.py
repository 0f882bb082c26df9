"""David Page, 2018: Johnson's network reproduced, its surplus norm and kink removed (docs/recipes.md).

One worker of 128 images; 35 epochs, rate 0, 0.1, 0.005, 0 at epochs 0, 15, 30, 35; Nesterov 0.9 with the rate inside
the velocity, decay 5e-4 x 128; summed cross-entropy, the rate divided by 128; pad 4, independent crops and flips.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from ..data.augment import CropAndFlip, assign_independent
from ..distributed import DistContext
from ..layers import TOO_NARROW, GhostBatchNorm
from ..metrics import ONE_VIEW
from ..optim import NesterovSGD, PiecewiseLinear
from ..options import MOST, check_positive, check_within, option
from ..recipe import Recipe, Stage
from .basenet import Network

RATE = PiecewiseLinear((0, 15, 30, 35), (0, 0.1, 0.005, 0))
RATE_WITH_KINK = PiecewiseLinear((0, 15, 15, 30, 35), (0, 0.1, 0.105, 0.005, 0))
SCHEDULED = 35  # epochs
SGD_MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Page(Recipe):
    """The article's settings; a batch of another size does not change the rate."""

    epochs: int = option(SCHEDULED, "epochs of a run: the first so many of the schedule, which is not stretched")
    batch_size: int = option(128, "images of a step")
    width: int = option(64, "channels of the first stage; the others scale with it")
    starting_point: bool = option(False, "Page's first version: one norm and ReLU more, and the kink in the rate")

    name: ClassVar = "page"
    workers: ClassVar = 1
    augmentation: ClassVar = CropAndFlip(padding=4, assign=assign_independent)
    whole_epochs: ClassVar = True
    reduction: ClassVar = "sum"
    half: ClassVar = "fp16"
    half_weights: ClassVar = True
    loss_scale: ClassVar = 1
    stages: ClassVar = (Stage(),)
    tta: ClassVar = ONE_VIEW
    tta_early: ClassVar = ONE_VIEW

    def __post_init__(self) -> None:
        check_positive(self, "batch_size")
        check_within(self, "epochs", 1, SCHEDULED, "the schedule has no more")
        check_within(self, "width", 16, MOST, TOO_NARROW)

    def network(self) -> Network:
        """5,205,834 parameters at width 64; 5,205,962 with the surplus norm."""
        return Network(
            self.width,
            partial(GhostBatchNorm, ghost_batch=self.batch_size),
            first_norm=self.starting_point,
            shortcut_after_activation=True,
            pools=(F.adaptive_max_pool2d, F.adaptive_avg_pool2d),
        )

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        rate = (RATE_WITH_KINK if self.starting_point else RATE) * (1 / self.batch_size)
        decay = WEIGHT_DECAY * self.batch_size
        group = {"params": list(network.parameters()), "schedules": {"lr": rate}, "weight_decay": decay}
        return [NesterovSGD([group], SGD_MOMENTUM)]
