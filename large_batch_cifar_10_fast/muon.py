"""Muon, 2024 to 2026: a small network with orthogonalized updates, the least work of all recipes.

docs/recipes.md#muon describes the recipe, docs/why_it_is_fast.md its tricks. Gains at width 16 were measured with
`muon_first` (docs/why_it_is_fast.md#what-each-trick-brings).

    bash train_cifar_parallel.sh --recipe muon  # also muon95 (two larger networks), muon_first, muon2024

A run has 9 epochs: four at 24 pixels, then five at 32. The last four epochs skip the easiest quarter of the images. A
step has 1000 images. A run needs 0.144 PFLOP; the method of 2019 needs 2.01.

To try an idea, copy this file, edit it, and train it with `--recipe FILE.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from large_batch_cifar_10_fast import ConfigError, check_range
from large_batch_cifar_10_fast.core import data, layers
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.core.hyp import BaseHyp, count_flop
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.model import Model, keep_rates_on_gpu
from large_batch_cifar_10_fast.core.optim import Muon, interpolate, set_rate
from large_batch_cifar_10_fast.core.precision import Precision, at_least_float32, move
from large_batch_cifar_10_fast.core.score import Epoch, read_score, sums_of
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12
# ---------------------------------------------------------------------------------------------------------------------

EPOCH_IMAGES = 50_000  # CIFAR-10's training images


@dataclass(frozen=True)
class Hyp(BaseHyp):
    """Muon with small steps, early low resolution and hard-example selection."""

    epochs: int = 9  # passes over the training images; the rates fall to 0 at the end
    batch_size: int = 0  # images a worker takes each step; 0: 1000 over the workers (muon2024, muon_first: 2000)
    width: int = 64  # channels of the first block
    pixels: tuple[int, ...] = (24, 24, 24, 24, 32, 32, 32, 32, 32)  # resolutions, spread evenly over the epochs
    kept: tuple[float, ...] = (1, 1, 1, 1, 1, 0.74, 0.74, 0.74, 0.74)  # fractions of the images, spread over the epochs
    filter_rate: float = 0.17  # Muon's first rate, for the filters
    filter_momentum: float = 0.6  # Muon's momentum
    bias_rate: float = 0.053  # SGD's first rate for biases
    head_rate: float = 0.67  # SGD's first rate for the last layer
    momentum: float = 0.85  # SGD's momentum
    whitening_epochs: int = -1  # epochs that train the whitening bias; -1: a ninth of all (muon2024: three eighths)
    label_smoothing: float = 0.2  # part of a label that is spread over all classes
    norm_momentum: float = 0.22  # weight of a new batch in the running statistics
    views: Literal["one", "two", "six"] = "six"  # views of a test image after the last epoch (core/evaluation.py)
    workers: int = 1  # replicas, each with its own training images

    gpu_precision = "bf16"
    small = "--width 16 --epochs 3 --batch_size 500 --pixels 24 --kept 1 --views two"

    # Constants, not options.
    whitening_share: ClassVar = 1 / 9  # fraction of the epochs that trains the whitening bias
    step_images: ClassVar = 1000  # images of a step, over all workers
    second_size: ClassVar = 1  # side of the first block's second filters
    middle: ClassVar = 3.5  # channels of the second block, in widths; the third has four widths
    adds_mean: ClassVar = True  # the head sees the maximum over all positions plus their mean
    members: ClassVar = 1  # networks whose logits are averaged

    def __post_init__(self) -> None:
        check_range(self, 1, 100_000, "epochs", "width", "workers")
        check_range(self, 0, 100_000, "batch_size")
        check_range(self, -1, self.epochs, "whitening_epochs")
        check_range(self, 1e-9, 100_000, "filter_rate", "bias_rate", "head_rate")
        check_range(self, 1e-9, 1, "momentum")
        check_range(self, 0, 1, "filter_momentum", "label_smoothing", "norm_momentum")
        if not all(9 <= size <= 32 for size in self.pixels):
            raise ConfigError(f"--pixels {self.pixels}: each must be 9 to 32")  # the network pools three times
        if not all(0 < share <= 1 for share in self.kept):
            raise ConfigError(f"--kept {self.kept}: each must be above 0 and at most 1")
        if self.actual_batch_size < 2:
            raise ConfigError(f"--batch_size {self.actual_batch_size} is too small for norms: use at least 2")

    @property
    def actual_batch_size(self) -> int:
        return self.batch_size or self.step_images // self.workers

    @property
    def actual_whitening_epochs(self) -> int:
        if self.whitening_epochs >= 0:
            return self.whitening_epochs
        return max(1, round(self.epochs * self.whitening_share))

    def flop(self, network: nn.Module, train_images: int) -> float:
        """Return the floating-point operations of a run's training steps."""
        by_epoch = enumerate(steps_by_epoch(self, train_images), 1)
        return self.images_of_step * sum(
            steps * count_flop(network, *stage_of(self, epoch)) for epoch, steps in by_epoch
        )

    def fit_to(self, images: int, given: dict) -> dict:
        """Return defaults for fewer images: eight steps or more per epoch of all images, as many steps as on CIFAR-10.

        Rates need no change: SGD's are for a sum over images, and Muon's updates have a fixed size.
        """
        own_images = images // self.workers
        batch_size = self.batch_size or min(self.actual_batch_size, max(2, own_images // 8))
        steps = self.epochs * (EPOCH_IMAGES // self.images_of_step)
        return {"batch_size": batch_size, "epochs": math.ceil(steps / max(1, own_images // batch_size))}


@dataclass(frozen=True)
class Hyp2024(Hyp):
    """Airbench's recipe with Muon (2024); its authors publish 94.01% on one A100 in 2.59 s."""

    epochs: int = 8  # passes over the training images; the rates fall to 0 at the end
    pixels: tuple[int, ...] = (32,)  # resolutions, spread evenly over the epochs
    kept: tuple[float, ...] = (1,)  # fractions of the images, spread evenly over the epochs
    filter_rate: float = 0.24  # Muon's first rate, for the filters
    norm_momentum: float = 0.4  # weight of a new batch in the running statistics

    whitening_share = 3 / 8
    step_images = 2000
    second_size = 3
    middle = 4
    adds_mean = False


@dataclass(frozen=True)
class HypFirst(Hyp2024):
    """`muon` until 28 November 2026, which took 0.74 s on an H200 (docs/recipes.md#muon)."""

    epochs: int = 9  # passes over the training images; the rates fall to 0 at the end
    pixels: tuple[int, ...] = Hyp.pixels  # resolutions, spread evenly over the epochs
    kept: tuple[float, ...] = (1, 1, 1, 1, 1, 0.68, 0.68, 0.68, 0.68)  # fractions of the images, spread over the epochs

    whitening_share = 1 / 9


@dataclass(frozen=True)
class Hyp95(Hyp):
    """Two wider networks, and more epochs. Its aim is 95% (docs/recipes.md#muon95)."""

    epochs: int = 11  # passes over the training images; the rates fall to 0 at the end
    width: int = 96  # channels of the first block

    members = 2


SETS = {"muon2024": Hyp2024, "muon_first": HypFirst, "muon95": Hyp95}


def spread(values: Sequence[float], epoch: int, epochs: int) -> float:
    """Return the value for an epoch (from 1) of values that are spread evenly over all epochs."""
    return values[(2 * epoch - 1) * len(values) // (2 * epochs)]


class Stage(NamedTuple):
    """The properties of a kind of step. Each kind has its own compiled code and its own CUDA graph."""

    resolution: int  # pixels a side
    trains_whitening: bool  # its bias is trained; later the backward pass ends before the first layer


def stage_of(hyp: Hyp, epoch: int) -> Stage:
    # Coarse features are learned first and need few pixels. At 24 pixels a step has half the work. Without: --pixels 32
    # (docs/why_it_is_fast.md#fewer-pixels-fewer-images)
    resolution = int(spread(hyp.pixels, epoch, hyp.epochs))
    return Stage(resolution, trains_whitening=epoch <= hyp.actual_whitening_epochs)


def steps_by_epoch(hyp: Hyp, train_images: int) -> list[int]:
    """Return the number of steps of each epoch, at least one."""
    kept = [spread(hyp.kept, epoch, hyp.epochs) for epoch in range(1, hyp.epochs + 1)]
    return [max(1, round(train_images // hyp.workers * share) // hyp.actual_batch_size) for share in kept]


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 2  # pixels by which a crop is shifted, at most


def plan_epoch(hyp: Hyp, last_losses: Tensor, steps: int, team: Team, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step: images of this process, crops and flips, int64 [3, workers * batch_size].

    `last_losses` [n] has each image's loss when it was last seen, initially infinity. Each worker has its own images
    and random numbers, independent of the process that computes it.
    """
    plans = []
    for number, worker in enumerate(team.workers):
        rows = data.shard(number, len(team.workers), len(last_losses), team.device)
        draws = data.generator(team.device, seed, worker, epoch)
        crops = data.independent_assignment(len(rows), (2 * PADDING + 1) ** 2, draws)
        data.independent_assignment(len(rows), 2, draws)  # not used, but `order` depends on it
        order = torch.randperm(len(rows), generator=draws, device=team.device)
        # Alternating flip: the first epoch mirrors images at random, then each image's sides alternate. With
        # independent flips, half of the images show one side twice in two epochs. At width 16 no difference is shown
        # (docs/why_it_is_fast.md#crops-and-flips). Without: delete the next two lines.
        first_side = data.independent_assignment(len(rows), 2, data.generator(team.device, seed, worker, 0))
        flips = (first_side + epoch) % 2
        if spread(hyp.kept, epoch, hyp.epochs) < 1:
            order = order[hardest(last_losses[rows[order]], steps * hyp.actual_batch_size)]
        plans.append(torch.stack([rows, crops, flips])[:, order])
    return data.split_into_steps(plans, steps, hyp.actual_batch_size)


def hardest(losses: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest losses, sorted by index.

    Late epochs skip the images with the smallest losses when last seen, because these teach little. Without: --kept 1
    (docs/why_it_is_fast.md#fewer-pixels-fewer-images)
    """
    return losses.topk(count, sorted=False).indices.sort().values


def make_batch(images: Tensor, labels: Tensor, batch: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """Return augmented images [B, 3, resolution, resolution], channels-last, and their labels [B]."""
    rows, crops, flips = batch
    x = data.crop_and_flip(images, rows, crops, flips, PADDING)
    if stage.resolution < data.SIZE:
        x = F.interpolate(x, size=(stage.resolution, stage.resolution), mode="bilinear", align_corners=False)
        x = x.contiguous(memory_format=torch.channels_last)  # compiled interpolation loses this format
    return x, labels[rows]


# ---------------------------------------------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Images [B, 3, H, W] to logits [B, classes]; 1,708,120 trained parameters at width 64, 0.170 GFLOP forward."""

    def __init__(self, hyp: Hyp, classes: int, workers: int = 1) -> None:
        """`workers` is the number of workers whose concatenated batches one forward pass computes."""
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)  # set once, from the images
        self.members = nn.ModuleList(Member(hyp, classes, workers) for _ in range(hyp.members))

    def forward(self, images: Tensor, trains_whitening: bool = True) -> Tensor:
        return self.logits_of_members(images, trains_whitening).mean(0)

    def logits_of_members(self, images: Tensor, trains_whitening: bool) -> Tensor:
        """Return logits [members, B, classes], in float32 at least."""
        x = F.gelu(self.whitening(images))
        if not trains_whitening:
            x = x.detach()  # the backward pass ends here
        return torch.stack([at_least_float32(member(x)) for member in self.members])


class Member(nn.Module):
    """All layers after the first, from [B, 24, H - 1, W - 1] to logits [B, classes].

    `muon95` has two members. They begin with different weights and see the same batches. Their errors differ, so the
    mean of their logits is wrong less often (docs/recipes.md#muon95).
    """

    def __init__(self, hyp: Hyp, classes: int, workers: int) -> None:
        super().__init__()
        width = hyp.width
        norm = partial(layers.GhostBatchNorm, groups=workers, momentum=hyp.norm_momentum, eps=1e-12)
        middle = round(hyp.middle * width)
        self.groups = nn.Sequential(
            block(24, width, hyp.second_size, norm),
            block(width, middle, 3, norm),
            block(middle, 4 * width, 3, norm),
        )
        self.pool = layers.MaxPool()  # over all remaining positions, at any resolution
        self.linear = nn.Linear(4 * width, classes, bias=False)
        self.linear.weight.data /= self.linear.weight.data.std()  # std 1, and / 256 below: both from airbench
        self.adds_mean = hyp.adds_mean

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(x)
        top = self.pool(x).flatten(1)
        if self.adds_mean:  # a maximum sends its gradient to one position, the mean to all
            top = top + x.mean((2, 3))
        return self.linear(top) / 256


def block(channels_in: int, channels_out: int, second_size: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two convolutions with norms, from [B, channels_in, S, S] to [B, channels_out, S // 2, S // 2].

    The first is 3x3, the second `second_size` a side.
    """
    first = layers.Convolution(channels_in, channels_out, pooled=True)
    second: nn.Conv2d
    if second_size == 3:
        second = layers.Convolution(channels_out, channels_out)
    else:
        second = layers.convolution(channels_out, channels_out, second_size)
    return nn.Sequential(
        dirac_init(first),
        layers.MaxPool(2),  # pooling before the norm saves three quarters of its work
        norm(channels_out),
        nn.GELU(),
        dirac_init(second),
        norm(channels_out),
        nn.GELU(),
    )


def dirac_init(convolution: nn.Conv2d) -> nn.Conv2d:
    """Set the first filters to the identity, so that the image reaches the head from the first step on.

    Other filters keep PyTorch's initialization. Gains 0.5 points at width 16. Without: return the convolution unchanged
    (docs/why_it_is_fast.md#a-small-network-that-pools-early).
    """
    nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
    return convolution


def filters_of(images: Tensor) -> Tensor:
    """Return the first layer's filters, from images [n, 32, 32, 3] of worker 0. They are not trained.

    Neighbouring pixels are alike. These filters decorrelate them, so one learning rate suits all directions. They gain
    1.1 points at width 16 (docs/why_it_is_fast.md#whitening).
    """
    filters = layers.whitening_filters(images[:5000], size=2, epsilon=5e-4)
    return torch.cat([filters, -filters])  # both signs, because the activation suppresses negative values


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------

WEIGHT_DECAY = 2e-6  # for biases and head. SGD multiplies it by the rate, so `make_optimizers` divides by the rate


def make_optimizers(hyp: Hyp, network: Network, team: Team) -> list[Optimizer]:
    """Return Muon for the filters, and SGD for biases and head. Each group's rate falls from `first_rate` to 0."""
    weights = list(network.members.parameters())
    filters = [weight for weight in weights if weight.ndim == 4]
    biases = [weight for weight in weights if weight.ndim == 1]
    heads = [weight for weight in weights if weight.ndim == 2]
    # Muon: m = 0.6 m + g;  w = w sqrt(out) / |w|;  w = w - rate * orthogonal(g + 0.6 m). All directions of an update
    # have about the same size, so the network also learns rare ones: 3.3 points more than SGD at width 16. The fixed
    # norm replaces weight decay (docs/why_it_is_fast.md#muon).
    of_muon = {"params": filters, "first_rate": hyp.filter_rate, "epochs": hyp.epochs}
    muon = Muon([of_muon], lr=0.0, momentum=hyp.filter_momentum)
    # All members share the whitening bias, so its gradient is `members` times as large.
    shared_rate = hyp.bias_rate / hyp.members
    groups: list[dict] = [
        {"params": biases, "first_rate": hyp.bias_rate, "epochs": hyp.epochs},
        {"params": [network.whitening.bias], "first_rate": shared_rate, "epochs": hyp.actual_whitening_epochs},
        {"params": heads, "first_rate": hyp.head_rate, "epochs": hyp.epochs},
    ]
    for group in groups:
        group["weight_decay"] = WEIGHT_DECAY * hyp.actual_batch_size / group["first_rate"]
        # The published rate is for gradients summed over all images; `average_gradients` divides by the workers.
        group["first_rate"] *= hyp.workers
    optimizers = [muon, SGD(groups, lr=0.0, momentum=hyp.momentum, nesterov=True)]
    keep_rates_on_gpu(optimizers, team)
    return optimizers


def set_rates(hyp: Hyp, optimizers: Sequence[Optimizer], epoch: float) -> None:
    """Set all rates at a time in epochs.

    Steps are counted from 1, and airbench counts from 0. So the whole schedule is one step of CIFAR-10 later.
    """
    step = hyp.images_of_step / EPOCH_IMAGES
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            set_rate(group, interpolate(epoch, (step, group["epochs"] + step), (group["first_rate"], 0)))


# ---------------------------------------------------------------------------------------------------------------------
# Loss and evaluation
# ---------------------------------------------------------------------------------------------------------------------


def losses_of(hyp: Hyp, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B].

    With label smoothing, weights stop growing once the right class is likely. Gains 0.6 points at width 16. Without:
    --label_smoothing 0 (docs/why_it_is_fast.md#label-smoothing)
    """
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=hyp.label_smoothing)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate
    losses: Tensor  # each image's loss, float32 [B]
    sums: Tensor  # [3]
    statistics: list[Tensor]  # the norms' statistics of this batch


def forward_pass(
    hyp: Hyp, network: Network, precision: Precision, images: Tensor, labels: Tensor, stage: Stage
) -> Pass:
    with precision.autocast():
        logits = network.logits_of_members(images, stage.trains_whitening)
    of_members = torch.stack([losses_of(hyp, of_one, labels) for of_one in logits])  # each member learns by itself
    losses = of_members.mean(0).detach()
    sums = sums_of(logits.mean(0), labels, losses)
    return Pass(of_members.sum(), losses.float(), sums, layers.batch_statistics(network))


def train(hyp: Hyp, images: data.Images, machine: Machine) -> Callable[[int], Iterator[Epoch]]:
    """Set up what all runs share. Return run(seed), which trains a network and yields after each epoch."""
    team = machine.assign_workers(hyp.workers)
    precision = machine.choose_precision(hyp.gpu_precision, half_weights=False)
    own_images = data.count_own(len(images.train_images), team)
    steps = steps_by_epoch(hyp, len(images.train_images))
    stages = [stage_of(hyp, epoch) for epoch in range(1, hyp.epochs + 1)]
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # correct images, images, sum of losses
    last_losses = torch.full((own_images,), torch.inf, device=team.device)  # each image's, when last seen

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes, len(team.workers) // machine.micro_batches)
        move(network, precision)
        return network, make_optimizers(hyp, network, team)

    model = Model(fresh)
    network = model.network
    filters = torch.empty_like(network.whitening.weight)

    def load(images: data.Images, clock: Clock) -> data.Shards:
        shards = data.upload(images, clock, team, precision)
        with clock.timed("whitening"):
            filters.copy_(filters_of(shards.images[:: len(team.workers)]))
            team.broadcast(filters)  # rank 0 has worker 0
        return shards

    def train_step(batch: Tensor, stage: Stage) -> None:
        """Update the weights once, from one batch of every worker. On a GPU a CUDA graph replays it."""
        latest: list[Tensor] = []  # losses of images
        for part in batch.chunk(machine.micro_batches, dim=1):
            result = machine.forward(*machine.make_batch(part, stage), stage)
            result.loss.backward()
            if not latest:  # on rank 0, this part begins with worker 0's images: its statistics count
                layers.update_running_statistics(network, result.statistics)
            sums.add_(result.sums)
            latest.append(result.losses)
        team.average_gradients(network.parameters())  # over all workers, here and nowhere else
        with precision.autocast():  # for the matrix products of Muon
            for optimizer in model.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        last_losses[batch[0]] = torch.cat(latest)

    losses = partial(losses_of, hyp)
    forward = partial(forward_pass, hyp, network, precision)
    batch = plan_epoch(hyp, last_losses, 1, team, seed=0, epoch=1)[0]
    examples = [(batch, stage) for stage in dict.fromkeys(stages)]  # one of each kind of step
    # Of the set-up only `load` is timed (docs/method.md, section 6), not compilation, warm-up or graph capture.
    machine.set_up(images, model, make_batch, forward, load, train_step, examples)

    def run(seed: int) -> Iterator[Epoch]:
        machine.restart(model, seed)
        network.whitening.weight.copy_(filters)
        last_losses.fill_(torch.inf)
        for epoch, stage in enumerate(stages, 1):
            with machine.clock.timed("training"):
                sums.zero_()
                plan = plan_epoch(hyp, last_losses, steps[epoch - 1], team, seed, epoch)
                for number, batch in enumerate(plan, 1):
                    set_rates(hyp, model.optimizers, epoch - 1 + number / len(plan))
                    machine.step(batch, stage)
            views = hyp.views if epoch == hyp.epochs else "one"
            with machine.clock.timed("validation"):  # shown, but not part of the training time
                validation = machine.evaluate(network, losses, views)
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
