"""CIFAR-10 to 94% with eight workers of 256 images: Apple's method of December 2019 (docs/method.md).

    bash train_cifar_parallel.sh                            # on 1, 2, 4 or 8 GPUs, or a CPU
    torchrun --nproc_per_node 8 -m large_batch_cifar_10_fast train

Published: 94.19% in 7.8 s on eight V100s (n = 50). The file follows an image: batch, network, loss, update.
To try an idea, copy this file, edit it, and train it with `--recipe FILE.py`. Sections are those of docs/method.md.
docs/why_it_is_fast.md explains the tricks. Points of accuracy at width 16 are from
docs/why_it_is_fast.md#what-each-trick-brings.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from large_batch_cifar_10_fast import ConfigError, check_range
from large_batch_cifar_10_fast.core import data, layers
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.core.hyp import BaseHyp
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.model import Model, keep_rates_on_gpu
from large_batch_cifar_10_fast.core.optim import NesterovSGD, interpolate, set_rate
from large_batch_cifar_10_fast.core.precision import Precision, at_least_float32, move
from large_batch_cifar_10_fast.core.score import Epoch, read_score, sums_of
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12. The first six are the published ones, with their defaults.
# ---------------------------------------------------------------------------------------------------------------------

# For experiments on a CPU: one worker, and a learning rate in proportion to the images of a step.
SMALL = "--workers 1 --batch_size 128 --ghost_batch 32 --lr_scaler 0.094 --width 8 --epochs 3 --ema_ep 0.4"
# Two minutes on two cores.
DEMO = "--data synthetic --width 8 --batch_size 32 --ghost_batch 16 --epochs 7 --ema_ep 1 --lr_scaler 1"
DEMO += " --lr_scaler_end_fraction 0.02 --precision fp32 --no_compile"


@dataclass(frozen=True)
class Hyp(BaseHyp):
    """The published settings."""

    lr_scaler: float = 1.5  # peak of the learning rate; weight decay grows with it
    lr_scaler_end_fraction: float = 0.1  # final learning rate, as a fraction of the peak
    epochs: int = 18  # passes of each worker over its training images
    warmup_fraction: float = 5.0  # the rate peaks at epochs / warmup_fraction
    ema_ep: float = 2.0  # epochs at the end with a constant rate (published name; nothing is averaged)
    batch_size: int = 256  # images a worker takes each step
    width: int = 64  # channels of the first block; the others scale with it
    ghost_batch: int = 0  # images that a norm normalizes together; 0: a 16th of the batch
    label_smoothing: float = 0.2  # part of a label that is spread over all classes
    eval_stats: Literal["first", "average"] = "first"  # ghost groups whose statistics evaluation uses
    workers: int = 8  # replicas, each with its own training images

    small = SMALL
    demo = DEMO
    views = "two"  # average over a test image and its mirror image: gains 1.2 points at width 16

    def __post_init__(self) -> None:
        check_range(self, 1, 100_000, "epochs", "warmup_fraction", "batch_size", "width", "workers")
        check_range(self, 1e-9, 100_000, "lr_scaler")
        check_range(self, 0, 100_000, "lr_scaler_end_fraction", "ema_ep", "ghost_batch")
        check_range(self, 0, 1, "label_smoothing")
        if self.ghost_batch == 0 and self.batch_size % 16:
            raise ConfigError(f"--batch_size {self.batch_size} is no multiple of 16: choose one, or a --ghost_batch")
        if self.batch_size % self.actual_ghost_batch:
            raise ConfigError(f"--ghost_batch {self.ghost_batch} must divide --batch_size {self.batch_size}")
        peak = self.epochs / self.warmup_fraction
        if peak > self.epochs - self.ema_ep:
            late = f"the rate peaks at epoch {peak:g}, in its constant end"
            raise ConfigError(f"{late}: use more --epochs, or --ema_ep of at most {self.epochs - peak:g}")

    @property
    def actual_ghost_batch(self) -> int:
        return self.ghost_batch or self.batch_size // 16

    def flop(self, network: nn.Module, train_images: int) -> float:
        """Return the operations of a run's training steps. Images that do not fill a step are left out."""
        return super().flop(network, train_images // self.images_of_step * self.images_of_step)

    def fit_to(self, images: int, given: dict) -> dict:
        """Return defaults for fewer images: eight steps or more per epoch, if whole ghost batches allow that.

        There are as many steps as on CIFAR-10, with the same learning rate per image and the same ghost batches.
        """
        own_images = images // self.workers
        ghost = self.actual_ghost_batch
        fitting = max(ghost, own_images // 8 // ghost * ghost)
        batch_size = given.get("batch_size", min(self.batch_size, fitting))
        steps = self.epochs * (50_000 // self.images_of_step)
        epochs = math.ceil(steps / max(1, own_images // batch_size))
        rate = self.lr_scaler * batch_size / self.batch_size
        return {"batch_size": batch_size, "epochs": epochs, "lr_scaler": rate, "ghost_batch": ghost}


# ---------------------------------------------------------------------------------------------------------------------
# Batches (section 2)
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 4  # pixels by which a crop is shifted, at most


def plan_epoch(hyp: Hyp, own_images: int, steps: int, team: Team, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step: images of this process, crops and flips, int64 [3, workers * batch_size].

    Each worker has its own images and its own random numbers, independent of the process that computes it.
    """
    plans = []
    for number, worker in enumerate(team.workers):
        rows = data.shard(number, len(team.workers), own_images, team.device)
        draws = data.generator(team.device, seed, worker, epoch)
        crops = balanced_assignment(len(rows), (2 * PADDING + 1) ** 2, draws)
        flips = balanced_assignment(len(rows), 2, draws)
        order = torch.randperm(len(rows), generator=draws, device=team.device)
        plans.append(torch.stack([rows, crops, flips])[:, order])
    return data.split_into_steps(plans, steps, hyp.batch_size)


def balanced_assignment(count: int, options: int, draws: torch.Generator) -> Tensor:
    """Assign one of `options` to each of `count` images (int64 [count]). Option counts differ by at most one.

    Independent draws would favour some crops and one side in each epoch. At width 16 no difference is shown
    (docs/why_it_is_fast.md#crops-and-flips). Without: data.independent_assignment
    """
    shuffled = torch.randperm(options, generator=draws, device=draws.device)
    images = torch.randperm(count, generator=draws, device=draws.device)
    in_order = torch.arange(count, device=draws.device) * options // count
    return torch.empty_like(images).scatter_(0, images, shuffled[in_order])


def make_batch(images: Tensor, labels: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return augmented images [B, 3, 32, 32], channels-last, and their labels [B]."""
    rows, crops, flips = batch
    return data.crop_and_flip(images, rows, crops, flips, PADDING), labels[rows]


# ---------------------------------------------------------------------------------------------------------------------
# Network (section 3)
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, classes]; 6,570,880 trained parameters at width 64."""

    def __init__(self, hyp: Hyp, classes: int, workers: int = 1) -> None:
        """`workers` is the number of workers whose concatenated batches one forward pass computes."""
        super().__init__()
        width = hyp.width
        # Ghost groups of a worker's batch. At width 16 no difference is shown. Without: --ghost_batch 256
        groups = hyp.batch_size // hyp.actual_ghost_batch
        tracked = groups if hyp.eval_stats == "average" else 1
        norm = partial(layers.GhostBatchNorm, groups=workers * groups, tracked=tracked)
        self.prep = nn.Sequential(layers.convolution(27, width, size=1), *norm_celu(width, norm))
        self.layer1 = nn.Sequential(conv_pool_norm(width, 2 * width, norm), Residual(2 * width, norm))
        self.layer2 = conv_pool_norm(2 * width, 4 * width, norm)
        self.layer3 = nn.Sequential(conv_pool_norm(4 * width, 8 * width, norm), Residual(8 * width, norm))
        self.head = nn.Sequential(layers.MaxPool(4), nn.Flatten(), nn.Linear(8 * width, classes, bias=False))
        self.whitening = nn.Conv2d(3, 27, 3, padding=1, bias=False)
        self.whitening.weight.requires_grad_(False)  # set once, from the images

    def forward(self, images: Tensor) -> Tensor:
        mix, norm, celu = self.prep
        x = whiten_and_mix(images, self.whitening.weight, mix.weight)  # type: ignore[arg-type]  # Tensors
        x = celu(norm(x))
        return self.head(self.layer3(self.layer2(self.layer1(x)))) / 16  # the published factor


def whiten_and_mix(images: Tensor, filters: Tensor, weight: Tensor) -> Tensor:
    """Convolve with the whitening filters [27, 3, 3, 3], then with a 1x1 `weight` [width, 27, 1, 1].

    On a GPU the 27 channels are padded to 32 with zeros, because tensor cores need multiples of 8.
    """
    if images.is_cuda:
        filters = F.pad(filters, (0, 0, 0, 0, 0, 0, 0, 5))
        weight = F.pad(weight, (0, 0, 0, 0, 0, 5))
    return F.conv2d(F.conv2d(images, filters, padding=1), weight)


class Residual(nn.Module):
    """x + g(f(x)), where f and g are convolution, norm, CELU; no activation after the sum."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            layers.convolution(channels, channels),
            *norm_celu(channels, norm),
            layers.convolution(channels, channels),
            *norm_celu(channels, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def conv_pool_norm(channels_in: int, channels_out: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return convolution, pooling, norm, CELU. Pooling first saves three quarters of the norm's work.

    docs/why_it_is_fast.md#a-small-network-that-pools-early
    """
    return nn.Sequential(
        layers.convolution(channels_in, channels_out),
        layers.MaxPool(2),
        *norm_celu(channels_out, norm),
    )


def norm_celu(channels: int, norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    return [norm(channels), nn.CELU(0.3)]


def filters_of(images: Tensor) -> Tensor:
    """Return the first layer's filters, from images [n, 32, 32, 3] of worker 0. They are not trained.

    Neighbouring pixels are alike. These filters decorrelate them, so one learning rate suits all directions. They gain
    1.1 points at width 16 (docs/why_it_is_fast.md#whitening).
    """
    return layers.whitening_filters(images[:10_000], size=3, epsilon=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Loss and optimizer (section 4)
# ---------------------------------------------------------------------------------------------------------------------

WEIGHT_DECAY = 5e-4  # multiplied by the batch size and the peak rate
BIAS_FACTOR = 64  # multiplies the rate of biases and divides their decay
MOMENTUM = 0.9


def losses_of(hyp: Hyp, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B], in float32 at least.

    With label smoothing, weights stop growing once the right class is likely. At width 16 no difference is shown
    (docs/why_it_is_fast.md#label-smoothing). Without: --label_smoothing 0
    """
    logits = at_least_float32(logits)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=hyp.label_smoothing)


def make_optimizer(hyp: Hyp, network: Network, team: Team) -> Optimizer:
    """Return a Nesterov optimizer with two groups: weights, and biases with a 64 times higher rate."""
    weights = [weight for weight in network.parameters() if weight.ndim > 1 and weight.requires_grad]
    biases = [weight for weight in network.parameters() if weight.ndim == 1]
    decay = WEIGHT_DECAY * hyp.lr_scaler * hyp.batch_size
    groups = [
        {"params": weights, "weight_decay": decay},
        {"params": biases, "weight_decay": decay / BIAS_FACTOR},
    ]
    optimizer = NesterovSGD(groups, MOMENTUM)
    keep_rates_on_gpu([optimizer], team)
    return optimizer


def learning_rate(hyp: Hyp, epoch: float) -> float:
    """Return the learning rate at a time in epochs: it rises to the peak, falls, and stays constant.

    The constant rate at the end replaces an average of the weights. At width 16 no difference is shown
    (docs/why_it_is_fast.md#learning-rates). Without: --ema_ep 0
    """
    # The loss is a sum over the batch, so divide the rate by the batch size. Gradients of a mean could round to zero.
    peak = hyp.lr_scaler * (1 / hyp.batch_size)
    end = hyp.lr_scaler * hyp.lr_scaler_end_fraction * (1 / hyp.batch_size)
    knots = (0, hyp.epochs / hyp.warmup_fraction, hyp.epochs - hyp.ema_ep)
    return interpolate(epoch, knots, (0, peak, end))


def set_rates(hyp: Hyp, optimizer: Optimizer, epoch: float) -> None:
    weights, biases = optimizer.param_groups
    rate = learning_rate(hyp, epoch)
    set_rate(weights, rate)
    set_rate(biases, rate * BIAS_FACTOR)


# ---------------------------------------------------------------------------------------------------------------------
# Training, evaluation (section 5) and what is timed (section 6)
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate
    sums: Tensor  # [3]
    statistics: list[Tensor]  # the norms' statistics of this batch


def forward_pass(hyp: Hyp, network: Network, precision: Precision, images: Tensor, labels: Tensor) -> Pass:
    with precision.autocast():
        logits = network(images)
    losses = losses_of(hyp, logits, labels)
    return Pass(losses.sum(), sums_of(logits, labels, losses), layers.batch_statistics(network))


def train(hyp: Hyp, images: data.Images, machine: Machine) -> Callable[[int], Iterator[Epoch]]:
    """Set up what all runs share. Return run(seed), which trains a network and yields after each epoch."""
    team = machine.assign_workers(hyp.workers)
    precision = machine.choose_precision(hyp.gpu_precision, half_weights=True)
    own_images = data.count_own(len(images.train_images), team)
    steps = len(images.train_images) // hyp.workers // hyp.batch_size  # steps per epoch
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # correct images, images, sum of losses

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes, len(team.workers) // machine.micro_batches)
        move(network, precision)
        return network, [make_optimizer(hyp, network, team)]

    model = Model(fresh)
    network = model.network
    (optimizer,) = model.optimizers

    filters = torch.empty_like(network.whitening.weight)

    def load(images: data.Images, clock: Clock) -> data.Shards:
        shards = data.upload(images, clock, team, precision)
        with clock.timed("whitening"):
            filters.copy_(filters_of(shards.images[:: len(team.workers)]))
            team.broadcast(filters)  # rank 0 has worker 0
        return shards

    def train_step(batch: Tensor) -> None:
        """Update the weights once, from one batch of every worker. On a GPU a CUDA graph replays it."""
        for number, part in enumerate(batch.chunk(machine.micro_batches, dim=1)):
            result = machine.forward(*machine.make_batch(part))
            result.loss.backward()
            if number == 0:  # on rank 0, this part begins with worker 0's images: its statistics count
                layers.update_running_statistics(network, result.statistics)
            sums.add_(result.sums)
        team.average_gradients(network.parameters())  # over all workers, here and nowhere else
        optimizer.step()
        optimizer.zero_grad()

    losses = partial(losses_of, hyp)
    forward = partial(forward_pass, hyp, network, precision)
    examples = [(plan_epoch(hyp, own_images, 1, team, seed=0, epoch=1)[0],)]  # all steps have this shape
    # Of the set-up only `load` is timed (section 6), not compilation, warm-up on noise or capture of CUDA graphs.
    machine.set_up(images, model, make_batch, forward, load, train_step, examples)

    def run(seed: int) -> Iterator[Epoch]:
        machine.restart(model, seed)
        network.whitening.weight.copy_(filters)
        for epoch in range(1, hyp.epochs + 1):
            with machine.clock.timed("training"):
                sums.zero_()
                for number, batch in enumerate(plan_epoch(hyp, own_images, steps, team, seed, epoch), 1):
                    set_rates(hyp, optimizer, epoch - 1 + number / steps)
                    machine.step(batch)
            with machine.clock.timed("validation"):  # shown, but not part of the training time
                validation = machine.evaluate(network, losses, hyp.views)
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
