"""CIFAR-10 to 94%: the whole story, from the command line to the summary.

Start it with train_cifar_parallel.sh (all devices), or as `python -m large_batch_cifar_10_fast.train` (one process).
The method is docs/method.md; "section 6" in a comment is its section 6.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .campaign import finished_rows, read_request
from .compiling import compiled
from .data import Batch, Shards, evaluation_batches, normalise, upload_shards, upload_test
from .distributed import Team, join_team, processes_here
from .images import Images, load_images, random_images
from .launch import check_request, count_cores
from .network import DTYPES, Network, autocast, smoothed_cross_entropy, whitening_filters
from .optimizer import NesterovSGD
from .run_log import Clock, RunLog, Score, warn
from .settings import Refusal, Settings
from .tables import written_whole


def main(settings: Settings) -> None:
    check_request(settings, processes_here())
    with join_team(settings) as team, explaining_memory(settings, team):
        train_campaign(settings, team)


def train_campaign(settings: Settings, team: Team) -> None:
    """All runs of a launch: what they share is made once, and only the first part of it is not timed."""
    images = load_images(settings.data)
    settings = decide(settings, team, len(images.train_images))
    log = RunLog(settings, team, images, finished_rows(settings))
    if team.leads and not on_gpu(team) and settings.width >= 64:
        hours = seconds_on_cpu(settings, len(images.train_images)) / 3600
        warn(f"without a GPU this takes about {hours:.1f} hours; --demo is the same method in two minutes")
    network = Network(torch.zeros(27, 3, 3, 3), settings.width, seed=0).cast(settings.precision, team.device)
    model = Model(network, compiled(network, settings, team), settings, team)
    if not settings.no_warmup:
        warm_up(model, test_images=len(images.test_images) if on_gpu(team) else team.processes)

    clock = Clock(team.wait)
    task = prepare(images, settings, team, clock)
    log.set_up(clock, task.train.steps_per_epoch)
    for run in log.runs_to_make():
        train_once(run, model, task, clock.fork(), log)
    log.summary()
    if settings.save and team.leads:
        save(network, settings)


@dataclass(frozen=True)
class Model:
    """What all runs train, one after the other from fresh weights; `forward` is the network, compiled or not."""

    network: Network
    forward: nn.Module
    settings: Settings
    team: Team


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


def train_once(run: int, model: Model, task: Task, clock: Clock, log: RunLog) -> None:
    """One run from fresh weights; its seed alone decides them, every shuffle, crop and flip."""
    settings, team, seed = model.settings, model.team, model.settings.seed + run
    model.network.restart(task.filters, seed)
    optimizer = NesterovSGD(model.network, settings, task.train.steps_per_epoch)
    for epoch in range(1, settings.epochs + 1):
        tally = new_tally(team)
        with clock.counting("training"):
            for batches in log.watch(task.train.epoch(seed, epoch), run, epoch):
                take_step(model, optimizer, batches, tally)
        validation = evaluate(model, task.test)
        log.epoch(clock, validation)
    log.run(run, clock, read_tally(tally, team), validation)


def take_step(model: Model, optimizer: NesterovSGD, batches: list[Batch], tally: Tensor) -> None:
    """One update from one batch of every worker, in one pass or several."""
    network, team = model.network, model.team
    for index, (images, labels) in enumerate(batches):
        network.follow(model.settings.batch_size if team.leads and index == 0 else 0)
        with autocast(model.settings.precision, team.device):
            logits = model.forward(images)
        losses = smoothed_cross_entropy(logits, labels)
        losses.sum().backward()
        count(tally, logits, labels, losses)
    team.sum_gradients(network)
    optimizer.step()


@torch.no_grad()
def evaluate(model: Model, test: Batch) -> Score:
    """All test images once, shared by the processes: logits averaged over each image and its mirror image."""
    network, team = model.network, model.team
    network.eval()
    team.share(*(buffer for norm in network.norms() for buffer in norm.buffers()))
    tally = new_tally(team)
    for images, labels in evaluation_batches(*test):
        with autocast(model.settings.precision, team.device):
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


def warm_up(model: Model, test_images: int) -> None:
    """Two steps and an evaluation on random data of the right shapes, so that the timed runs find kernels
    chosen, memory at hand and the processes connected. What it trains is thrown away."""
    settings, team = model.settings, model.team
    noise = random_images(2 * settings.workers * settings.batch_size, test_images)
    task = prepare(noise, settings, team, Clock(team.wait))
    optimizer = NesterovSGD(model.network, settings, task.train.steps_per_epoch)
    for batches in task.train.epoch(seed=0, epoch=0):
        take_step(model, optimizer, batches, new_tally(team))
    evaluate(model, task.test)


def save(network: Network, settings: Settings) -> None:
    """The last run's weights and running statistics; read them with torch.load(FILE, weights_only=True)."""
    with written_whole(settings.save) as unfinished:
        torch.save({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, unfinished)


@contextlib.contextmanager
def explaining_memory(settings: Settings, team: Team) -> Iterator[None]:
    """Say, where memory runs out, what takes it and what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        share = len(team.workers)
        text = f"out of memory with {share} workers x {settings.batch_size} images in {settings.passes} passes"
        print(f"train_cifar_parallel.sh: {text} on {team.device}: raise --passes (at most {share}), or use more "
              "processes, fewer WORKERS or a smaller --batch_size", file=sys.stderr)  # fmt: skip
        sys.exit(2)


def on_gpu(team: Team) -> bool:
    return team.device.type == "cuda"


def seconds_on_cpu(settings: Settings, train_images: int) -> float:
    """About how long plain float32 takes: a core was seen to train 30 images a second at full width."""
    work = settings.runs * settings.epochs * train_images * (settings.width / 64) ** 2
    return work / (30 * count_cores())


def decide(settings: Settings, team: Team, train_images: int) -> Settings:
    """Settle what depends on the device: precision, and whether compiling pays."""
    pays = on_gpu(team) or seconds_on_cpu(settings, train_images) > 600
    use_compiler = settings.compile or (pays and not settings.no_compile)
    precision = settings.precision or ("fp16" if on_gpu(team) else "fp32")
    return replace(settings, precision=precision, compile=use_compiler, no_compile=not use_compiler)


if __name__ == "__main__":
    try:
        main(read_request(sys.argv[1:], os.environ))
    except Refusal as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train_cifar_parallel.sh: {refusal}", file=sys.stderr)
        sys.exit(2)
    # All is written and the team has parted. An ordinary exit would run PyTorch's static destructors beside its
    # threads, which aborted 5 of 90 two-process launches after their last line ("terminate called without ...").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
