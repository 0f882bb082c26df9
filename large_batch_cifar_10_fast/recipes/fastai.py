"""fast.ai, 2018: super-convergence on eight V100s, a wide ResNet 22-6 under a 1cycle (docs/recipes.md).

Eight workers of 128 images; 40 epochs, rate 0.04, 2, 0.04, 0.0004 at epochs 0, 17.5, 35, 40, momentum 0.95, 0.85, 0.95
at the first three; decay 2e-4 on all parameters; mean cross-entropy; crop, color jitter, small rotations, flip.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import ConfigError
from ..data.shards import CropJitterRotateFlip, assign_independent
from ..distributed import DistContext
from ..layers import NARROWEST, GhostBatchNorm, Norm, PreactivationBlock, convolution
from ..optim import PiecewiseLinear
from ..recipe import Recipe, option


@dataclass(frozen=True)
class Entry:
    """What differs between the two entries to DAWNBench."""

    workers: int
    batch_size: int
    rate: PiecewiseLinear  # it starts, peaks, is back at its first value, and ends
    weight_decay: float


ENTRIES = {
    "eight_gpus": Entry(8, 128, PiecewiseLinear((0, 17.5, 35, 40), (0.04, 2.0, 0.04, 0.0004)), 2e-4),
    "one_gpu": Entry(1, 512, PiecewiseLinear((0, 12, 24, 30), (0.075, 1.5, 0.075, 0.00075)), 1e-4),
}
MOMENTA = (0.95, 0.85, 0.95, 0.95)


@dataclass(frozen=True)
class FastAI(Recipe):
    """The eight-GPU entry, or the other with --entry one_gpu; an option of 0 means the entry's value."""

    entry: str = option("eight_gpus", "which of the two entries", choices=tuple(ENTRIES))
    epochs: int = option(0, "epochs of a run: the first so many of the schedule, which is not stretched; 0: 40, or 30")
    batch_size: int = option(0, "images a worker takes each step; 0: 128, or 512 on one GPU")
    width: int = option(16, "channels of the first convolution; the others scale with it", least=NARROWEST // 6 + 1)

    name = "fastai"
    whole_epochs = True
    reduction = "mean"
    half_weights = False
    loss_scale = 512

    def __post_init__(self) -> None:
        entry = ENTRIES[self.entry]
        last = int(entry.rate.knots[-1])
        object.__setattr__(self, "epochs", self.epochs or last)
        object.__setattr__(self, "batch_size", self.batch_size or entry.batch_size)
        super().__post_init__()
        if self.epochs > last:
            raise ConfigError(f"--epochs {self.epochs} is more than the schedule's {last}")

    @property
    def workers(self) -> int:
        return ENTRIES[self.entry].workers

    @property
    def augmentation(self) -> CropJitterRotateFlip:  # type: ignore[override]
        how: Any = {"padding": 4, "assign": assign_independent, "strength": 0.25, "degrees": 2.0}
        return CropJitterRotateFlip(**how, normalization=self.normalization)

    def network(self) -> "Network":
        return Network(self.width, self.classes, partial(GhostBatchNorm, ghost_batch=self.batch_size))

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        entry = ENTRIES[self.entry]
        schedules = {"lr": entry.rate, "momentum": PiecewiseLinear(entry.rate.knots, MOMENTA)}
        group = {"params": list(network.parameters()), "schedules": schedules}
        return [SGD([group], lr=0.0, momentum=MOMENTA[0], weight_decay=entry.weight_decay)]


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 9,658,458 parameters and 1.385 G multiply-adds at width 16."""

    def __init__(self, width: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.prep = convolution(3, width, 3)
        a, b, c = 6 * width, 12 * width, 24 * width
        shapes = [(width, a, 1), (a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 1)]
        self.blocks = nn.Sequential(*(PreactivationBlock(*shape, norm) for shape in shapes))
        self.tail = nn.Sequential(norm(c), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(c, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")  # N(0, sqrt(2 / (k k channels_out)))
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.tail(self.blocks(self.prep(images))))
