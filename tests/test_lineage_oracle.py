"""The systems of 2018 train and evaluate as stock layers in float64 do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_oracle import check_run
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.page import Page

BATCH, SHARD = 4, 10
MEAN, MAX = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)


class Block(nn.Module):
    """As the issue of each system says it, `identity` being `raw` or `activated`."""

    def __init__(self, c_in, c_out, stride, identity):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        self.from_activated = not same or identity == "activated"

    def forward(self, x):
        a = self.norm1(x).relu()
        y = self.conv2(self.norm2(self.conv1(a)).relu())
        return y + self.shortcut(a if self.from_activated else x)


class Pools(nn.ModuleList):
    def forward(self, x):
        return torch.cat([pool(x).flatten(1) for pool in self], 1)


def stock_resnet18(w, identity, surplus_norm, pools):
    shapes = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1)]
    shapes += [(2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    blocks = [nn.BatchNorm2d(w), nn.ReLU()] * surplus_norm + [Block(*shape, identity) for shape in shapes]
    return nn.Sequential(nn.Conv2d(3, w, 3, padding=1, bias=False), *blocks, Pools(pools), nn.Linear(8 * w, 10))


def stock_wide_resnet(w):
    a, b, c = 6 * w, 12 * w, 24 * w
    shapes = [(w, a, 1), (a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 1)]
    blocks = [*(Block(*shape, "raw") for shape in shapes), nn.BatchNorm2d(c), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, w, 3, padding=1, bias=False), *blocks, Pools([MEAN]), nn.Linear(c, 10))


def torch_nesterov(name, w, g, v, epoch):
    g = g + 5e-4 * w
    v[:] = 0.9 * v + g
    return w - 0.1 * epoch / 15 * (g + 0.9 * v)


def page_nesterov(name, w, g, v, epoch):
    d = -(0.1 * epoch / 15 / BATCH) * (g + 5e-4 * BATCH * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def one_cycle(rate, slope, decay, up):
    def update(name, w, g, v, epoch):
        v[:] = (0.95 - 0.1 * epoch / up) * v + g + decay * w
        return w - (rate + slope * epoch) * v

    return update


PAGES_START = stock_resnet18(16, "activated", True, [MAX, MEAN])
ONE_GPU = one_cycle(0.075, 1.425 / 12, 1e-4, 12)
SYSTEMS = {
    "basenet": (Basenet, {"width": 16}, torch.mean, stock_resnet18(16, "raw", True, [MEAN, MAX]), torch_nesterov),
    "page": (Page, {"width": 16}, torch.sum, stock_resnet18(16, "activated", False, [MAX, MEAN]), page_nesterov),
    "page's start": (Page, {"width": 16, "starting_point": True}, torch.sum, PAGES_START, page_nesterov),
    "fastai": (FastAI, {"width": 3}, torch.mean, stock_wide_resnet(3), one_cycle(0.04, 1.96 / 17.5, 2e-4, 17.5)),
    "fastai, one GPU": (FastAI, {"width": 3, "entry": "one_gpu"}, torch.mean, stock_wide_resnet(3), ONE_GPU),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(system):
    """Two epochs of two full batches and a short one."""
    kind, options, reduce, reference, update = SYSTEMS[system]
    recipe = kind(epochs=2, batch_size=BATCH, **options)
    images = Images("shapes", *draw_shapes(SHARD * recipe.workers + recipe.workers // 2, 40))
    losses, steps = partial(F.cross_entropy, reduction="none"), 2 * [[(4, 32), (4, 32), (2, 32)]]
    check_run(recipe, reference, update, losses, reduce, images, steps)
