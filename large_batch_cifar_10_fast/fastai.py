"""fast.ai, 2018: super-convergence, a wide ResNet 22-6 under a 1cycle of rate and momentum
(docs/recipes.md#basenet-page-fastai).

    bash train_cifar_parallel.sh --recipe fastai                    # the entry on eight V100s: 8 workers of 128 images
    bash train_cifar_parallel.sh --recipe fastai --entry one_gpu    # the entry on one: 1 worker of 512

Large learning rates regularize. The rate rises slowly while the momentum falls, then falls as slowly
(docs/why_it_is_fast.md#learning-rates).

To try an idea, copy this file, edit it, and train it with `--recipe FILE.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from large_batch_cifar_10_fast import check_range
from large_batch_cifar_10_fast.core import data, layers
from large_batch_cifar_10_fast.core.hyp import BaseHyp
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.model import Model, keep_rates_on_gpu
from large_batch_cifar_10_fast.core.optim import interpolate, set_rate
from large_batch_cifar_10_fast.core.preactivation import NARROWEST, PreactivationBlock
from large_batch_cifar_10_fast.core.precision import Precision, at_least_float32, move
from large_batch_cifar_10_fast.core.score import Epoch, read_score, sums_of
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12
# ---------------------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The differences between the two entries to DAWNBench."""

    workers: int  # replicas, each with its own training images
    batch_size: int  # images a worker takes each step
    knots: tuple[float, ...]  # epochs of the given rates and momenta, interpolated in between
    rates: tuple[float, ...]
    weight_decay: float  # for all parameters


ENTRIES = {
    "eight_gpus": Entry(8, 128, (0, 17.5, 35, 40), (0.04, 2.0, 0.04, 0.0004), 2e-4),
    "one_gpu": Entry(1, 512, (0, 12, 24, 30), (0.075, 1.5, 0.075, 0.00075), 1e-4),
}
MOMENTA = (0.95, 0.85, 0.95, 0.95)  # at the knots


@dataclass(frozen=True)
class Hyp(BaseHyp):
    """The eight-GPU entry, or the other with --entry one_gpu."""

    entry: Literal["eight_gpus", "one_gpu"] = "eight_gpus"  # which of the two entries
    epochs: int = 0  # epochs to train; fewer end the fixed schedule early; 0: all 40, or 30 with --entry one_gpu
    batch_size: int = 0  # images a worker takes each step; 0: 128, or 512 with --entry one_gpu
    width: int = 16  # channels of the first convolution; the others scale with it

    def __post_init__(self) -> None:
        check_range(self, 0, ENTRIES[self.entry].knots[-1], "epochs")
        check_range(self, 0, 100_000, "batch_size")
        check_range(self, NARROWEST // 6 + 1, 100_000, "width")

    @property
    def workers(self) -> int:
        return ENTRIES[self.entry].workers

    @property
    def actual_epochs(self) -> int:
        return self.epochs or int(ENTRIES[self.entry].knots[-1])

    @property
    def actual_batch_size(self) -> int:
        return self.batch_size or ENTRIES[self.entry].batch_size


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 4  # pixels by which a crop is shifted, at most
STRENGTH = 0.25  # largest relative change of brightness, contrast and saturation
DEGREES = 2.0  # largest rotation of an image
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in gray (ITU-R 601, like PIL)


def plan_epoch(hyp: Hyp, images: int, team: Team, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step, float64 [7, workers * batch_size].

    Its rows are images, crops, flips; factors of brightness, contrast and saturation; angles in radians. Each worker
    has its own images and random numbers, independent of the process that computes it. Its remaining images form a
    short last batch.
    """
    own_images = data.count_own(images, team)
    steps, remaining = divmod(images // hyp.workers, hyp.actual_batch_size)
    plans = []
    for number, worker in enumerate(team.workers):
        rows = data.shard(number, len(team.workers), own_images, team.device)
        draws = data.generator(team.device, seed, worker, epoch)
        crops = data.independent_assignment(len(rows), (2 * PADDING + 1) ** 2, draws)
        flips = data.independent_assignment(len(rows), 2, draws)
        changes = [symmetric_draws(len(rows), draws) for _ in range(4)]
        factors = [1 + STRENGTH * change for change in changes[:3]]
        angles = DEGREES * pi / 180 * changes[3]
        order = torch.randperm(len(rows), generator=draws, device=team.device)
        whole_numbers = torch.stack([rows, crops, flips])
        plan = torch.cat([whole_numbers.double(), torch.stack([*factors, angles]).double()])
        plans.append(plan[:, order])
    return data.split_into_steps(plans, steps, hyp.actual_batch_size, remaining)


def symmetric_draws(count: int, draws: torch.Generator) -> Tensor:
    """Draw numbers between -1 and 1 (float32 [count])."""
    return 2 * torch.rand(count, generator=draws, device=draws.device) - 1


def make_batch(
    images: Tensor, labels: Tensor, batch: Tensor, normalization: data.Normalization
) -> tuple[Tensor, Tensor]:
    """Return augmented images [B, 3, 32, 32], channels-last, and their labels [B].

    The order is as published: crop, color jitter, rotation, flip. Color jitter works on the scale of 0 to 1.
    """
    rows, crops, flips = batch[:3].long()
    brightness, contrast, saturation, angles = batch[3:].float()
    mean, std = normalization
    crop = data.crop_and_flip(images, rows, crops, torch.zeros_like(flips), PADDING)
    crop = at_least_float32(crop)
    x = torch.stack([crop[:, c] * (std[c] / 255) + mean[c] / 255 for c in range(3)], 1)
    x = color_jitter(x, brightness, contrast, saturation)
    x = rotate_and_flip(x, angles, flips)
    x = torch.stack([(x[:, c] - mean[c] / 255) * (255 / std[c]) for c in range(3)], -1)
    return x.permute(0, 3, 1, 2).to(images.dtype), labels[rows]


def color_jitter(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Blend images [B, 3, H, W], 0 to 1, with black, their mean gray, then gray, by factors [B]. Clip each time."""
    images = blend(images, torch.zeros_like(images), brightness)
    images = blend(images, gray(images).mean((2, 3), keepdim=True), contrast)
    return blend(images, gray(images), saturation)


def blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    factors = factors.to(images.dtype)[:, None, None, None]
    return (factors * images + (1 - factors) * other).clamp(0, 1)


def gray(images: Tensor) -> Tensor:
    return LUMA[0] * images[:, 0:1] + LUMA[1] * images[:, 1:2] + LUMA[2] * images[:, 2:3]


def rotate_and_flip(images: Tensor, angles: Tensor, flips: Tensor) -> Tensor:
    """Rotate images [B, 3, H, W] counter-clockwise by `angles` (radians), nearest pixel; mirror where `flips` is 1."""
    cos = angles.cos()
    sin = angles.sin()
    zero = torch.zeros_like(angles)
    sign = 1 - 2 * flips
    # From an output pixel to its source: undo the flip, then the rotation. Rows are x and y; y points down.
    origins = torch.stack([cos * sign, -sin, zero, sin * sign, cos, zero], 1).view(-1, 2, 3).to(images.dtype)
    grid = F.affine_grid(origins, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


# ---------------------------------------------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 9,658,458 parameters and 1.385 G multiply-adds at width 16."""

    def __init__(self, hyp: Hyp, classes: int, workers: int = 1) -> None:
        """`workers` is the number of workers whose concatenated batches one forward pass computes."""
        super().__init__()
        width = hyp.width
        a = 6 * width
        b = 12 * width
        c = 24 * width
        norm = partial(layers.GhostBatchNorm, groups=workers, scaled=True)  # over each worker's batch
        block = partial(PreactivationBlock, norm=norm, activation=F.relu)
        self.prep = layers.convolution(3, width)
        self.blocks = nn.Sequential(
            block(width, a, stride=1),
            block(a, a, stride=1),
            block(a, a, stride=1),
            block(a, b, stride=2),
            block(b, b, stride=1),
            block(b, b, stride=1),
            block(b, c, stride=2),
            block(c, c, stride=1),
            block(c, c, stride=1),
        )
        self.tail = nn.Sequential(norm(c), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(c, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")  # N(0, sqrt(2 / (k k channels_out)))
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.tail(self.blocks(self.prep(images))))


# ---------------------------------------------------------------------------------------------------------------------
# Loss and optimizer
# ---------------------------------------------------------------------------------------------------------------------

LOSS_SCALE = 512  # multiplies the loss and divides the gradients, because half precision loses small gradients


def losses_of(hyp: Hyp, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B], in float32 at least."""
    return F.cross_entropy(at_least_float32(logits), labels, reduction="none")


def make_optimizer(hyp: Hyp, network: Network, team: Team) -> Optimizer:
    decay = ENTRIES[hyp.entry].weight_decay
    optimizer = SGD(network.parameters(), lr=0.0, momentum=MOMENTA[0], weight_decay=decay)
    keep_rates_on_gpu([optimizer], team)
    return optimizer


def follow_cycle(hyp: Hyp, optimizer: Optimizer, epoch: float) -> None:
    """Set rate and momentum at a time in epochs: while one rises, the other falls."""
    entry = ENTRIES[hyp.entry]
    group = optimizer.param_groups[0]
    set_rate(group, interpolate(epoch, entry.knots, entry.rates))
    group["momentum"] = interpolate(epoch, entry.knots, MOMENTA)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate: the sum of the workers' means, times LOSS_SCALE
    sums: Tensor  # [3]
    statistics: list[Tensor]  # the norms' statistics of this batch


def forward_pass(
    hyp: Hyp, network: Network, precision: Precision, workers: int, images: Tensor, labels: Tensor
) -> Pass:
    """Return the results for images of `workers` workers, one worker's batch after the other."""
    with precision.autocast():
        logits = network(images)
    losses = losses_of(hyp, logits, labels)
    loss = losses.sum() / (len(losses) // workers)
    return Pass(loss * LOSS_SCALE, sums_of(logits, labels, losses), layers.batch_statistics(network))


def train(hyp: Hyp, images: data.Images, machine: Machine) -> Callable[[int], Iterator[Epoch]]:
    """Set up what all runs share. Return run(seed), which trains a network and yields after each epoch."""
    team = machine.assign_workers(hyp.workers)
    precision = machine.choose_precision(hyp.gpu_precision, half_weights=False)
    train_images = len(images.train_images)
    workers_at_once = len(team.workers) // machine.micro_batches
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # correct images, images, sum of losses

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes, workers_at_once)
        move(network, precision)
        return network, [make_optimizer(hyp, network, team)]

    model = Model(fresh)
    network = model.network
    (optimizer,) = model.optimizers

    def train_step(batch: Tensor) -> None:
        """Update the weights once, from one batch of every worker."""
        for number, part in enumerate(batch.chunk(machine.micro_batches, dim=1)):
            result = machine.forward(*machine.make_batch(part))
            result.loss.backward()
            if number == 0:  # on rank 0, this part begins with worker 0's images: its statistics count
                layers.update_running_statistics(network, result.statistics)
            sums.add_(result.sums)
        team.average_gradients(network.parameters(), LOSS_SCALE)  # over all workers, here and nowhere else
        optimizer.step()
        optimizer.zero_grad()

    losses = partial(losses_of, hyp)
    forward = partial(forward_pass, hyp, network, precision, workers_at_once)
    load = partial(data.upload, team=team, precision=precision)
    first_epoch = plan_epoch(hyp, train_images, team, seed=0, epoch=1)
    examples = [(batch,) for batch in {batch.shape: batch for batch in first_epoch}.values()]  # the last may be short
    # Of the set-up only `load` is timed (docs/method.md, section 6), not compilation or warm-up on noise.
    machine.graphs = False  # a CUDA graph would keep the momentum of its capture
    augment = partial(make_batch, normalization=images.normalization)
    machine.set_up(images, model, augment, forward, load, train_step, examples)

    def run(seed: int) -> Iterator[Epoch]:
        machine.restart(model, seed)
        for epoch in range(1, hyp.actual_epochs + 1):
            with machine.clock.timed("training"):
                sums.zero_()
                plan = plan_epoch(hyp, train_images, team, seed, epoch)
                for number, batch in enumerate(plan, 1):
                    follow_cycle(hyp, optimizer, epoch - 1 + number / len(plan))
                    machine.step(batch)
            with machine.clock.timed("validation"):  # shown, but not part of the training time
                validation = machine.evaluate(network, losses, hyp.views)
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
