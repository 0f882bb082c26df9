"""Fixed shards of the workers, and the batches of an epoch, on the device (method, section 2)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..distributed import DistContext
from ..recipe import Augmentation, Recipe, images_of_an_epoch, stage_of
from .augment import MEAN, STD, downscale

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shards:
    """The training images of a process's workers: each keeps its shard, and each step takes one batch of each.

    `images` [n, 32, 32, 3] and `labels` int64 [n] are those images i of the data set, in order, whose i % W is in
    `workers`. The j-th image of worker `workers[q]` is row j * len(workers) + q.
    """

    images: Tensor
    labels: Tensor
    workers: range
    total_images: int
    recipe: Recipe
    micro_batches: int

    def steps_of(self, epoch: int) -> int:
        """Return the number of steps of an epoch; with `whole_epochs` the short last batch counts."""
        return -(-images_of_an_epoch(self.recipe, self.total_images, epoch) // self.recipe.batch_size)

    def initial_losses(self) -> Tensor:
        """Return a loss for each image before its first use (float32 [n]): infinite, so that none counts as easy."""
        return torch.full((len(self.images),), torch.inf, device=self.images.device)

    def rows_of(self, worker: int) -> Tensor:
        """Return the rows of `images` that are a worker's shard (int64 [shard size])."""
        first = self.workers.index(worker)
        return torch.arange(first, len(self.images), len(self.workers), device=self.images.device)

    def epoch(self, seed: int, epoch: int, losses: Tensor | None = None) -> "Epoch":
        """Return the steps of one epoch. Hard-example selection uses `losses` [n], each image's most recent loss."""
        stage, count = stage_of(self.recipe, epoch), images_of_an_epoch(self.recipe, self.total_images, epoch)
        samples = [shuffle_shard(self.rows_of(w), self.recipe.augmentation, seed, w, epoch) for w in self.workers]
        if stage.keep_fraction < 1:  # the share of each worker's images that the stage trains on
            losses = self.initial_losses() if losses is None else losses
            samples = [select_hard_examples(sample, losses, count) for sample in samples]
        columns = [torch.stack([column[:count] for column in columns]) for columns in zip(*samples, strict=True)]
        return Epoch(self, stage.resolution, [self._split_steps(column) for column in columns])

    def _split_steps(self, column: Tensor) -> list[Tensor]:
        """Split [workers, images] into steps [micro-batches, batch size * workers of a micro-batch]."""
        full = column.shape[1] // (size := self.recipe.batch_size) * size
        steps = column[:, :full].unflatten(1, (-1, size)).transpose(0, 1).flatten()
        steps = torch.cat([steps, column[:, full:].flatten()])
        return [step.view(self.micro_batches, -1) for step in steps.split(len(self.workers) * size)]


@dataclass(frozen=True)
class Epoch:
    """The steps of an epoch: lists of micro-batches of augmented images and labels, each made when it is needed.

    Images are [B, 3, H, W], channels-last, labels int64 [B]. A micro-batch has one batch of each of its workers, in
    their order. A short last batch is as short for every worker.
    """

    shards: Shards
    resolution: int
    columns: list[list[Tensor]]  # rows, then augmentation parameters: for each step [micro-batches, B]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[list[Batch]]:
        shards, augment = self.shards, self.shards.recipe.augmentation
        for step in zip(*self.columns, strict=True):
            samples = zip(*step, strict=True)
            yield [(downscale(augment(shards.images, *s), self.resolution), shards.labels[s[0]]) for s in samples]

    @property
    def rows(self) -> Tensor:
        """The rows of the shards' images (int64), in the order of training."""
        return torch.cat([step.flatten() for step in self.columns[0]])


def select_hard_examples(sample: tuple[Tensor, ...], losses: Tensor, count: int) -> tuple[Tensor, ...]:
    """Keep the `count` images of highest loss, in their order: easy images teach little (docs/modern.md)."""
    selected = losses[sample[0]].topk(count).indices.sort().values
    return tuple(column[selected] for column in sample)


def shuffle_shard(rows: Tensor, augmentation: Augmentation, seed: int, worker: int, epoch: int) -> tuple[Tensor, ...]:
    """Return a worker's `rows` in random order, and each image's augmentation parameters; all [len(rows)].

    The random numbers belong to the worker, so its batches are the same in any process. Epochs count from 1; 0 seeds
    the generator that starts alike in all epochs of a run.
    """
    generator = make_generator(rows.device, seed, worker, epoch)
    parameters = augmentation.sample(len(rows), generator, make_generator(rows.device, seed, worker, 0), epoch)
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    return rows[order], *(column[order] for column in parameters)


def make_generator(device: torch.device, *key: int) -> torch.Generator:
    """Return a generator seeded by `key`; streams of different keys do not overlap (NumPy's SeedSequence)."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


def upload_shards(
    images: np.ndarray, labels: np.ndarray, recipe: Recipe, ctx: DistContext, micro_batches: int
) -> Shards:
    """Copy the training images of this process's workers to its device, as bytes."""
    mine = slice(None)  # copies nothing
    if len(ctx.workers) < recipe.workers:
        mine = np.isin(np.arange(len(images)) % recipe.workers, ctx.workers)
    return Shards(*_upload(images, labels, mine, ctx.device), ctx.workers, len(images), recipe, micro_batches)


def upload_test(images: np.ndarray, labels: np.ndarray, ctx: DistContext) -> Batch:
    """Copy every P-th test image, this process's share, to its device."""
    return _upload(images, labels, slice(ctx.rank, None, ctx.world_size), ctx.device)


def _upload(images: np.ndarray, labels: np.ndarray, mine: slice | np.ndarray, device: torch.device) -> Batch:
    return tuple(torch.from_numpy(np.ascontiguousarray(part[mine])).to(device) for part in (images, labels))


def normalize(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel, computed in `dtype`."""
    mean, std = (torch.tensor(figure, dtype=dtype, device=images.device) for figure in (MEAN, STD))
    return images.to(dtype).sub_(mean).div_(std)
