"""Time the ways to load an epoch of images of Page's first article of 2018, and ours (lineage.md, "Input pipelines").

    PYTHONPATH=. python notebook/input_pipelines.py [--steps N] [--repeats N] [options of train.py]

Every way loads an epoch without training, then with at most N training steps, scaled to the epoch's number.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from large_batch_cifar_10_fast.compiling import compiled
from large_batch_cifar_10_fast.config import choose_computation, parse
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.data.shards import Batch, Shards
from large_batch_cifar_10_fast.devices import count_cores
from large_batch_cifar_10_fast.distributed import init_distributed
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipe import CIFAR_10_NORMALIZATION
from large_batch_cifar_10_fast.train import make_model, prepare, train_step, warm_up

PADDING, SIZE = 4, 32  # pixels
CROPS = (2 * PADDING + 1, 2 * PADDING + 1, 2)  # offsets down and across, mirrored or not
PAGE_2018 = ("323", "308", "301", "297", "-")  # seconds of Page's whole run on a V100 with each

MEAN, STD = CIFAR_10_NORMALIZATION


def load_batch(images: np.ndarray, labels: np.ndarray, crops: list | None, indices: list[int]) -> Batch:
    """Crop and mirror images on the CPU, one after the other: float32 [B, 3, 32, 32], and labels int64 [B].

    `images` are uint8 [n, 32, 32, 3], or come from `pad_and_normalize`. Without `crops` [n, 3] each image samples one.
    """
    batch = []
    for index in indices:
        image = images[index] if images.dtype == np.float32 else pad_and_normalize(images[index])
        down, across, mirrored = crops[index] if crops else map(random.randrange, CROPS)
        image = image[:, down : down + SIZE, across : across + SIZE]
        image = np.ascontiguousarray(image[:, :, ::-1] if mirrored else image)
        batch.append((torch.from_numpy(image), int(labels[index])))
    return default_collate(batch)


def pad_and_normalize(images: np.ndarray) -> np.ndarray:
    """Turn bytes [..., 32, 32, 3] into float32 [..., 3, 40, 40], padded by reflection, normalized by channel."""
    border = (PADDING, PADDING)
    padded = np.pad(images, [(0, 0)] * (images.ndim - 3) + [border, border, (0, 0)], mode="reflect")
    return np.ascontiguousarray(np.moveaxis((padded - np.float32(MEAN)) / np.float32(STD), -1, -3))


def load_epoch(images: np.ndarray, labels: np.ndarray, bulk: bool, processes: int, shards: Shards) -> Iterator[Batch]:
    """Load an epoch on the CPU, all crops sampled at once if `bulk`, and copy each batch to the device."""
    crops = np.random.default_rng().integers(0, CROPS, (len(images), 3)).tolist() if bulk else None
    device, dtype, size = shards.images.device, shards.images.dtype, shards.recipe.batch_size
    how = {"shuffle": True, "num_workers": processes, "pin_memory": device.type == "cuda"}
    how["collate_fn"] = partial(load_batch, images, labels, crops)
    for batch, targets in DataLoader(range(len(images)), size, **how):
        # Copy the pinned memory before casting: cast on the host, the batch would no longer be pinned.
        moved = batch.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
        yield moved, targets.to(device, non_blocking=True)


def input_pipelines(images: np.ndarray, labels: np.ndarray, shards: Shards) -> dict[str, Callable]:
    """Return functions that load an epoch in each of Page's ways, and in ours from `shards`, by name."""
    ready, processes = pad_and_normalize(images), min(4, count_cores())
    return {
        f"(a) all for each image, {processes} processes": partial(load_epoch, images, labels, False, processes, shards),
        "(b) prepared once, one process": partial(load_epoch, ready, labels, False, 1, shards),
        "(c) crops sampled in bulk": partial(load_epoch, ready, labels, True, 1, shards),
        "(d) on the main thread": partial(load_epoch, ready, labels, True, 0, shards),
        "(e) ours, all on the device": lambda: (
            next(sample.micro_batches()) for sample in shards.epoch(seed=0, epoch=1)
        ),
    }


def time_epoch(batches: Iterable[Batch], use: Callable, most: int, steps: int, clock: Clock) -> float:
    """Return the seconds of an epoch of `steps` batches; if `most` is smaller, measure as many and extrapolate."""
    start, batches = dict(clock.seconds), iter(batches)
    with clock.timed("first"):
        use(next(batches))
    with clock.timed("others"):
        for batch in islice(batches, most - 1):
            use(batch)
    first, others = (clock.seconds[part] - start.get(part, 0.0) for part in ("first", "others"))
    return first + others * (steps - 1) / max(1, most - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000, help="training images (default 50000)")
    parser.add_argument("--steps", type=int, default=10_000, help="training steps of an epoch (default all)")
    parser.add_argument("--repeats", type=int, default=1)
    options, others = parser.parse_known_args()
    config, recipe = parse(["--recipe", "page", *others])
    with init_distributed(recipe.workers, config.device) as ctx:
        config, noise = choose_computation(config, recipe, ctx, options.images), random_images(options.images, 1)
        model = make_model(recipe, ctx, config.precision)
        model = compiled(model, options.images) if config.compile else model
        data = prepare(noise, model, Clock(ctx.synchronize))
        shards = data.train
        warm_up(model, options.images, 1)  # with the short last batch
        whole, clock = len(shards.epoch(seed=0, epoch=1)), Clock(ctx.synchronize)
        pipelines = input_pipelines(*noise.train, shards)

        def train_on(batch: Batch) -> None:
            some = torch.arange(len(batch[1]), device=ctx.device)
            train_step(model, data, SimpleNamespace(micro_batches=lambda: [batch], indices=some))

        seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pipelines}
        for repeat in range(options.repeats):
            for name, load in [*pipelines.items()][:: -1 if repeat % 2 else 1]:  # a drift of speed falls on all
                loading, training = seconds[name]
                loading.append(time_epoch(load(), lambda batch: None, whole, whole, clock))
                most = min(max(2, options.steps), whole)
                training.append(time_epoch(load(), train_on, most, whole, clock))
    print(f"{'an epoch, s':36}{'loading':>10}{'with training':>15}{'Page, a run':>13}")
    for (name, (loading, training)), page in zip(seconds.items(), PAGE_2018, strict=True):
        print(f"{name:36}{median(loading):10.2f}{median(training):15.2f}{page:>13}")


if __name__ == "__main__":
    main()
