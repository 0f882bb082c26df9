"""Apple, December 2019: eight workers of 256 images, 94% in about 8 seconds on eight V100s (docs/method.md).

18 epochs; rate 0, 1.5, 0.15 at epochs 0, 3.6, 16; Nesterov 0.9, decay 5e-4 x 1.5 x 256; summed cross-entropy with label
smoothing 0.2; pad 4, balanced crops and flips; test-time augmentation by mirroring.
"""

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ConfigError
from ..data.shards import CropAndFlip, assign_balanced
from ..distributed import DistContext
from ..layers import GhostBatchNorm, MaxPool, Norm, WhiteningConvolution, convolution, whitening_filters
from ..optim import NesterovSGD, PiecewiseLinear
from ..recipe import TWO_VIEWS, Recipe, option

GROUPS = 16  # ghost groups in a worker's batch, whatever the batch
WEIGHT_DECAY = 5e-4  # per image of a batch and unit of the peak rate
BIAS_FACTOR = 64  # multiplies the rate of biases and divides their decay
SGD_MOMENTUM = 0.9
CELU_ALPHA, LOGIT_SCALE = 0.3, 1 / 16

DEMO = {"width": 8, "batch_size": 32, "ghost_batch": 16, "epochs": 7, "ema_ep": 1.0}
DEMO |= {"lr_scaler": 1.0, "lr_scaler_end_fraction": 0.02}


@dataclass(frozen=True)
class Apple2019(Recipe):
    """Apple's options with their published defaults (method, section 4), then ours."""

    lr_scaler: float = option(1.5, "peak of the learning rate; weight decay grows with it", least=1e-9)
    lr_scaler_end_fraction: float = option(0.1, "final learning rate, as a fraction of the peak")
    epochs: int = option(18, "epochs of a run", least=1)
    warmup_fraction: float = option(5.0, "the rate peaks at epochs / warmup_fraction", least=1)
    ema_ep: float = option(2.0, "epochs at the end with a constant rate")
    batch_size: int = option(256, "images a worker takes each step", least=1)
    width: int = option(64, "channels of the first block; the others scale with it", least=1)
    ghost_batch: int = option(0, f"images a norm takes together; 0: a {GROUPS}th of the batch")
    label_smoothing: float = option(0.2, "part of a label that is spread over all classes", most=1)
    eval_stats: str = option("first", "ghost groups whose statistics evaluation uses", choices=("first", "average"))
    workers: int = option(8, "replicas, each with its own shard", least=1)

    name = "apple2019"
    augmentation = CropAndFlip(padding=4, assign=assign_balanced)
    tta = tta_early = TWO_VIEWS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ghost_batch and self.batch_size % GROUPS:
            fitting = max(GROUPS, self.batch_size // GROUPS * GROUPS)
            groups = f"--batch_size {self.batch_size} is not divisible into {GROUPS} ghost groups"
            raise ConfigError(f"{groups}: use {fitting}, or choose --ghost_batch")
        object.__setattr__(self, "ghost_batch", self.ghost_batch or self.batch_size // GROUPS)
        if self.batch_size % self.ghost_batch:
            both = f"--ghost_batch {self.ghost_batch} does not divide --batch_size {self.batch_size}"
            raise ConfigError(f"{both}: use one that does")
        peak, end = self.epochs / self.warmup_fraction, self.epochs - self.ema_ep
        if peak > end:
            late = f"in {self.epochs} epochs the rate peaks at {peak:g} and is constant in the last {self.ema_ep:g}"
            raise ConfigError(f"{late}: use more --epochs, or give --ema_ep of at most {self.epochs - peak:g}")

    def network(self) -> "Network":
        groups = self.batch_size // self.ghost_batch if self.eval_stats == "average" else 1
        norm = partial(GhostBatchNorm, ghost_batch=self.ghost_batch, affine=False, groups=groups)
        return Network(self.width, self.classes, norm)

    def whiten(self, network: nn.Module, images: Tensor) -> None:
        network.get_buffer("whitening.weight").copy_(whitening_filters(images[:10_000], size=3, epsilon=0.01))

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        """Up to the peak, down, then constant, which replaces the averaging of weights.

        The loss is a sum over the batch, so the rate is divided by its size: a mean could round gradients to zero.
        """
        peak, end = self.lr_scaler, self.lr_scaler * self.lr_scaler_end_fraction
        knots = (0, self.epochs / self.warmup_fraction, self.epochs - self.ema_ep)
        rate = PiecewiseLinear(knots, (0, peak, end)) * (1 / self.batch_size)
        decay = WEIGHT_DECAY * self.lr_scaler * self.batch_size
        weights = [weight for weight in network.parameters() if weight.ndim > 1]
        biases = [weight for weight in network.parameters() if weight.ndim == 1]
        groups = [
            {"params": weights, "schedules": {"lr": rate}, "weight_decay": decay},
            {"params": biases, "schedules": {"lr": rate * BIAS_FACTOR}, "weight_decay": decay / BIAS_FACTOR},
        ]
        return [NesterovSGD(groups, SGD_MOMENTUM)]


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 6,570,880 trained parameters at width 64 (method, section 3)."""

    def __init__(self, width: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.prep = nn.Sequential(convolution(27, width, size=1), *norm_celu(width, norm))
        self.layer1 = nn.Sequential(conv_pool_norm(width, 2 * width, norm), Residual(2 * width, norm))
        self.layer2 = conv_pool_norm(2 * width, 4 * width, norm)
        self.layer3 = nn.Sequential(conv_pool_norm(4 * width, 8 * width, norm), Residual(8 * width, norm))
        self.head = nn.Sequential(MaxPool(4), nn.Flatten(), nn.Linear(8 * width, classes, bias=False))
        self.whitening = WhiteningConvolution(3, 27, size=3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        mix, norm, celu = self.prep
        channels = 32 if images.is_cuda else 27
        x = whiten_and_mix(images, self.whitening.weight, mix.weight, channels)  # type: ignore[arg-type]  # a Tensor
        return self.head(self.layer3(self.layer2(self.layer1(celu(norm(x)))))) * LOGIT_SCALE


def whiten_and_mix(images: Tensor, filters: Tensor, weight: Tensor, channels: int) -> Tensor:
    """Convolve with the whitening filters [27, 3, 3, 3], then with a 1x1 `weight` [width, 27, 1, 1].

    `channels` above 27 are zeros: tensor cores need multiples of 8.
    """
    if zeros := channels - len(filters):
        filters, weight = F.pad(filters, (0, 0, 0, 0, 0, 0, 0, zeros)), F.pad(weight, (0, 0, 0, 0, 0, zeros))
    return F.conv2d(F.conv2d(images, filters, padding=1), weight)


class Residual(nn.Module):
    """x + g(f(x)), where f and g are convolution, norm, CELU; no activation after the sum."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        blocks = [(convolution(channels, channels), *norm_celu(channels, norm)) for _ in range(2)]
        self.branch = nn.Sequential(*blocks[0], *blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def conv_pool_norm(channels_in: int, channels_out: int, norm: Norm) -> nn.Sequential:
    """Return convolution, pooling, norm, CELU; pooling first leaves a quarter of the work to the norm."""
    return nn.Sequential(convolution(channels_in, channels_out), MaxPool(2), *norm_celu(channels_out, norm))


def norm_celu(channels: int, norm: Norm) -> tuple[nn.Module, nn.Module]:
    return norm(channels), nn.CELU(CELU_ALPHA)
