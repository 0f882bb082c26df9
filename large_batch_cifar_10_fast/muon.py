"""Muon, 2024 to 2026: the least work to 94%, a small network with orthogonalized updates (docs/recipes.md).

    bash train_cifar_parallel.sh --recipe muon              # or muon2024, the recipe that it started from
    python -m large_batch_cifar_10_fast.muon --runs 5       # the same without the launcher, in one process

A run: 9 epochs in steps of 2000 images, four epochs at 24 pixels and five at 32, the last four of them without the
easiest third of the images. It needs 0.174 PFLOP; the method of 2019 needs 2.01.

To try an idea, copy this file, edit it, and train it by `--recipe FILE.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import data, fast, layers
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.core.log import Log, Score, read_score, sums_of
from large_batch_cifar_10_fast.core.optim import Muon, interpolate, set_rate
from large_batch_cifar_10_fast.core.options import Options, check_range
from large_batch_cifar_10_fast.core.program import main
from large_batch_cifar_10_fast.core.team import Team

# ---------------------------------------------------------------------------------------------------------------------
# Hyper-parameters. Each is an option: --epochs 12
# ---------------------------------------------------------------------------------------------------------------------

STEP_IMAGES = 2000
EPOCH_IMAGES = 50_000


@dataclass(frozen=True)
class Hyp:
    """Our own settings."""

    epochs: int = 9  # passes over the training images, over which the rates fall to 0
    batch_size: int = 0  # images a worker takes each step; 0: 2000 divided by the workers
    width: int = 64  # channels of the first block; the others have four times as many
    pixels: tuple[int, ...] = (24, 24, 24, 24, 32, 32, 32, 32, 32)  # resolutions, spread evenly over the epochs
    kept: tuple[float, ...] = (1, 1, 1, 1, 1, 0.68, 0.68, 0.68, 0.68)  # fractions of the images, likewise
    filter_rate: float = 0.24  # Muon's first rate, for the filters
    filter_momentum: float = 0.6  # Muon's momentum
    bias_rate: float = 0.053  # SGD's first rate for biases
    head_rate: float = 0.67  # SGD's first rate for the last layer
    momentum: float = 0.85  # SGD's momentum
    whitening_epochs: int = -1  # epochs that train the whitening's bias; -1: 1 of 9 (muon2024: 3 of 8)
    label_smoothing: float = 0.2  # part of a label that is spread over all classes
    norm_momentum: float = 0.4  # weight of a new batch in the running statistics
    views: Literal["one", "two", "six"] = "six"  # views of a test image after the last epoch
    workers: int = 1  # replicas, each with its own training images

    half = "bf16"  # precision on a GPU that has it
    whitening_share = 1 / 9  # of the epochs

    def __post_init__(self) -> None:
        check_range(self, 1, 100_000, "epochs", "width", "workers")
        check_range(self, 0, 100_000, "batch_size")
        check_range(self, -1, self.epochs, "whitening_epochs")
        check_range(self, 1e-9, 100_000, "filter_rate", "bias_rate", "head_rate")
        check_range(self, 1e-9, 1, "momentum")
        check_range(self, 0, 1, "filter_momentum", "label_smoothing", "norm_momentum")
        if not all(9 <= size <= 32 for size in self.pixels):
            raise ConfigError(f"--pixels {self.pixels}: sizes must lie in 9 to 32, or three poolings leave nothing")
        if not all(0 < share <= 1 for share in self.kept):
            raise ConfigError(f"--kept {self.kept}: fractions must lie above 0, and at most be 1")
        if self.batch_size == 0:
            if STEP_IMAGES % self.workers:
                raise ConfigError(f"--workers {self.workers} does not divide {STEP_IMAGES} images: choose --batch_size")
            object.__setattr__(self, "batch_size", STEP_IMAGES // self.workers)
        if self.batch_size == 1:
            raise ConfigError("a worker's batch of one image is too small for its norms: use a larger --batch_size")
        if self.whitening_epochs < 0:
            object.__setattr__(self, "whitening_epochs", max(1, round(self.epochs * self.whitening_share)))


@dataclass(frozen=True)
class Hyp2024(Hyp):
    """Airbench's recipe with Muon (2024): 94.01% on one A100 in 2.59 s."""

    epochs: int = 8  # passes over the training images, over which the rates fall to 0
    pixels: tuple[int, ...] = (32,)  # resolutions, spread evenly over the epochs
    kept: tuple[float, ...] = (1,)  # fractions of the images, likewise

    whitening_share = 3 / 8


SETS = {"muon2024": Hyp2024}


class Stage(NamedTuple):
    """What differs between kinds of step: each has compiled code and a CUDA graph of its own."""

    resolution: int  # pixels a side
    trains_whitening: bool  # its bias; later the backward pass ends before the first layer


def of_epoch(values: tuple, epoch: int, epochs: int) -> float:
    """Return the value that an epoch (from 1) has, of values that are spread evenly over a run."""
    return values[(2 * epoch - 1) * len(values) // (2 * epochs)]


def stage_of(hyp: Hyp, epoch: int) -> Stage:
    # Coarse features are learned first and need few pixels: a step at 24 has half of the work. Without: --pixels 32
    resolution = int(of_epoch(hyp.pixels, epoch, hyp.epochs))
    return Stage(resolution, trains_whitening=epoch <= hyp.whitening_epochs)


def steps_of(hyp: Hyp, train_images: int, epoch: int) -> int:
    """Return the number of steps of an epoch."""
    kept = of_epoch(hyp.kept, epoch, hyp.epochs)
    return round(train_images // hyp.workers * kept) // hyp.batch_size


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

PADDING = 2  # pixels by which a crop is shifted, at most


def plan_epoch(hyp: Hyp, images: Tensor, losses: Tensor, steps: int, team: Team, seed: int, epoch: int) -> list[Tensor]:
    """Return the batch of each step: rows of `images`, crops and flips, int64 [3, workers * batch_size].

    `losses` [n] are those of the images when they were last seen, at first infinite. Each worker has its own images
    and its own random numbers, whatever process computes it.
    """
    plans = []
    for number, worker in enumerate(team.workers):
        rows = data.shard(number, len(team.workers), len(images), team.device)
        draws = data.generator(team.device, seed, worker, epoch)
        crops = data.independent_assignment(len(rows), (2 * PADDING + 1) ** 2, draws)
        flips = data.independent_assignment(len(rows), 2, draws)
        # An image is mirrored at random in the first epoch, then in every other one: two epochs show both of its
        # sides. Independent flips show one side of half of the images twice. Without: delete the next two lines.
        first_side = data.independent_assignment(len(rows), 2, data.generator(team.device, seed, worker, 0))
        flips = (first_side + epoch) % 2
        order = torch.randperm(len(rows), generator=draws, device=team.device)
        if of_epoch(hyp.kept, epoch, hyp.epochs) < 1:
            order = order[hardest(losses[rows[order]], steps * hyp.batch_size)]
        plans.append(torch.stack([rows, crops, flips])[:, order])
    return data.split_into_steps(plans, steps, hyp.batch_size)


def hardest(losses: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest losses, in their order.

    Late epochs skip the images that were easiest when last seen: they teach little. Without: --kept 1
    """
    return losses.topk(count, sorted=False).indices.sort().values


def make_batch(images: Tensor, labels: Tensor, batch: Tensor, resolution: int) -> tuple[Tensor, Tensor]:
    """Return augmented images [B, 3, resolution, resolution], channels-last, and their labels [B]."""
    rows, crops, flips = batch
    x = data.crop_and_flip(images, rows, crops, flips, PADDING)
    if resolution < data.SIZE:
        x = F.interpolate(x, size=(resolution, resolution), mode="bilinear", align_corners=False)
    return x, labels[rows]


# ---------------------------------------------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Images [B, 3, H, W] to logits [B, classes]; 1,971,352 trained parameters at width 64, 0.211 GFLOP forward."""

    def __init__(self, hyp: Hyp, classes: int, workers: int = 1) -> None:
        """`workers` are those whose batches are computed together, one after the other."""
        super().__init__()
        width = hyp.width
        norm = partial(layers.GhostBatchNorm, groups=workers, momentum=hyp.norm_momentum, eps=1e-12)
        self.whitening = layers.WhiteningConvolution(3, 24, size=2)
        self.groups = nn.Sequential(
            block(24, width, norm),
            block(width, 4 * width, norm),
            block(4 * width, 4 * width, norm),
        )
        self.pool = layers.MaxPool()  # over all that is left, whatever the resolution
        self.linear = nn.Linear(4 * width, classes, bias=False)
        self.linear.weight.data /= self.linear.weight.data.std()

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whitening(images)))
        return self.linear(self.pool(x).flatten(1)) / 256


def block(channels_in: int, channels_out: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two 3x3 convolutions with norms, from [B, channels_in, S, S] to [B, channels_out, S // 2, S // 2]."""
    return nn.Sequential(
        dirac_init(layers.Convolution(channels_in, channels_out, pooled=True)),
        layers.MaxPool(2),  # before the norm, which leaves it a quarter of the work
        norm(channels_out),
        nn.GELU(),
        dirac_init(layers.Convolution(channels_out, channels_out)),
        norm(channels_out),
        nn.GELU(),
    )


def dirac_init(convolution: nn.Conv2d) -> nn.Conv2d:
    """Let the first filters be the identity, so that the image reaches the head from the first step on.

    The others have PyTorch's initialization. Without: return the convolution as it is.
    """
    nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
    return convolution


def whiten(network: Network, images: Tensor) -> None:
    """Set the first layer's filters from images [n, 32, 32, 3] of worker 0. They are not trained.

    Neighbouring pixels are alike. Filters that decorrelate them let all directions be learned at one rate.
    """
    filters = layers.whitening_filters(images[:5000], size=2, epsilon=5e-4)
    both_signs = torch.cat([filters, -filters])  # since the activation suppresses negative values
    network.whitening.weight.copy_(both_signs)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------

WEIGHT_DECAY = 2e-6  # of biases and head: per image of a step, over the group's rate


def make_optimizers(hyp: Hyp, network: Network, team: Team) -> list[Optimizer]:
    """Return Muon for the filters, and SGD for biases and head."""
    inner = list(network.groups.parameters())
    filters = [weight for weight in inner if weight.ndim == 4]
    biases = [weight for weight in inner if weight.ndim == 1]
    decay = WEIGHT_DECAY * hyp.batch_size
    groups = [
        {"params": biases, "weight_decay": decay / hyp.bias_rate},
        {"params": [network.whitening.bias], "weight_decay": decay / hyp.bias_rate},
        {"params": [network.linear.weight], "weight_decay": decay / hyp.head_rate},
    ]
    sgd = SGD(groups, lr=0.0, momentum=hyp.momentum, nesterov=True)
    optimizers = [Muon(filters, hyp.filter_momentum, team), sgd]
    fast.keep_rates_on_gpu(optimizers, team.device)
    return optimizers


def set_rates(hyp: Hyp, optimizers: list[Optimizer], epoch: float) -> None:
    """Set all rates at a time in epochs: each falls linearly from the end of the first step.

    SGD's are for the sum of the loss over a step; ours is the mean of the workers' sums.
    """
    step = hyp.workers * hyp.batch_size / EPOCH_IMAGES
    muon, sgd = optimizers
    biases, whitening, head = sgd.param_groups
    bias_rate = hyp.bias_rate * hyp.workers
    head_rate = hyp.head_rate * hyp.workers
    set_rate(muon.param_groups[0], interpolate(epoch, (step, hyp.epochs + step), (hyp.filter_rate, 0)))
    set_rate(biases, interpolate(epoch, (step, hyp.epochs + step), (bias_rate, 0)))
    set_rate(whitening, interpolate(epoch, (step, hyp.whitening_epochs + step), (bias_rate, 0)))
    set_rate(head, interpolate(epoch, (step, hyp.epochs + step), (head_rate, 0)))


# ---------------------------------------------------------------------------------------------------------------------
# Loss and evaluation
# ---------------------------------------------------------------------------------------------------------------------


def losses_of(hyp: Hyp, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image, [B], in float32 at least.

    With label smoothing, weights stop growing once the right class is likely. Without: --label_smoothing 0
    """
    logits = fast.at_least_float32(logits)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=hyp.label_smoothing)


def average_over_views(predict: Callable[[Tensor], Tensor], x: Tensor, views: str) -> Tensor:
    """Return the mean logits of images [B, 3, 32, 32] over views of them, all of which have the same class.

    The mean of six is wrong less often than one view: by 1.1 points of accuracy. Without: --views one
    """
    up_left = data.shifted(x, 1)
    down_right = data.shifted(x, -1)
    shifted = [up_left, down_right, data.mirrored(up_left), data.mirrored(down_right)]
    if views == "one":
        weighted = [(1.0, x)]
    elif views == "two":
        weighted = [(0.5, x), (0.5, data.mirrored(x))]
    else:
        weighted = [(0.25, x), (0.25, data.mirrored(x)), *((0.125, view) for view in shifted)]
    return sum(weight * predict(view) for weight, view in weighted)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Shards(NamedTuple):
    """The images on this process's device: those of its workers, and its share of the test images."""

    images: Tensor  # [n, 32, 32, 3]
    labels: Tensor  # int64 [n]
    last_losses: Tensor  # of each image, when it was last seen
    test_images: Tensor  # [m, 32, 32, 3]
    test_labels: Tensor


def prepare(images: data.Images, network: Network, precision: fast.Precision, team: Team, clock: Clock | Log) -> Shards:
    """Upload and normalize the images, and compute the whitening filters. All of it counts as training time."""
    with clock.timed("upload"):
        train_images, labels = data.upload_training_images(images, team)
        test_images, test_labels = data.upload_test_images(images, team)
        last_losses = torch.full((len(labels),), torch.inf, device=team.device)
    with clock.timed("preprocessing"):
        train_images = data.normalize(train_images, images.normalization, precision)
        test_images = data.normalize(test_images, images.normalization, precision)
    with clock.timed("whitening"):
        if team.is_main:
            whiten(network, train_images[:: len(team.workers)])
        team.broadcast(network.whitening.weight)
    return Shards(train_images, labels, last_losses, test_images, test_labels)


class Pass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate
    losses: Tensor  # of each image, float32 [B]
    sums: Tensor  # [3]
    statistics: list[Tensor]  # of the norms


def forward_pass(hyp: Hyp, network: Network, precision: fast.Precision, images: Tensor, labels: Tensor) -> Pass:
    with precision.autocast():
        logits = network(images)
    losses = losses_of(hyp, logits, labels)
    sums = sums_of(logits, labels, losses)
    return Pass(losses.sum(), losses.detach().float(), sums, layers.batch_statistics(network))


def train(hyp: Hyp, options: Options, images: data.Images, team: Team, log: Log) -> None:
    """Make the missing runs of a campaign."""
    precision = fast.Precision(options.precision, team.device, half_weights=False)
    workers = len(team.workers) // options.micro_batches  # whose batches are computed together
    steps_by_epoch = [steps_of(hyp, len(images.train_images), epoch) for epoch in range(1, hyp.epochs + 1)]
    stages = {stage_of(hyp, epoch): epoch for epoch in range(hyp.epochs, 0, -1)}  # and the first epoch of each
    sums = torch.zeros(3, dtype=torch.float64, device=team.device)  # of an epoch
    if 0 in steps_by_epoch:
        kept = f"epoch {steps_by_epoch.index(0) + 1} keeps less of {len(images.train_images)} images than a step needs"
        raise ConfigError(f"{kept}, {hyp.workers * hyp.batch_size}: raise --kept, or use a smaller batch")

    def fresh() -> tuple[Network, list[Optimizer]]:
        network = Network(hyp, images.classes, workers)
        fast.place(network, precision)
        return network, make_optimizers(hyp, network, team)

    network, optimizers = fresh()
    restart = partial(fast.restart, network, optimizers, fresh, rank=team.rank, keep=["whitening.weight"])
    forward = partial(forward_pass, hyp, network, precision)
    predict = partial(fast.predict, network)
    batch_of = make_batch

    def train_step(shards: Shards, batch: Tensor, stage: Stage) -> None:
        """Update the weights once, from one batch of every worker."""
        losses = []
        for part in batch.chunk(options.micro_batches, dim=1):
            made = forward(*batch_of(shards.images, shards.labels, part, stage.resolution))
            made.loss.backward()
            if not losses:  # the first part begins with worker 0's images, whose statistics count
                layers.update_running_statistics(network, made.statistics)
            sums.add_(made.sums)
            losses.append(made.losses)
        team.average_gradients(network.parameters())  # over all workers, here and nowhere else
        with precision.autocast():  # for the matrix products of Muon
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        shards.last_losses[batch[0]] = torch.cat(losses)

    def evaluate(shards: Shards, views: str) -> Score:
        """Return the score on the test images, of which each process evaluates its share."""
        network.eval()
        team.broadcast(*network.buffers())  # rank 0's statistics, which are worker 0's
        with torch.no_grad(), precision.autocast():
            chunks = data.chunks(shards.test_images)
            logits = torch.cat([average_over_views(predict, chunk, views) for chunk in chunks])
        network.train()
        losses = losses_of(hyp, logits, shards.test_labels)
        return read_score(sums_of(logits, shards.test_labels, losses), team)

    def kinds(shards: Shards) -> Iterator[tuple[Tensor, Stage]]:
        """Yield a batch of each kind of step, after setting a fresh network to it."""
        restart(seed=0)
        for stage, epoch in reversed(stages.items()):
            network.whitening.bias.requires_grad_(stage.trains_whitening)
            steps = steps_of(hyp, len(shards.images) * team.world_size, epoch)
            for batch in plan_epoch(hyp, shards.images, shards.last_losses, steps, team, 0, epoch)[:1]:
                yield batch, stage

    def noise_batches() -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a batch of noise for each kind of step, on which compiled code is checked."""
        restart(seed=0)
        for stage in reversed(stages):
            network.whitening.bias.requires_grad_(stage.trains_whitening)
            yield fast.noise_with_labels(network, workers * hyp.batch_size, stage.resolution, precision)

    compiled = False
    # Nothing before prepare() is timed: compiling, and a step of each kind on noise, which chooses kernels.
    if options.compile:
        log.say("compiling, which takes about a minute; a cache makes the next launch faster")
        eager = forward
        forward = fast.compile_training(eager, network, noise_batches(), precision, team)
        compiled = forward is not eager
        if team.on_gpu and compiled:  # on a CPU they gain less than compiling takes
            predict = fast.compile_evaluation(network, len(images.test_images), precision, team)
            batch_of = torch.compile(make_batch, dynamic=False)
            fast.compile_updates(optimizers)
    if not options.no_warmup:
        noise = data.noise_like(images, team, few=2 * hyp.workers * hyp.batch_size)
        rehearsal = prepare(noise, network, precision, team, Clock(team.synchronize))
        for batch, stage in kinds(rehearsal):
            train_step(rehearsal, batch, stage)
        evaluate(rehearsal, "one")
        evaluate(rehearsal, hyp.views)

    shards = prepare(images, network, precision, team, log)
    step = fast.graph(partial(train_step, shards), kinds(shards), team, enabled=not options.no_graph)
    images_by_epoch = [steps * hyp.workers * hyp.batch_size for steps in steps_by_epoch]
    log.ready(images_by_epoch, compiled, graphs=isinstance(step, fast.CudaGraphs))
    for _, seed in log.missing_runs():
        restart(seed=seed)
        shards.last_losses.fill_(torch.inf)
        for epoch in range(1, hyp.epochs + 1):
            stage = stage_of(hyp, epoch)
            with log.timed("training"):
                network.whitening.bias.requires_grad_(stage.trains_whitening)
                sums.zero_()
                steps = steps_by_epoch[epoch - 1]
                plan = plan_epoch(hyp, shards.images, shards.last_losses, steps, team, seed, epoch)
                for number, batch in log.progress(plan):
                    set_rates(hyp, optimizers, epoch - 1 + number / steps)
                    step(batch, stage)
            with log.timed("validation"):  # shown, but not part of the training time
                validation = evaluate(shards, hyp.views if epoch == hyp.epochs else "one")
            if not log.epoch(read_score(sums, team), validation):
                break
        log.finish(network.state_dict())


if __name__ == "__main__":
    main(train)
