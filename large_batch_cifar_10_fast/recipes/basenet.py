"""Ben Johnson, 2018: DAWNBench's first winner below six minutes, a pre-activation ResNet-18 (docs/recipes.md).

One worker of 128 images; 40 epochs, in which the rate rises to 0.1, jumps to 0.105 and falls; torch's Nesterov 0.9,
decay 5e-4 on all parameters; mean cross-entropy; pad 4, independent crops and flips.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..data.shards import CropAndFlip, assign_independent
from ..distributed import DistContext
from ..layers import NARROWEST, GhostBatchNorm, Norm, PreactivationBlock, convolution, norms_of
from ..optim import PiecewiseLinear
from ..recipe import Recipe, option

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

    def network(self) -> "Network":
        return Network(self.width, self.classes, partial(GhostBatchNorm, ghost_batch=self.batch_size))

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        group = {"params": list(network.parameters()), "schedules": {"lr": RATE}}
        return [SGD([group], lr=0.0, momentum=SGD_MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)]


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 5,205,962 parameters and 0.460 G multiply-adds at width 64.

    Page's network has its shortcuts after the activation, and the maximum before the mean.
    """

    def __init__(self, width: int, classes: int, norm: Norm, first_norm: bool = True, pages: bool = False) -> None:
        super().__init__()
        self.prep = nn.Sequential(convolution(3, width, 3), *((norm(width), nn.ReLU()) if first_norm else ()))
        a, b, c = width, 2 * width, 4 * width
        shapes = [(a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 2), (c, c, 1)]
        self.blocks = nn.Sequential(*(PreactivationBlock(*shape, norm, pages) for shape in shapes))
        self.pages = pages
        self.linear = nn.Linear(8 * width, classes)
        for made in norms_of(self):
            nn.init.uniform_(made.get_parameter("weight"))  # as PyTorch's norms did before version 1.2

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.prep(images))
        mean, maximum = F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)
        return self.linear(torch.cat([maximum, mean] if self.pages else [mean, maximum], 1).flatten(1))
