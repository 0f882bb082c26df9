"""Ben Johnson, 2018: DAWNBench's first winner below six minutes, a pre-activation ResNet-18 (docs/recipes.md).

One worker of 128 images; 40 epochs, in which the rate rises to 0.1, jumps to 0.105 and falls; torch's Nesterov 0.9,
decay 5e-4 on all parameters; mean cross-entropy; pad 4, independent crops and flips.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..data.augment import CropAndFlip, assign_independent
from ..distributed import DistContext
from ..layers import NARROWEST, GhostBatchNorm, Norm, PreactivationBlock, convolution, norms_of
from ..optim import PiecewiseLinear
from ..recipe import Recipe, check_limits, option

RATE = PiecewiseLinear((0, 15, 15, 30, 35, 35), (0, 0.1, 0.105, 0.005, 0, 0.0005))
SGD_MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Basenet(Recipe):
    """The entry's settings; a batch of another size does not change the rate."""

    epochs: int = option(40, "epochs of a run: the first so many of the schedule, which is not stretched", 1, 40)
    batch_size: int = option(128, "images of a step", least=1)
    width: int = option(64, "channels of the first stage; the others scale with it", least=NARROWEST)

    name = "basenet"
    workers = 1
    augmentation = CropAndFlip(padding=4, assign=assign_independent)
    whole_epochs = True
    reduction = "mean"

    def __post_init__(self) -> None:
        check_limits(self)

    def network(self) -> "Network":
        return Network(self.width, self.classes, partial(GhostBatchNorm, ghost_batch=self.batch_size))

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        group = {"params": list(network.parameters()), "schedules": {"lr": RATE}}
        return [SGD([group], lr=0.0, momentum=SGD_MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)]


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 5,205,962 parameters and 0.460 G multiply-adds at width 64."""

    def __init__(
        self,
        width: int,
        classes: int,
        norm: Norm,
        first_norm: bool = True,
        shortcut_after_activation: bool = False,
        pools: tuple[Callable[[Tensor, int], Tensor], ...] = (F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    ) -> None:
        super().__init__()
        self.prep = nn.Sequential(convolution(3, width, 3), *((norm(width), nn.ReLU()) if first_norm else ()))
        channels, strides = (width, width, 2 * width, 4 * width, 4 * width), (1, 2, 2, 2)
        blocks = []
        for (channels_in, channels_out), stride in zip(pairwise(channels), strides, strict=True):
            blocks.append(PreactivationBlock(channels_in, channels_out, stride, norm, shortcut_after_activation))
            blocks.append(PreactivationBlock(channels_out, channels_out, 1, norm, shortcut_after_activation))
        self.blocks = nn.Sequential(*blocks)
        self.pools = pools
        self.linear = nn.Linear(8 * width, classes)
        for made in norms_of(self):
            if made.weight is not None:
                nn.init.uniform_(made.weight)  # as PyTorch's norms did before version 1.2

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.prep(images))
        return self.linear(torch.cat([pool(x, 1) for pool in self.pools], 1).flatten(1))
