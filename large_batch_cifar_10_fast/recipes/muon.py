"""Muon, 2024 to 2026: the least work to 94%, a small network with orthogonalized updates (docs/recipes.md).

2000 images a step over all workers; 9 epochs, rates falling linearly to 0; summed cross-entropy with label smoothing;
crop, alternating flip; four epochs at 24 pixels, five at 32, the last four of them without the easiest third of the
images; test-time augmentation with six views.
"""

import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import ConfigError
from ..data.shards import CropAndFlip, assign_independent
from ..distributed import DistContext
from ..layers import Convolution, GhostBatchNorm, MaxPool, Norm, WhiteningConvolution, whitening_filters
from ..optim import Muon, PiecewiseLinear
from ..recipe import ONE_VIEW, SIX_VIEWS, TWO_VIEWS, Recipe, Stage, option, same_option

STEP_IMAGES, EPOCH_IMAGES = 2000, 50_000
WEIGHT_DECAY = 2e-6  # of biases and head: per image of a step, over the group's rate
LOGIT_SCALE = 1 / 256
VIEWS = {"one": ONE_VIEW, "two": TWO_VIEWS, "six": SIX_VIEWS}


@dataclass(frozen=True)
class MuonRecipe(Recipe):
    """Our own settings; --recipe muon2024 has those it started from."""

    epochs: int = option(9, "epochs of a run, over which the rates fall", least=1)
    batch_size: int = option(0, f"images a worker takes each step; 0: {STEP_IMAGES} divided by the workers")
    width: int = option(64, "channels of the first block; the others have four times as many", least=1)
    pixels: str = option("24,24,24,24,32,32,32,32,32", "resolutions, spread evenly over the epochs")
    kept: str = option(
        "1,1,1,1,1,0.68,0.68,0.68,0.68",
        "fractions of the images, likewise; an epoch trains on those with the highest loss when last seen",
    )
    filter_rate: float = option(0.24, "Muon's initial rate, for the filters", least=1e-9)
    filter_momentum: float = option(0.6, "Muon's momentum", most=1)
    bias_rate: float = option(0.053, "SGD's initial rate for biases", least=1e-9)
    head_rate: float = option(0.67, "SGD's initial rate for the last layer", least=1e-9)
    momentum: float = option(0.85, "SGD's momentum", least=1e-9, most=1)
    whitening_epochs: int = option(
        -1, "epochs after which the whitening's bias is frozen; -1: 1 of 9 (muon2024: 3 of 8)", least=-1
    )
    label_smoothing: float = option(0.2, "part of a label that is spread over all classes", most=1)
    norm_momentum: float = option(0.4, "weight of a new batch in the running statistics", most=1)
    views: str = option("six", "views of a test image after the last epoch", choices=tuple(VIEWS))
    workers: int = option(1, "replicas, each with its own shard", least=1)

    name = "muon"
    augmentation = CropAndFlip(padding=2, assign=assign_independent, alternate=True)
    half = "bf16"
    half_weights = False
    whitening_share = 1 / 9  # of the epochs

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tta", VIEWS[self.views])
        if self.whitening_epochs < 0:
            object.__setattr__(self, "whitening_epochs", max(1, round(self.epochs * self.whitening_share)))
        if self.whitening_epochs > self.epochs:
            raise ConfigError(f"--whitening_epochs {self.whitening_epochs} is more than --epochs {self.epochs}")
        if not self.batch_size and STEP_IMAGES % self.workers:
            raise ConfigError(f"--workers {self.workers} does not divide {STEP_IMAGES} images: choose --batch_size")
        object.__setattr__(self, "batch_size", self.batch_size or STEP_IMAGES // self.workers)
        if self.batch_size == 1:
            raise ConfigError("a worker's batch of one image is too small for its norms: use a larger --batch_size")
        if not all(9 <= pixels <= 32 for pixels in self._listed("pixels", int)):
            raise ConfigError(f"--pixels {self.pixels}: sizes must lie in 9 to 32, or three poolings leave nothing")
        if not all(0 < share <= 1 for share in self._listed("kept", float)):
            raise ConfigError(f"--kept {self.kept}: shares must lie above 0, and at most be 1")

    def _listed(self, name: str, number: type) -> list:
        try:
            if re.search(r"\s", text := getattr(self, name)):  # options in a log are told apart by spaces
                raise ValueError
            return [number(figure) for figure in text.split(",")]
        except ValueError:
            what = "whole numbers, like 24,24,28,32" if number is int else "numbers, like 1,1,0.7"
            raise ConfigError(f"--{name} {getattr(self, name)} is no list of {what}") from None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """A stage for each combination of resolution, fraction of images and frozen whitening bias."""
        lists = self._listed("pixels", int), self._listed("kept", float)

        def settings(epoch: int) -> tuple[int, tuple[str, ...], float]:
            size, share = (figures[(2 * epoch - 1) * len(figures) // (2 * self.epochs)] for figures in lists)
            return size, ("whitening.bias",) if epoch > self.whitening_epochs else (), share

        alike = groupby(range(1, self.epochs + 1), settings)
        return tuple(Stage(next(epochs), *of_stage) for of_stage, epochs in alike)

    def network(self) -> "Network":
        norm = partial(
            GhostBatchNorm, ghost_batch=self.batch_size, affine=False, momentum=self.norm_momentum, eps=1e-12
        )
        return Network(self.width, self.classes, norm)

    def whiten(self, network: nn.Module, images: Tensor) -> None:
        filters = whitening_filters(images[:5000], size=2, epsilon=5e-4)
        both_signs = torch.cat([filters, -filters])  # since the activation suppresses negative values
        network.get_buffer("whitening.weight").copy_(both_signs)

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        """SGD's rates are for the sum of the loss over a step; ours is the mean of the workers' sums."""
        step = self.workers * self.batch_size / EPOCH_IMAGES  # in epochs; rates are those at the end of a step
        falling = PiecewiseLinear((step, self.epochs + step), (1.0, 0.0))
        falling_early = PiecewiseLinear((step, self.whitening_epochs + step), (1.0, 0.0))

        def group(params: list[nn.Parameter], schedule: PiecewiseLinear, rate: float) -> dict:
            decay = WEIGHT_DECAY * self.batch_size / rate
            return {"params": params, "schedules": {"lr": schedule * (rate * self.workers)}, "weight_decay": decay}

        inner, head = list(network.get_submodule("groups").parameters()), network.get_parameter("linear.weight")
        biases = group([weight for weight in inner if weight.ndim == 1], falling, self.bias_rate)
        whitening = group([network.get_parameter("whitening.bias")], falling_early, self.bias_rate)
        sgd = SGD([biases, whitening, group([head], falling, self.head_rate)], momentum=self.momentum, nesterov=True)
        filters = [weight for weight in inner if weight.ndim == 4]
        muon = Muon([{"params": filters, "schedules": {"lr": falling * self.filter_rate}}], self.filter_momentum, ctx)
        return [muon, sgd]


@dataclass(frozen=True)
class Muon2024(MuonRecipe):
    """Airbench's recipe with Muon (2024): 94.01% on one A100 in 2.59 s."""

    epochs: int = same_option(MuonRecipe, "epochs", 8)
    pixels: str = same_option(MuonRecipe, "pixels", "32")
    kept: str = same_option(MuonRecipe, "kept", "1")

    name = "muon2024"
    whitening_share = 3 / 8


class Network(nn.Module):
    """Images [B, 3, H, W] to logits [B, classes]; 1,971,352 trained parameters at width 64, 0.211 GFLOP forward."""

    def __init__(self, width: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.whitening = WhiteningConvolution(3, 24, size=2)
        self.first = nn.GELU()
        channels = ((24, width), (width, 4 * width), (4 * width, 4 * width))
        self.groups = nn.Sequential(*(block(*both, norm) for both in channels))
        self.pool = nn.Sequential(MaxPool(), nn.Flatten())
        self.linear = nn.Linear(4 * width, classes, bias=False)
        with torch.no_grad():
            self.linear.weight /= self.linear.weight.std()

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(self.first(self.whitening(images)))
        return self.linear(self.pool(x)) * LOGIT_SCALE


def block(channels_in: int, channels_out: int, norm: Norm) -> nn.Sequential:
    """Return two convolutions with norms; pooling comes before the first norm."""
    return nn.Sequential(
        dirac_init(Convolution(channels_in, channels_out, pooled=True)),
        MaxPool(2),
        *(norm(channels_out), nn.GELU()),
        dirac_init(Convolution(channels_out, channels_out)),
        *(norm(channels_out), nn.GELU()),
    )


def dirac_init(convolution: Convolution) -> Convolution:
    """Let the first filters be the identity; the others have PyTorch's initialization."""
    nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
    return convolution
