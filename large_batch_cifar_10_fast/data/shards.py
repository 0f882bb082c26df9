"""Fixed shards of the workers, the batches of an epoch, and their augmentation, on the device (method, section 2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import pi

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..devices import Precision
from ..distributed import DistContext
from ..recipe import Normalization, Recipe, Stage, images_of_an_epoch, stage_of

Batch = tuple[Tensor, Tensor]
Generators = Sequence[Generator]  # one for each worker

SIZE = 32  # pixels a side of an image
MAX_OPTIONS = 200  # of a transform, in one epoch
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in gray (ITU-R 601, like PIL)


@dataclass(frozen=True)
class Shards:
    """The training images of a process's workers. Image i of the data set is in the shard of worker i % W.

    `images` [n, 32, 32, 3] and `labels` int64 [n] keep the order of the data set.
    """

    images: Tensor
    labels: Tensor
    losses: Tensor  # of each image, when it was last seen (float32 [n]); infinite before, so that none counts as easy
    workers: range
    total_images: int
    recipe: Recipe
    micro_batches: int
    make_batch: Callable[..., Batch]  # the function below, compiled or not

    def by_size(self) -> Iterator[tuple[range, Tensor]]:
        """Yield workers with shards of one size, and the indices of their images (int64 [workers, size]).

        There are one or two sizes: the shards of the first workers may be an image longer.
        """
        size, longer = divmod(len(self.images), count := len(self.workers))
        for some, length in ((slice(longer), size + 1), (slice(longer, count), size)):
            if self.workers[some]:
                indices = torch.arange(length * count, device=self.images.device).view(length, count)
                yield self.workers[some], indices.T[some]

    def epoch(self, seed: int, epoch: int) -> "list[Sample]":
        """Return the samples of one epoch's steps, with a short last one if the recipe has `whole_epochs`."""
        stage, count = stage_of(self.recipe, epoch), images_of_an_epoch(self.recipe, self.total_images, epoch)
        shards = []
        for workers, indices in self.by_size():
            tensors = shuffle_shards(indices, self.recipe.augmentation, seed, workers, epoch)
            if stage.keep_fraction < 1:
                tensors = select_hard_examples(tensors, self.losses, count)
            shards.append([tensor[:, :count] for tensor in tensors])
        steps = [self._split_steps(torch.cat(parts)) for parts in zip(*shards, strict=True)]
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


# Augmentation


def draw(generators: Generators, function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return what a random function gives with each worker's generator, stacked; all else is done for all at once."""
    return torch.stack([function(*arguments, generator=each, device=each.device) for each in generators])


def assign_balanced(count: int, options: int, generators: Generators) -> Tensor:
    """Assign one of `options` to each of a worker's `count` images, each equally often up to one (int64 [W, count])."""
    used = draw(generators, torch.randperm, options)[:, :MAX_OPTIONS]
    images = draw(generators, torch.randperm, count)  # in random order, in which options take turns
    in_order = torch.arange(count, device=used.device) * used.shape[1] // count
    return torch.empty_like(images).scatter_(1, images, used[:, in_order])


def assign_independent(count: int, options: int, generators: Generators) -> Tensor:
    """Draw one of `options` for each of a worker's `count` images independently (int64 [W, count])."""
    return draw(generators, torch.randint, options, (count,))


@dataclass(frozen=True, kw_only=True)
class CropAndFlip:
    """Reflect-pad by `padding`, crop 32x32 and mirror. `assign` chooses crop and mirroring once an epoch.

    With `alternate` an image is mirrored at random in the first epoch, then alternately: two epochs show both sides.
    `sample` makes the parameters of an epoch for all `count` images of a shard, [workers, count]; a call makes a batch
    from some images and theirs. The generators of `generators` belong to the epoch; those of `run_generators` start
    alike in every epoch of a run.
    """

    padding: int
    assign: Callable[[int, int, Generators], Tensor]
    alternate: bool = False

    def sample(self, count: int, generators: Generators, run_generators: Generators, epoch: int) -> tuple[Tensor, ...]:
        """Return each image's crop offset, counted row by row, and whether it is mirrored (1), int64 [W, count]."""
        crops, flips = (self.assign(count, n, generators) for n in ((2 * self.padding + 1) ** 2, 2))
        if self.alternate:
            flips = (assign_independent(count, 2, run_generators) + epoch) % 2
        return crops, flips

    def __call__(self, images: Tensor, indices: Tensor, crops: Tensor, flips: Tensor) -> Tensor:
        """Gather `images` [n, 32, 32, 3] at these indices as a batch [B, 3, 32, 32], channels-last."""
        offsets, span = 2 * self.padding + 1, torch.arange(SIZE, device=images.device)
        reflected = torch.arange(-self.padding, SIZE + self.padding, device=images.device).abs()
        reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
        y = reflected[(crops // offsets)[:, None] + span]
        x = reflected[(crops % offsets)[:, None] + torch.where(flips[:, None] == 1, SIZE - 1 - span, span)]
        return images[indices[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class CropJitterRotateFlip(CropAndFlip):
    """Crop; scale brightness, contrast and saturation by 1 +- `strength`; rotate by +- `degrees`; flip."""

    strength: float
    degrees: float
    normalization: Normalization

    def sample(self, count: int, generators: Generators, run_generators: Generators, epoch: int) -> tuple[Tensor, ...]:
        """Return crops and flips like CropAndFlip, then float32 [W, count]: three factors, and angles in radians."""
        crops, flips = super().sample(count, generators, run_generators, epoch)
        *changes, turn = (2 * draw(generators, torch.rand, count) - 1 for _ in range(4))
        return crops, flips, *(1 + self.strength * change for change in changes), self.degrees * pi / 180 * turn

    def __call__(self, images: Tensor, indices: Tensor, crops: Tensor, flips: Tensor, *changes: Tensor) -> Tensor:
        """Make a batch [B, 3, 32, 32], channels-last, of `images` [n, 32, 32, 3]; both are normalized."""
        *factors, angles = changes
        mean, std = self.normalization
        crop = super().__call__(images, indices, crops, torch.zeros_like(flips))
        crop = crop.to(torch.promote_types(crop.dtype, torch.float32))
        pixels = [crop[:, c] * (std[c] / 255) + mean[c] / 255 for c in range(3)]  # 0 to 1
        rotated = rotate_and_flip(color_jitter(torch.stack(pixels, 1), *factors), angles, flips)
        normalized = [(rotated[:, c] - mean[c] / 255) * (255 / std[c]) for c in range(3)]
        return torch.stack(normalized, -1).permute(0, 3, 1, 2).to(images.dtype)


def color_jitter(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Blend images [B, 3, H, W] of 0 to 1 with black, mean gray and gray by factors [B], in this order; clip each."""
    images = _blend(images, torch.zeros_like(images), brightness)
    images = _blend(images, _gray(images).mean((2, 3), keepdim=True), contrast)
    return _blend(images, _gray(images), saturation)


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    factors = factors.to(images.dtype)[:, None, None, None]
    return (factors * images + (1 - factors) * other).clamp(0, 1)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = (weight * images[:, c : c + 1] for c, weight in enumerate(LUMA))
    return red + green + blue


def rotate_and_flip(images: Tensor, angles: Tensor, flips: Tensor) -> Tensor:
    """Rotate images [B, 3, H, W] counter-clockwise by `angles` (radians), nearest pixel; mirror where `flips` is 1."""
    cos, sin, zero, sign = angles.cos(), angles.sin(), torch.zeros_like(angles), 1 - 2 * flips
    # From an output pixel to its source: undo the flip, then the rotation. Rows are x and y; y points down.
    origins = torch.stack([cos * sign, -sin, zero, sin * sign, cos, zero], 1).view(-1, 2, 3).to(images.dtype)
    grid = F.affine_grid(origins, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def make_batch(
    augmentation: CropAndFlip, resolution: int, images: Tensor, labels: Tensor, indices: Tensor, *parameters: Tensor
) -> Batch:
    """Return the augmented images, scaled down to this resolution, and their labels."""
    batch = augmentation(images, indices, *parameters)
    if resolution < SIZE:
        batch = F.interpolate(batch, size=(resolution, resolution), mode="bilinear", align_corners=False)
    return batch, labels[indices]


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
    batch = _upload(images, labels, mine, ctx.device)
    losses = torch.full((len(batch[1]),), torch.inf, device=ctx.device)
    make = torch.compile(make_batch, dynamic=False) if compile else make_batch
    return Shards(*batch, losses, ctx.workers, len(images), recipe, micro_batches, make)


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
