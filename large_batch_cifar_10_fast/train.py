"""CIFAR-10 to 94%: the whole story, from the command line to the summary.

Start it with train_cifar_parallel.sh (all devices), or as `python -m large_batch_cifar_10_fast.train` (one
process). The method is described in the README; the sections named in comments are those of its specification.
"""

import contextlib
import os
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from .campaign import finished_rows, read_request
from .data import Batch, Shards, evaluation_batches, normalise, upload_shards, upload_test
from .distributed import Team, join_team, processes_here
from .images import Images, load_images
from .launch import check_request, count_cores
from .network import DTYPES, Network, smoothed_cross_entropy, whitening_filters
from .optimizer import NesterovSGD
from .run_log import Clock, RunLog, Score, warn
from .settings import Refusal, Settings
from .tables import written_whole


def main(settings: Settings) -> None:
    check_request(settings, processes_here())
    with join_team(settings) as team:
        settings = replace(settings, precision=settings.precision or ("fp16" if on_gpu(team) else "fp32"))
        images = load_images(settings.data)
        log = RunLog(settings, team, images, finished_rows(settings))
        if team.leads and not on_gpu(team) and settings.width >= 64:
            warn_of_slowness(settings, len(images.train_images))
        if not settings.no_warmup:
            warm_up(settings, team, test_images=len(images.test_images) if on_gpu(team) else team.processes)

        clock = Clock(team.wait)
        task = prepare(images, settings, team, clock)
        log.set_up(clock, task.train.steps_per_epoch)
        for run in log.runs_to_make():
            network = train_once(run, settings, team, task, clock.fork(), log)
        log.summary()
        if settings.save and team.leads:
            save(network, settings)


@dataclass(frozen=True)
class Task:
    """What all runs share, on the device: this process's training shards, its test images, the whitening."""

    train: Shards
    test: Batch
    filters: Tensor


def prepare(images: Images, settings: Settings, team: Team, clock: Clock) -> Task:
    """Upload, normalise, find the whitening filters: all of it counts as training time (section 6)."""
    with clock.counting("upload"):
        train = upload_shards(images, team.workers, team.total_workers, settings.batch_size, settings.passes,
                              team.device)  # fmt: skip
        test_images, test_labels = upload_test(images, team.rank, team.processes, team.device)
    with clock.counting("preprocessing"):
        dtype = DTYPES[settings.precision]
        train = replace(train, images=normalise(train.images, dtype))
        test = normalise(test_images, dtype), test_labels
    with clock.counting("whitening"):
        if team.leads:
            filters = whitening_filters(train.images[train.rows_of(0)])
        else:
            filters = train.images.new_empty(27, 3, 3, 3)
        team.share(filters)
    return Task(train, test, filters)


def train_once(run: int, settings: Settings, team: Team, task: Task, clock: Clock, log: RunLog) -> Network:
    """One run from fresh weights; its seed alone decides them, every shuffle, crop and flip."""
    seed = settings.seed + run
    network = Network(task.filters, settings.width, seed).cast(settings.precision, team.device)
    averaging = team.average_gradients(network)
    optimizer = NesterovSGD(network, settings, task.train.steps_per_epoch, summed=len(team.workers))
    for epoch in range(1, settings.epochs + 1):
        tally = new_tally(team)
        with clock.counting("training"):
            for batches in log.watch(task.train.epoch(seed, epoch), run, epoch):
                take_step(network, averaging, optimizer, batches, settings, team, tally)
        validation = evaluate(network, task.test, settings, team)
        log.epoch(clock, validation)
    log.run(run, clock, read_tally(tally, team), validation)
    return network


def take_step(network: Network, averaging: nn.Module, optimizer: NesterovSGD, batches: list[Batch],
              settings: Settings, team: Team, tally: Tensor) -> None:  # fmt: skip
    """One update from one batch of every worker, in one pass or several; gradients are averaged in the last."""
    for index, (images, labels) in enumerate(batches):
        network.follow(settings.batch_size if team.leads and index == 0 else 0)
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last or averaging is network else averaging.no_sync():
            with autocast(settings, team):
                logits = averaging(images)
            losses = smoothed_cross_entropy(logits, labels)
            losses.sum().backward()
        count(tally, logits, labels, losses)
    optimizer.step()


@torch.no_grad()
def evaluate(network: Network, test: Batch, settings: Settings, team: Team) -> Score:
    """All test images once, shared by the processes: logits averaged over each image and its mirror image."""
    network.eval()
    team.share(*(buffer for norm in network.norms() for buffer in norm.buffers()))
    tally = new_tally(team)
    for images, labels in evaluation_batches(*test):
        with autocast(settings, team):
            logits = (network(images) + network(images.flip(3))) / 2
        count(tally, logits, labels, smoothed_cross_entropy(logits, labels))
    network.train()
    return read_tally(tally, team)


def new_tally(team: Team) -> Tensor:
    """Images right, images seen, and their losses added up (float64 [3]), on the device: nothing waits for it."""
    return torch.zeros(3, dtype=torch.float64, device=team.device)


@torch.no_grad()
def count(tally: Tensor, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    right = (logits.argmax(1) == labels).sum()
    tally += torch.stack([right, torch.full_like(right, len(labels)), losses.sum()])


def read_tally(tally: Tensor, team: Team) -> Score:
    correct, images, loss = team.sum(tally).tolist()
    return Score(int(correct), int(images), loss / images)


def warm_up(settings: Settings, team: Team, test_images: int) -> None:
    """Two steps and an evaluation on random data of the right shapes, so that the timed runs find kernels
    chosen, memory at hand and the processes connected. What it trains is thrown away."""
    random = np.random.default_rng(0)
    train_images = 2 * settings.workers * settings.batch_size
    images, labels = (
        random.integers(0, high, (train_images + test_images, *shape), dtype)
        for high, shape, dtype in ((256, (32, 32, 3), np.uint8), (10, (), np.int64))
    )
    noise = Images("noise", images[:train_images], labels[:train_images], images[train_images:], labels[train_images:])
    task = prepare(noise, settings, team, Clock(team.wait))
    network = Network(task.filters, settings.width, seed=0).cast(settings.precision, team.device)
    averaging = team.average_gradients(network)
    optimizer = NesterovSGD(network, settings, task.train.steps_per_epoch, summed=len(team.workers))
    for batches in task.train.epoch(seed=0, epoch=0):
        take_step(network, averaging, optimizer, batches, settings, team, new_tally(team))
    evaluate(network, task.test, settings, team)


def save(network: Network, settings: Settings) -> None:
    """The last run's weights and running statistics; read them with torch.load(FILE, weights_only=True)."""
    with written_whole(settings.save) as unfinished:
        torch.save({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, unfinished)


def autocast(settings: Settings, team: Team) -> torch.autocast:
    return torch.autocast(team.device.type, torch.bfloat16, enabled=settings.precision == "bf16")


def on_gpu(team: Team) -> bool:
    return team.device.type == "cuda"


def warn_of_slowness(settings: Settings, train_images: int) -> None:
    """Say how long a CPU takes, from the 30 images a second and core that plain float32 was seen to train."""
    hours = settings.runs * settings.epochs * train_images / (30 * count_cores()) / 3600
    warn(f"without a GPU this takes about {hours:.1f} hours; --demo is the same method in two minutes")


if __name__ == "__main__":
    try:
        main(read_request(sys.argv[1:], os.environ))
    except Refusal as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train_cifar_parallel.sh: {refusal}", file=sys.stderr)
        sys.exit(2)
