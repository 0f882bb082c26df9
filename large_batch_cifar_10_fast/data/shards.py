"""Fixed shards of the workers, and the batches of an epoch, on the device (method, section 2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..devices import Precision
from ..distributed import DistContext
from ..recipe import Recipe, Stage, images_of_an_epoch, stage_of
from .augment import CropAndFlip, Normalization, downscale, draw

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
        """Yield workers with shards of one size, and the indices of their images (int64 [workers, size]).

        There are one or two sizes: the shards of the first workers may be an image longer.
        """
        size, longer = divmod(len(self.images), count := len(self.workers))
        for some, length in ((slice(longer), size + 1), (slice(longer, count), size)):
            if self.workers[some]:
                indices = torch.arange(length * count, device=self.images.device).view(length, count)
                yield self.workers[some], indices.T[some]

    def epoch(self, seed: int, epoch: int, losses: Tensor | None = None) -> "list[Sample]":
        """Return the samples of one epoch's steps, with a short last one if the recipe has `whole_epochs`.

        Hard-example selection uses `losses` [n], each image's latest loss.
        """
        stage, count = stage_of(self.recipe, epoch), images_of_an_epoch(self.recipe, self.total_images, epoch)
        shards = []
        for workers, indices in self.by_size():
            tensors = shuffle_shards(indices, self.recipe.augmentation, seed, workers, epoch)
            if stage.keep_fraction < 1:
                tensors = select_hard_examples(tensors, self.initial_losses() if losses is None else losses, count)
            shards.append([tensor[:, :count] for tensor in tensors])
        of_all_workers = [torch.cat(parts) for parts in zip(*shards, strict=True)]
        steps = [self._split_steps(tensor) for tensor in of_all_workers]
        return [Sample(self, stage, list(tensors)) for tensors in zip(*steps, strict=True)]

    def _split_steps(self, tensor: Tensor) -> list[Tensor]:
        """Split [workers, images] into steps [micro-batches, B]: views of one copy, whatever their number."""
        full = tensor.shape[1] // (size := self.recipe.batch_size) * size
        steps = tensor[:, :full].unflatten(1, (-1, size)).transpose(0, 1).flatten()
        steps = torch.cat([steps, tensor[:, full:].flatten()])
        return [step.view(self.micro_batches, -1) for step in steps.split(len(self.workers) * size)]


@dataclass(frozen=True)
class Sample:
    """What a step trains on: indices of images (int64), then their augmentation parameters, each [micro-batches, B].

    A micro-batch has one batch of each of its workers, in their order.
    """

    shards: Shards
    stage: Stage
    tensors: list[Tensor]

    @property
    def indices(self) -> Tensor:
        """The indices of the shards' images (int64 [n]), in the order of the micro-batches."""
        return self.tensors[0].flatten()

    @property
    def signature(self) -> tuple[Stage, torch.Size]:
        """The settings and the shape that a step's graph depends on."""
        return self.stage.signature, self.tensors[0].shape

    def micro_batches(self) -> Iterator[Batch]:
        """Yield images [B, 3, H, W], channels-last, and labels int64 [B]; each is augmented when it is asked for."""
        shards = self.shards
        fixed = shards.recipe.augmentation, self.stage.resolution, shards.images, shards.labels
        for parts in zip(*self.tensors, strict=True):
            yield shards.make_batch(*fixed, *parts)


def make_batch(
    augmentation: CropAndFlip, resolution: int, images: Tensor, labels: Tensor, indices: Tensor, *parameters: Tensor
) -> Batch:
    """Return the augmented images at this resolution, and their labels."""
    return downscale(augmentation(images, indices, *parameters), resolution), labels[indices]


def select_hard_examples(tensors: Sequence[Tensor], losses: Tensor, count: int) -> list[Tensor]:
    """Keep each worker's `count` images with the highest losses, in their order: easy images teach little."""
    selected = losses[tensors[0]].topk(count, sorted=False).indices.sort().values
    return [tensor.gather(1, selected) for tensor in tensors]


def shuffle_shards(
    indices: Tensor, augmentation: CropAndFlip, seed: int, workers: Sequence[int], epoch: int
) -> list[Tensor]:
    """Return each worker's `indices` shuffled, and each image's augmentation parameters, the same in any process.

    All are [workers, shard size]. Epochs count from 1; 0 is for generators that start alike in all epochs of a run.
    """
    generators = [make_generator(indices.device, seed, worker, epoch) for worker in workers]
    run_generators = [make_generator(indices.device, seed, worker, 0) for worker in workers]
    parameters = augmentation.sample(indices.shape[1], generators, run_generators, epoch)
    order = draw(generators, torch.randperm, indices.shape[1])
    return [tensor.gather(1, order) for tensor in (indices, *parameters)]


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
    first, second = (torch.from_numpy(np.ascontiguousarray(part[mine])).to(device) for part in (images, labels))
    return first, second


def normalize(images: Tensor, normalization: Normalization, precision: Precision) -> Tensor:
    """Convert uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel: in the type of the weights, then of images."""
    mean, std = (torch.tensor(values, dtype=precision.weights, device=images.device) for values in normalization)
    return images.to(precision.weights).sub_(mean).div_(std).to(precision.images)
