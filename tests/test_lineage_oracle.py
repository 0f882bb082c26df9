"""The systems of 2018 train and evaluate as stock layers in float64 do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, Recorder
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipe import reset
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, train_once

BATCH, SHARD, EPOCHS, SEED = 4, 10, 2, 5


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


class Stock(nn.Module):
    """A network of stock layers, made in the order of ours, so that weights can be copied one by one."""

    def __init__(self, first, blocks, tail, pools, features):
        super().__init__()
        self.first, self.blocks, self.tail, self.pools = first, blocks, tail, pools
        self.linear = nn.Linear(features, 10)

    def forward(self, x):
        x = self.tail(self.blocks(self.first(x)))
        return self.linear(torch.cat([pool(x) for pool in self.pools], 1))


def mean(x):
    return x.mean((2, 3))


def maximum(x):
    return x.amax((2, 3))


def stock_resnet18(w, identity, surplus_norm, pools):
    first = [nn.Conv2d(3, w, 3, padding=1, bias=False)] + [nn.BatchNorm2d(w), nn.ReLU()] * surplus_norm
    shapes = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1)]
    shapes += [(2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    blocks = nn.Sequential(*[Block(*shape, identity) for shape in shapes])
    return Stock(nn.Sequential(*first), blocks, nn.Identity(), pools, 8 * w)


def stock_wide_resnet(w):
    a, b, c = 6 * w, 12 * w, 24 * w
    shapes = [(w, a, 1), (a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 1)]
    blocks = nn.Sequential(*[Block(*shape, "raw") for shape in shapes])
    tail = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU())
    return Stock(nn.Conv2d(3, w, 3, padding=1, bias=False), blocks, tail, [mean], c)


def torch_nesterov(w, g, v, epoch):
    g = g + 5e-4 * w
    v[:] = 0.9 * v + g
    return w - 0.1 * epoch / 15 * (g + 0.9 * v)


def page_nesterov(w, g, v, epoch):
    d = -(0.1 * epoch / 15 / BATCH) * (g + 5e-4 * BATCH * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def one_cycle(rate, slope, decay, up):
    def update(w, g, v, epoch):
        v[:] = (0.95 - 0.1 * epoch / up) * v + g + decay * w
        return w - (rate + slope * epoch) * v

    return update


PAGES_START = stock_resnet18(16, "activated", True, [maximum, mean])
ONE_GPU = one_cycle(0.075, 1.425 / 12, 1e-4, 12)
SYSTEMS = {
    "basenet": (Basenet, {"width": 16}, "mean", stock_resnet18(16, "raw", True, [mean, maximum]), torch_nesterov),
    "page": (Page, {"width": 16}, "sum", stock_resnet18(16, "activated", False, [maximum, mean]), page_nesterov),
    "page's start": (Page, {"width": 16, "starting_point": True}, "sum", PAGES_START, page_nesterov),
    "fastai": (FastAI, {"width": 3}, "mean", stock_wide_resnet(3), one_cycle(0.04, 1.96 / 17.5, 2e-4, 17.5)),
    "fastai, one GPU": (FastAI, {"width": 3, "entry": "one_gpu"}, "mean", stock_wide_resnet(3), ONE_GPU),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(system):
    """Two epochs of two full batches and a short one, every worker's own, and an evaluation after each."""
    kind, options, reduction, reference, update = SYSTEMS[system]
    recipe = kind(epochs=EPOCHS, batch_size=BATCH, **options)
    ctx = DistContext(0, 1, CPU, recipe.workers)
    images = Images("shapes", *draw_shapes(SHARD * recipe.workers + recipe.workers // 2, 40))
    model = make_model(recipe, ctx, "fp64")
    data, log = prepare(images, model, Clock(ctx.synchronize)), Recorder()
    reset(model.network, recipe, SEED)
    reference = copy.deepcopy(reference).double()
    weights = list(reference.parameters())
    with torch.no_grad():
        for ours, theirs in zip(model.network.parameters(), weights, strict=True):
            theirs.copy_(ours)
    train_once(0, SEED, model, data, make_step(model, data), Clock(ctx.synchronize), log)

    velocities, step = [torch.zeros_like(w) for w in weights], 0
    for epoch in range(1, EPOCHS + 1):
        reference.train()
        sizes = []
        right = total = 0
        for ((x, y),) in data.train.epoch(SEED, epoch):
            step += 1
            sizes.append(len(y) // recipe.workers)
            gradients = [torch.zeros_like(w) for w in weights]
            for worker in range(recipe.workers):
                mine = slice(worker * sizes[-1], (worker + 1) * sizes[-1])
                replica = reference if worker == 0 else copy.deepcopy(reference)  # whose statistics are thrown away
                logits = replica(x[mine])
                loss = F.cross_entropy(logits, y[mine], reduction=reduction)
                grads = torch.autograd.grad(loss, list(replica.parameters()))
                gradients = [a + b / recipe.workers for a, b in zip(gradients, grads, strict=True)]
                right += (logits.argmax(1) == y[mine]).sum().item()
                total += F.cross_entropy(logits, y[mine], reduction="sum").item()
            with torch.no_grad():
                for w, g, v in zip(weights, gradients, velocities, strict=True):
                    w.copy_(update(w, g, v, step / 3))
        assert sizes == [4, 4, 2]
        with torch.no_grad():
            logits = reference.eval()(data.test[0].permute(0, 3, 1, 2))
        score = log.validations[epoch - 1]
        assert score.correct == (logits.argmax(1) == data.test[1]).sum()
        assert score.loss == pytest.approx(F.cross_entropy(logits, data.test[1]).item(), rel=1e-9)
    for ours, theirs in zip(model.network.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert (log.train.correct, log.train.images) == (right, 10 * recipe.workers)
    assert log.train.loss == pytest.approx(total / (10 * recipe.workers), rel=1e-9)
