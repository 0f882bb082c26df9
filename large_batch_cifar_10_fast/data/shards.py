"""Fixed shards of the workers, and the batches of an epoch, on the device (method, section 2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..distributed import DistContext
from ..recipe import Recipe, Stage, image_dtype, images_of_an_epoch, stage_of, weight_dtype
from .augment import MEAN, STD, CropAndFlip, downscale, draw

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shards:
    """The training images of a process's workers. Image i of the data set is in the shard of worker i % W.

    `images` [n, 32, 32, 3] and `labels` int64 [n] keep the order of the data set.
    """

    images: Tensor
    labels: Tensor
    workers: range
    total_images: int
    recipe: Recipe
    micro_batches: int
    make_batch: Callable[..., Batch]  # the function below, compiled or not

    def initial_losses(self) -> Tensor:
        """Return the losses of images not yet used (float32 [n]): infinite, so that none counts as easy."""
        return torch.full((len(self.images),), torch.inf, device=self.images.device)

    def by_size(self) -> Iterator[tuple[range, Tensor]]:
        """Yield workers with shards of one size, and the rows of `images` that these are (int64 [workers, size]).

        There are one or two such groups: the shards of the first workers may be an image longer.
        """
        size, longer = divmod(len(self.images), count := len(self.workers))
        for group, length in ((slice(longer), size + 1), (slice(longer, count), size)):
            if self.workers[group]:
                rows = torch.arange(length * count, device=self.images.device).view(length, count)
                yield self.workers[group], rows.T[group]

    def epoch(self, seed: int, epoch: int, losses: Tensor | None = None) -> "list[Step]":
        """Return the steps of one epoch, with a short last one if the recipe has `whole_epochs`.

        Hard-example selection uses `losses` [n], each image's latest loss.
        """
        stage, count = stage_of(self.recipe, epoch), images_of_an_epoch(self.recipe, self.total_images, epoch)
        samples = []
        for workers, rows in self.by_size():
            sample = shuffle_shards(rows, self.recipe.augmentation, seed, workers, epoch)
            if stage.keep_fraction < 1:
                sample = select_hard_examples(sample, self.initial_losses() if losses is None else losses, count)
            samples.append([column[:, :count] for column in sample])
        columns = [torch.cat(columns) for columns in zip(*samples, strict=True)]
        steps = [self._split_steps(column) for column in columns]
        return [Step(self, stage.kind, list(columns)) for columns in zip(*steps, strict=True)]

    def _split_steps(self, column: Tensor) -> list[Tensor]:
        """Split [workers, images] into steps [micro-batches, B]: views of one copy, whatever their number."""
        full = column.shape[1] // (size := self.recipe.batch_size) * size
        steps = column[:, :full].unflatten(1, (-1, size)).transpose(0, 1).flatten()
        steps = torch.cat([steps, column[:, full:].flatten()])
        return [step.view(self.micro_batches, -1) for step in steps.split(len(self.workers) * size)]


@dataclass(frozen=True)
class Step:
    """The sample of a step: rows of the shards' images, then augmentation parameters, each [micro-batches, B].

    As a sequence it is the micro-batches: images [B, 3, H, W], channels-last, and labels int64 [B], augmented when they
    are asked for. A micro-batch has one batch of each of its workers, in their order.
    """

    shards: Shards
    kind: Stage
    columns: list[Tensor]

    @property
    def rows(self) -> Tensor:
        """The rows of the shards' images (int64), in the order of the micro-batches."""
        return self.columns[0].flatten()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        shards, resolution = self.shards, self.kind.resolution
        sample = (column[index] for column in self.columns)
        return shards.make_batch(shards.recipe.augmentation, resolution, shards.images, shards.labels, *sample)


def make_batch(
    augmentation: CropAndFlip, resolution: int, images: Tensor, labels: Tensor, rows: Tensor, *parameters: Tensor
) -> Batch:
    """Return the augmented images at this resolution, and their labels."""
    return downscale(augmentation(images, rows, *parameters), resolution), labels[rows]


def select_hard_examples(sample: tuple[Tensor, ...], losses: Tensor, count: int) -> tuple[Tensor, ...]:
    """Keep each worker's `count` images with the highest losses, in their order: easy images teach little."""
    selected = losses[sample[0]].topk(count, sorted=False).indices.sort().values
    return tuple(column.gather(1, selected) for column in sample)


def shuffle_shards(
    rows: Tensor, augmentation: CropAndFlip, seed: int, workers: Sequence[int], epoch: int
) -> tuple[Tensor, ...]:
    """Return each worker's `rows` shuffled, and each image's augmentation parameters, the same in any process.

    All are [workers, shard size]. Epochs count from 1; 0 is for generators that start alike in all epochs of a run.
    """
    generators = [make_generator(rows.device, seed, worker, epoch) for worker in workers]
    run_generators = [make_generator(rows.device, seed, worker, 0) for worker in workers]
    parameters = augmentation.sample(rows.shape[1], generators, run_generators, epoch)
    order = draw(generators, torch.randperm, rows.shape[1])
    return tuple(column.gather(1, order) for column in (rows, *parameters))


def make_generator(device: torch.device, *key: int) -> torch.Generator:
    """Return a generator whose stream is independent of those of other keys (NumPy's SeedSequence)."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


def upload_shards(
    images: np.ndarray, labels: np.ndarray, recipe: Recipe, ctx: DistContext, micro_batches: int, compile: bool
) -> Shards:
    """Copy the training images of this process's workers to its device, as bytes."""
    mine: slice | np.ndarray = slice(None)  # without a copy in host memory
    if len(ctx.workers) < recipe.workers:
        mine = np.isin(np.arange(len(images)) % recipe.workers, ctx.workers)
    make = torch.compile(make_batch, dynamic=False) if compile else make_batch
    return Shards(*_upload(images, labels, mine, ctx.device), ctx.workers, len(images), recipe, micro_batches, make)


def upload_test(images: np.ndarray, labels: np.ndarray, ctx: DistContext) -> Batch:
    """Copy this process's share of the test images to its device; with P processes it is every Pth image."""
    return _upload(images, labels, slice(ctx.rank, None, ctx.world_size), ctx.device)


def _upload(images: np.ndarray, labels: np.ndarray, mine: slice | np.ndarray, device: torch.device) -> Batch:
    parts = (torch.from_numpy(np.ascontiguousarray(part[mine])).to(device) for part in (images, labels))
    return next(parts), next(parts)


def normalize_for(recipe: Recipe, precision: str, images: Tensor) -> Tensor:
    """Normalize uint8 [n, 32, 32, 3] in the type of the weights, and store the result in that of images."""
    normalized = normalize(images, weight_dtype(recipe, precision))
    return normalized.to(image_dtype(recipe, precision, images.device))


def normalize(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel, computed in `dtype`."""
    mean, std = (torch.tensor(values, dtype=dtype, device=images.device) for values in (MEAN, STD))
    return images.to(dtype).sub_(mean).div_(std)
