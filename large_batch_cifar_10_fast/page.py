"""David Page, 2018, and Ben Johnson, from whom he started: a pre-activation ResNet-18
(docs/recipes.md#basenet-page-fastai).

    bash train_cifar_parallel.sh --recipe page                      # Page's network and schedule
    bash train_cifar_parallel.sh --recipe page --starting_point     # with a norm more, and a kink in the rate
    bash train_cifar_parallel.sh --recipe basenet                   # Johnson's, DAWNBench's first below six minutes

One worker of 128 images. Page's network differs from Johnson's in its shortcuts and in the order of its pooling. He
removed the first norm and the kink in the rate. His loss is a sum, so his rate is divided by the batch size.

To try an idea, copy this file, edit it, and train it by `--recipe FILE.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from large_batch_cifar_10_fast.core import data, fast, layers
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.core.log import Log, Score, read_score, sums_of
from large_batch_cifar_10_fast.core.optim import NesterovSGD, interpolate, set_rate
from large_batch_cifar_10_fast.core.options import Options, check_range
from large_batch_cifar_10_fast.core.program import main
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Basenet:
    """Johnson's settings; a batch of another size does not change the rate."""

    epochs: int = 40  # the first so many of the schedule, which is not stretched
    batch_size: int = 128  # images of a step
    width: int = 64  # channels of the first stage; the others scale with it

    # Without a type these are no options.
    half = "fp16"  # precision on a GPU
    by_page = False
    starting_point = False

    def __post_init__(self) -> None:
        check_range(self, 1, type(self).epochs, "epochs")
        check_range(self, 1, 100_000, "batch_size")
        check_range(self, layers.NARROWEST, 100_000, "width")

    @property
    def first_norm(self) -> bool:
        """Whether a norm and a ReLU follow the first convolution."""
        return self.starting_point or not self.by_page


@dataclass(frozen=True)
class Hyp(Basenet):
    """Page's settings."""

    epochs: int = 35  # the first so many of the schedule, which is not stretched
    starting_point: bool = False  # Page's first version: one norm and ReLU more, and the kink in the rate

    by_page = True


SETS = {"basenet": Basenet}

# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 4  # pixels by which a crop is shifted, at most


def plan_epoch(hyp: Basenet, images: int, device: torch.device, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step: which of so many images, crops and flips, int64 [3, batch_size].

    All images are used: those that fill no batch make a short last one.
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

    Page's has 5,205,834 parameters. The first norm, in Johnson's and in Page's starting point, adds 128.
    """

    def __init__(self, hyp: Basenet, classes: int) -> None:
        super().__init__()
        a = hyp.width
        b = 2 * a
        c = 4 * a
        norm = partial(layers.GhostBatchNorm, scaled=True)  # over the whole batch
        block = partial(layers.PreactivationBlock, norm=norm, activation=F.relu, shortcut_after_activation=hyp.by_page)
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
            nn.init.uniform_(made.get_parameter("weight"))  # as PyTorch's norms did before version 1.2

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
WEIGHT_DECAY = 5e-4  # of all parameters; Page's is per image of a batch


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B], in float32 at least."""
    return F.cross_entropy(fast.at_least_float32(logits), labels, reduction="none")


def make_optimizer(hyp: Basenet, network: Network, team: Team) -> Optimizer:
    """Return Nesterov: torch's for Johnson, for Page with the rate inside the velocity."""
    weights = list(network.parameters())
    optimizer: Optimizer
    if hyp.by_page:
        optimizer = NesterovSGD([{"params": weights, "weight_decay": WEIGHT_DECAY * hyp.batch_size}], MOMENTUM)
    else:
        optimizer = SGD(weights, lr=0.0, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)
    fast.keep_rates_on_gpu([optimizer], team)
    return optimizer


def learning_rate(hyp: Basenet, epoch: float) -> float:
    """Return the rate at a time in epochs."""
    if not hyp.by_page:  # it jumps at epoch 15, and again at 35
        return interpolate(epoch, (0, 15, 15, 30, 35, 35), (0, 0.1, 0.105, 0.005, 0, 0.0005))
    image = 1 / hyp.batch_size  # Page's loss is a sum over the batch
    if hyp.starting_point:
        return interpolate(epoch, (0, 15, 15, 30, 35), (0, 0.1 * image, 0.105 * image, 0.005 * image, 0))
    return interpolate(epoch, (0, 15, 30, 35), (0, 0.1 * image, 0.005 * image, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate
    sums: Tensor  # [3]
    statistics: list[Tensor]  # of the norms


def forward_pass(hyp: Basenet, network: Network, precision: fast.Precision, images: Tensor, labels: Tensor) -> Pass:
    with precision.autocast():
        logits = network(images)
    losses = losses_of(logits, labels)
    loss = losses.sum() if hyp.by_page else losses.sum() / len(losses)
    return Pass(loss, sums_of(logits, labels, losses), layers.batch_statistics(network))


def train(hyp: Basenet, options: Options, images: data.Images, team: Team, log: Log) -> None:
    """Make the missing runs of a campaign."""
    precision = fast.Precision(options.precision, team.device, half_weights=True)
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # of an epoch
    plan_for = partial(plan_epoch, hyp, len(images.train_images), team.device)

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes)
        fast.place(network, precision)
        return network, [make_optimizer(hyp, network, team)]

    network, (optimizer,) = fresh()
    restart = partial(fast.restart, network, [optimizer], fresh, team)
    calls = fast.Functions(  # later those that are compiled
        forward=partial(forward_pass, hyp, network, precision),
        predict=partial(fast.predict, network),
        make_batch=make_batch,
        compiled=False,
    )

    def kinds() -> Iterator[tuple[Tensor]]:
        """Make the network fresh, and yield what each kind of step takes: a full batch, and the short last one."""
        restart(seed=0)
        for batch in data.one_of_each_shape(plan_for(seed=0, epoch=1)):
            yield (batch,)

    # On a GPU this is a CUDA graph: Python does not run again, so a counter or another momentum in it stands still.
    def train_step(shards: data.Shards, batch: Tensor) -> None:
        """Update the weights once."""
        made = calls.forward(*calls.make_batch(shards.images, shards.labels, batch))
        made.loss.backward()
        layers.update_running_statistics(network, made.statistics)
        sums.add_(made.sums)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(shards: data.Shards) -> Score:
        """Return the score on the test images."""
        with fast.evaluating(network, precision, team):
            logits = torch.cat([calls.predict(chunk) for chunk in fast.chunks(shards.test_images)])
        losses = losses_of(logits, shards.test_labels)
        return read_score(sums_of(logits, shards.test_labels, losses), team)

    # Not timed: compiling, and a step of each kind, which chooses kernels; on noise.
    noise = data.upload(data.noise_like(images, team), team, precision, Clock(team.synchronize))
    if options.compile:
        calls = fast.compile_all(calls, network, [optimizer], kinds, noise, options.micro_batches, precision, team)
    if not options.no_warmup:
        for (batch,) in kinds():
            train_step(noise, batch)
        evaluate(noise)
    del noise

    shards = data.upload(images, team, precision, log.clock)  # timed, as is each epoch's training
    # Not timed: the capture of CUDA graphs, after trial steps on these images. `restart` makes weights fresh again.
    step = fast.graph(partial(train_step, shards), kinds(), team, enabled=not options.no_graph)
    log.ready(hyp.epochs * [len(images.train_images)], calls.compiled, graphs=isinstance(step, fast.CudaGraphs))
    for seed in log.missing_runs():
        restart(seed=seed)
        for epoch in range(1, hyp.epochs + 1):
            with log.clock.timed("training"):
                sums.zero_()
                plan = plan_for(seed=seed, epoch=epoch)
                for number, batch in log.progress(plan):
                    set_rate(optimizer.param_groups[0], learning_rate(hyp, epoch - 1 + number / len(plan)))
                    step(batch)
            with log.clock.timed("validation"):  # shown, but not part of the training time
                validation = evaluate(shards)
            if not log.epoch(read_score(sums, team), validation):
                break
        log.finish(network.state_dict())


if __name__ == "__main__":
    main()
