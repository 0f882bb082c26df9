"""fast.ai, 2018: super-convergence on eight V100s, a wide ResNet 22-6 under a 1cycle (docs/recipes.md).

Eight workers of 128 images; 40 epochs, rate 0.04, 2, 0.04, 0.0004 at epochs 0, 17.5, 35, 40, momentum 0.95, 0.85, 0.95
at the first three; decay 2e-4 on all parameters; mean cross-entropy; crop, color jitter, small rotations, flip.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import ConfigError
from ..data.augment import CropJitterRotateFlip, assign_independent
from ..distributed import DistContext
from ..layers import NARROWEST, GhostBatchNorm, Norm, PreactivationBlock, convolution
from ..optim import PiecewiseLinear
from ..recipe import Recipe, check_limits, option


@dataclass(frozen=True)
class Entry:
    """What differs between the two entries to DAWNBench."""

    workers: int
    batch_size: int
    knots: tuple[float, ...]  # epochs at which the rate starts, peaks, is back at its first value, and ends
    rates: tuple[float, ...]
    weight_decay: float


ENTRIES = {
    "eight_gpus": Entry(8, 128, (0, 17.5, 35, 40), (0.04, 2.0, 0.04, 0.0004), 2e-4),
    "one_gpu": Entry(1, 512, (0, 12, 24, 30), (0.075, 1.5, 0.075, 0.00075), 1e-4),
}
MOMENTA = (0.95, 0.85, 0.95, 0.95)


@dataclass(frozen=True)
class FastAI(Recipe):
    """The eight-GPU entry, or the other with --entry one_gpu; an option of 0 means the entry's value."""

    entry: str = option("eight_gpus", "which of the two entries", choices=tuple(ENTRIES))
    epochs: int = option(0, "epochs of a run: the first so many of the schedule, which is not stretched; 0: 40, or 30")
    batch_size: int = option(0, "images a worker takes each step; 0: 128, or 512 on one GPU")
    width: int = option(
        16, "channels of the first convolution; the others scale with it", least=math.ceil(NARROWEST / 6)
    )

    name = "fastai"
    whole_epochs = True
    reduction = "mean"
    half_weights = False
    loss_scale = 512

    def __post_init__(self) -> None:
        entry = ENTRIES[self.entry]
        object.__setattr__(self, "epochs", self.epochs or entry.knots[-1])
        object.__setattr__(self, "batch_size", self.batch_size or entry.batch_size)
        check_limits(self)
        if self.epochs > entry.knots[-1]:
            raise ConfigError(f"--epochs {self.epochs} is more than the schedule's {entry.knots[-1]}")

    @property
    def workers(self) -> int:
        return ENTRIES[self.entry].workers

    @property
    def augmentation(self) -> CropJitterRotateFlip:  # type: ignore[override]
        return CropJitterRotateFlip(4, assign_independent, strength=0.25, degrees=2.0, normalization=self.normalization)

    def network(self) -> "Network":
        return Network(self.width, self.classes, partial(GhostBatchNorm, ghost_batch=self.batch_size))

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        entry = ENTRIES[self.entry]
        schedules = {"lr": PiecewiseLinear(entry.knots, entry.rates), "momentum": PiecewiseLinear(entry.knots, MOMENTA)}
        group = {"params": list(network.parameters()), "schedules": schedules}
        return [SGD([group], lr=0.0, momentum=MOMENTA[0], weight_decay=entry.weight_decay)]


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 9,658,458 parameters and 1.385 G multiply-adds at width 16."""

    def __init__(self, width: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.prep = convolution(3, width, 3)
        channels, strides = (width, 6 * width, 12 * width, 24 * width), (1, 2, 2)
        blocks = []
        for (channels_in, channels_out), stride in zip(pairwise(channels), strides, strict=True):
            blocks.append(PreactivationBlock(channels_in, channels_out, stride, norm, shortcut_after_activation=False))
            for _ in range(2):
                blocks.append(PreactivationBlock(channels_out, channels_out, 1, norm, shortcut_after_activation=False))
        self.blocks = nn.Sequential(*blocks)
        self.tail = nn.Sequential(norm(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")  # N(0, sqrt(2 / (k k channels_out)))
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.tail(self.blocks(self.prep(images))))
