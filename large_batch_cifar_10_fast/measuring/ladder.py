"""Page's ladder (2018): what it costs to hand over an epoch of images, from all by hand to all on the device."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.shards import MEAN, STD, Batch, Shards
from ..plot import BEHIND, WIDTH, new_figure, save_picture
from ..training.world import World

PADDING, SIZE = 4, 32
PLACES = 2 * PADDING + 1
MOST_LOADERS = 4

# By rung: of an epoch handed over, of the same with the training step, once a round; and of Page's whole run.
Seconds = dict[str, tuple[list[float], list[float], float | None]]


@dataclass(frozen=True)
class Rung:
    """One way to hand over an epoch; `published` are the seconds of a whole run that Page saw with it on a V100."""

    name: str
    published: float | None
    epoch: Callable[[], Iterable[Batch]]


class ByHand(Dataset):
    """Images [n, 32, 32, 3] of bytes: each is padded, normalised, transposed and cut anew whenever it is asked for."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = np.pad(self.images[index], ((PADDING, PADDING), (PADDING, PADDING), (0, 0)), mode="reflect")
        image = ((padded - np.array(MEAN)) / np.array(STD)).astype(np.float32).transpose(2, 0, 1)
        return cut(image, *draw_for_one()), int(self.labels[index])


class Prepared(Dataset):
    """The same, padded, normalised and transposed once; `in_bulk`: cut as was drawn for all images together."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, in_bulk: bool) -> None:
        padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)), mode="reflect")
        normalised = (padded - np.float32(MEAN)) / np.float32(STD)
        self.images, self.labels, self.in_bulk = np.ascontiguousarray(normalised.transpose(0, 3, 1, 2)), labels, in_bulk

    def draw(self) -> None:
        self.choices = np.random.default_rng().integers(0, (PLACES, PLACES, 2), (len(self.images), 3)).tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        choices = self.choices[index] if self.in_bulk else draw_for_one()
        return cut(self.images[index], *choices), int(self.labels[index])


def draw_for_one() -> tuple[int, int, int]:
    """Where the crop begins, down and across, and whether it is mirrored: a call of its own for each."""
    return random.randrange(PLACES), random.randrange(PLACES), random.randrange(2)


def cut(image: np.ndarray, down: int, across: int, flip: int) -> Tensor:
    crop = image[:, down : down + SIZE, across : across + SIZE]
    return torch.from_numpy(np.ascontiguousarray(crop[:, :, ::-1] if flip else crop))


def rungs(images: np.ndarray, labels: np.ndarray, shards: Shards, cores: int) -> list[Rung]:
    """The ladder from the bottom; the top hands over the same images as `shards`, already on the device."""
    loaders = min(MOST_LOADERS, cores)
    size, device, dtype = shards.recipe.batch_size, shards.images.device, shards.images.dtype

    def loaded(dataset: Dataset, workers: int) -> Iterator[Batch]:
        if isinstance(dataset, Prepared) and dataset.in_bulk:
            dataset.draw()
        loader = DataLoader(dataset, size, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda")
        for batch, targets in loader:
            # First the pinned bytes as they are: to be cast here they would be copied, and no longer pinned.
            moved = batch.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
            yield moved, targets.to(device, non_blocking=True)

    by_hand, prepared = ByHand(images, labels), Prepared(images, labels, in_bulk=False)
    drawn = Prepared(images, labels, in_bulk=True)
    return [
        Rung(f"(a) all for each image, {loaders} processes", 323, lambda: loaded(by_hand, loaders)),
        Rung("(b) prepared once, one process", 308, lambda: loaded(prepared, 1)),
        Rung("(c) choices drawn in bulk", 301, lambda: loaded(drawn, 1)),
        Rung("(d) on the main thread", 297, lambda: loaded(drawn, 0)),
        Rung("(e) an epoch dealt on the device", None, lambda: (step[0] for step in shards.epoch(seed=0, epoch=1))),
    ]


def seconds_of_an_epoch(rung: Rung, work: Callable[[Batch], None], most: int, steps: int, world: World) -> float:
    """From asking for the first batch to the end of the last one's work; beyond `most` batches at the pace seen."""
    world.synchronize()
    start = time.perf_counter()
    batches = iter(rung.epoch())
    for taken, batch in zip(range(1, min(most, steps) + 1), batches, strict=False):
        work(batch)
        if taken == 1:
            world.synchronize()
            first = time.perf_counter() - start
    world.synchronize()
    total = time.perf_counter() - start
    return total if taken == steps else first + (total - first) / (taken - 1) * (steps - 1)


def seconds_of_rungs(
    ladder: Sequence[Rung], train: Callable[[Batch], None], most: int, steps: int, rounds: int, world: World
) -> Seconds:
    """Up and down again, so that a drift of the machine's speed falls on all rungs."""
    seconds: Seconds = {rung.name: ([], [], rung.published) for rung in ladder}
    for turn in range(rounds):
        for rung in ladder[:: -1 if turn % 2 else 1]:
            alone, trained, _ = seconds[rung.name]
            alone.append(seconds_of_an_epoch(rung, lambda batch: None, steps, steps, world))
            trained.append(seconds_of_an_epoch(rung, train, most, steps, world))
    return seconds


def as_table(seconds: Seconds) -> str:
    """In Markdown, a row a rung: handed over, with the training step, and Page's whole run; of several rounds the
    medians, with the least and the most."""
    lines = ["| an epoch of 50,000 images | handed over, s | with the training step, s | Page's run on a V100, s |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, (alone, trained, published) in seconds.items():
        lines.append(f"| {name} | {_spread(alone, 2)} | {_spread(trained, 1)} | {published or '-'} |")
    return "\n".join(lines)


def _spread(values: list[float], places: int) -> str:
    least, middle, most = (f"{f(values):.{places}f}" for f in (min, median, max))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def draw_bars(axes, names: list[str], values: list[float], label: str) -> None:
    """Draw horizontal bars from the top down, each with its value at its end."""
    bars = axes.barh(names, values, color=BEHIND, height=0.6)
    axes.bar_label(bars, [f" {value:.3g}" if value < 1000 else f" {value:.0f}" for value in values], fontsize=6)
    axes.set(xlabel=label, xlim=(0, 1.15 * max(values)))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def draw_ladder(seconds: Seconds, out: Path) -> None:
    """Seconds of an epoch on each rung, with the training step left out and with it."""
    figure = new_figure(WIDTH, 2.8)
    for axis, column, label in zip(figure.subplots(2, 1), (0, 1), ("handed over", "with the training"), strict=True):
        draw_bars(axis, list(seconds), [median(row[column]) for row in seconds.values()], f"an epoch {label}, seconds")
    save_picture(figure, out)
