"""Page's recipe of 2018, and Johnson's, from which it started: a pre-activation ResNet-18
(docs/recipes.md#basenet-page-fastai).

    bash train_cifar_parallel.sh --recipe page                      # Page's network and schedule
    bash train_cifar_parallel.sh --recipe page --starting_point     # with one more norm, and a jump of the rate
    bash train_cifar_parallel.sh --recipe basenet                   # Johnson's, DAWNBench's first below six minutes

Both train one worker with batches of 128. David Page's network differs from Ben Johnson's in its shortcuts and in the
order of its pooling. Page also removed the first norm and the jump of the rate at epoch 15. His loss is a sum, so his
rate is divided by the batch size.

To try an idea, copy this file, edit it, and train it with `--recipe FILE.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from large_batch_cifar_10_fast import check_range
from large_batch_cifar_10_fast.core import data, layers
from large_batch_cifar_10_fast.core.hyp import BaseHyp
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.model import Model, keep_rates_on_gpu
from large_batch_cifar_10_fast.core.optim import NesterovSGD, interpolate, set_rate
from large_batch_cifar_10_fast.core.preactivation import NARROWEST, PreactivationBlock
from large_batch_cifar_10_fast.core.precision import Precision, at_least_float32, move
from large_batch_cifar_10_fast.core.score import Epoch, read_score, sums_of
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Basenet(BaseHyp):
    """Johnson's settings. The rate does not depend on the batch size."""

    epochs: int = 40  # epochs to train; fewer end the fixed schedule early
    batch_size: int = 128  # images of a step
    width: int = 64  # channels of the first stage; the others scale with it

    by_page: ClassVar = False  # a constant, not an option

    def __post_init__(self) -> None:
        check_range(self, 1, type(self).epochs, "epochs")
        check_range(self, 1, 100_000, "batch_size")
        check_range(self, NARROWEST, 100_000, "width")

    @property
    def first_norm(self) -> bool:
        """Whether a norm and a ReLU follow the first convolution."""
        return True


@dataclass(frozen=True)
class Hyp(Basenet):
    """Page's settings."""

    epochs: int = 35  # epochs to train; fewer end the fixed schedule early
    starting_point: bool = False  # Page's first version: one more norm and ReLU, and the jump of the rate

    by_page = True

    @property
    def first_norm(self) -> bool:
        return self.starting_point


SETS = {"basenet": Basenet}

# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 4  # pixels by which a crop is shifted, at most


def plan_epoch(hyp: Basenet, images: int, device: torch.device, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step: indices of images, crops and flips, int64 [3, batch_size].

    All images are used: the remaining ones form a short last batch.
    """
    draws = data.generator(device, seed, 0, epoch)
    crops = data.independent_assignment(images, (2 * PADDING + 1) ** 2, draws)
    flips = data.independent_assignment(images, 2, draws)
    order = torch.randperm(images, generator=draws, device=device)
    plan = torch.stack([order, crops[order], flips[order]])
    steps, remaining = divmod(images, hyp.batch_size)
    return data.split_into_steps([plan], steps, hyp.batch_size, remaining)


def make_batch(images: Tensor, labels: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return augmented images [B, 3, 32, 32], channels-last, and their labels [B]."""
    rows, crops, flips = batch
    return data.crop_and_flip(images, rows, crops, flips, PADDING), labels[rows]


# ---------------------------------------------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 0.460 G multiply-adds at width 64.

    Page's network has 5,205,834 parameters. Johnson's and Page's starting point have a first norm with 128 more.
    """

    def __init__(self, hyp: Basenet, classes: int) -> None:
        super().__init__()
        a = hyp.width
        b = 2 * a
        c = 4 * a
        norm = partial(layers.GhostBatchNorm, scaled=True)  # over the whole batch
        block = partial(PreactivationBlock, norm=norm, activation=F.relu, shortcut_after_activation=hyp.by_page)
        first = [norm(a), nn.ReLU()] if hyp.first_norm else []
        self.prep = nn.Sequential(layers.convolution(3, a), *first)
        self.blocks = nn.Sequential(
            block(a, a, stride=1),
            block(a, a, stride=1),
            block(a, b, stride=2),
            block(b, b, stride=1),
            block(b, c, stride=2),
            block(c, c, stride=1),
            block(c, c, stride=2),
            block(c, c, stride=1),
        )
        self.maximum = layers.MaxPool()  # over the whole image
        self.maximum_first = hyp.by_page
        self.linear = nn.Linear(2 * c, classes)
        for made in layers.ghost_norms(self):
            nn.init.uniform_(made.get_parameter("weight"))  # PyTorch's default before version 1.2

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.prep(images))
        mean = F.adaptive_avg_pool2d(x, 1)
        maximum = self.maximum(x)
        both = [maximum, mean] if self.maximum_first else [mean, maximum]
        return self.linear(torch.cat(both, 1).flatten(1))


# ---------------------------------------------------------------------------------------------------------------------
# Loss and optimizer
# ---------------------------------------------------------------------------------------------------------------------

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4  # for all parameters; Page multiplies it by the batch size


def losses_of(hyp: BaseHyp, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B], in float32 at least."""
    return F.cross_entropy(at_least_float32(logits), labels, reduction="none")


def make_optimizer(hyp: Basenet, network: Network, team: Team) -> Optimizer:
    """Return Nesterov momentum: torch's for Johnson, with the rate inside the velocity for Page."""
    weights = list(network.parameters())
    optimizer: Optimizer
    if hyp.by_page:
        optimizer = NesterovSGD([{"params": weights, "weight_decay": WEIGHT_DECAY * hyp.batch_size}], MOMENTUM)
    else:
        optimizer = SGD(weights, lr=0.0, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)
    keep_rates_on_gpu([optimizer], team)
    return optimizer


def learning_rate(hyp: Basenet, epoch: float) -> float:
    """Return the rate at a time in epochs."""
    if not hyp.by_page:  # it jumps at epoch 15, and again at 35
        return interpolate(epoch, (0, 15, 15, 30, 35, 35), (0, 0.1, 0.105, 0.005, 0, 0.0005))
    image = 1 / hyp.batch_size  # Page's loss is a sum over the batch
    if hyp.first_norm:  # Page's starting point
        return interpolate(epoch, (0, 15, 15, 30, 35), (0, 0.1 * image, 0.105 * image, 0.005 * image, 0))
    return interpolate(epoch, (0, 15, 30, 35), (0, 0.1 * image, 0.005 * image, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate
    sums: Tensor  # [3]
    statistics: list[Tensor]  # the norms' statistics of this batch


def forward_pass(hyp: Basenet, network: Network, precision: Precision, images: Tensor, labels: Tensor) -> Pass:
    with precision.autocast():
        logits = network(images)
    losses = losses_of(hyp, logits, labels)
    loss = losses.sum() if hyp.by_page else losses.sum() / len(losses)
    return Pass(loss, sums_of(logits, labels, losses), layers.batch_statistics(network))


def train(hyp: Basenet, images: data.Images, machine: Machine) -> Callable[[int], Iterator[Epoch]]:
    """Set up what all runs share. Return run(seed), which trains a network and yields after each epoch."""
    team = machine.team
    precision = machine.choose_precision(hyp.gpu_precision, half_weights=True)
    train_images = len(images.train_images)
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # correct images, images, sum of losses

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes)
        move(network, precision)
        return network, [make_optimizer(hyp, network, team)]

    model = Model(fresh)
    network = model.network
    (optimizer,) = model.optimizers

    def train_step(batch: Tensor) -> None:
        """Update the weights once. On a GPU a CUDA graph replays it."""
        result = machine.forward(*machine.make_batch(batch))
        result.loss.backward()
        layers.update_running_statistics(network, result.statistics)
        sums.add_(result.sums)
        optimizer.step()
        optimizer.zero_grad()

    losses = partial(losses_of, hyp)
    forward = partial(forward_pass, hyp, network, precision)
    load = partial(data.upload, team=team, precision=precision)
    first_epoch = plan_epoch(hyp, train_images, team.device, seed=0, epoch=1)
    examples = [(batch,) for batch in {batch.shape: batch for batch in first_epoch}.values()]  # the last may be short
    # Of the set-up only `load` is timed (docs/method.md, section 6), not compilation, warm-up or graph capture.
    machine.set_up(images, model, make_batch, forward, load, train_step, examples)

    def run(seed: int) -> Iterator[Epoch]:
        machine.restart(model, seed)
        for epoch in range(1, hyp.epochs + 1):
            with machine.clock.timed("training"):
                sums.zero_()
                plan = plan_epoch(hyp, train_images, team.device, seed, epoch)
                for number, batch in enumerate(plan, 1):
                    set_rate(optimizer.param_groups[0], learning_rate(hyp, epoch - 1 + number / len(plan)))
                    machine.step(batch)
            with machine.clock.timed("validation"):  # shown, but not part of the training time
                validation = machine.evaluate(network, losses, hyp.views)
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
