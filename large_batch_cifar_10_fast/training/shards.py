"""From images on the host to batches on the device: preprocessing, and each worker's own shard (method, section 2)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .augmentation import scaled_down
from .recipe import Augmentation, Recipe, images_of_an_epoch, stage_of
from .world import World

MEAN = (125.31, 122.95, 113.87)  # of CIFAR-10's channels, on the 0..255 scale
STD = (62.99, 62.09, 66.70)

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shards:
    """The training images of a process's workers, each worker's own for good; every step takes one batch of each.

    `images` [n, 32, 32, 3] and `labels` int64 [n] hold the data set's images i, in their order, whose i % W
    is one of `workers`. So worker `workers[q]`'s j-th image stands at row j * len(workers) + q.
    """

    images: Tensor
    labels: Tensor
    workers: range
    total_images: int
    recipe: Recipe
    micro_batches: int

    def steps_of(self, epoch: int) -> int:
        """Batches in what is kept of the shortest shard: full ones, and with `whole_epochs` the short one left."""
        return -(-images_of_an_epoch(self.recipe, self.total_images, epoch) // self.recipe.batch_size)

    def unseen(self) -> Tensor:
        """The loss of each image when last seen (float32 [n]), before any was: infinite, so none counts as easy."""
        return torch.full((len(self.images),), torch.inf, device=self.images.device)

    def rows_of(self, worker: int) -> Tensor:
        """Where a worker's shard stands in `images` (int64 [shard size])."""
        first = self.workers.index(worker)
        return torch.arange(first, len(self.images), len(self.workers), device=self.images.device)

    def epoch(self, seed: int, epoch: int, losses: Tensor | None = None) -> "Epoch":
        """One epoch's steps. `losses` [n] are the images' when last seen; without them (warm-up, bench) those kept are
        any."""
        augment, stage = self.recipe.augmentation, stage_of(self.recipe, epoch)
        count = images_of_an_epoch(self.recipe, self.total_images, epoch)
        deals = [deal_epoch(self.rows_of(w), augment, seed, w, epoch) for w in self.workers]
        if stage.kept < 1:
            losses = self.unseen() if losses is None else losses
            deals = [hardest(deal, losses, count) for deal in deals]
        dealt = [self._by_step(torch.stack([part[:count] for part in parts])) for parts in zip(*deals, strict=True)]
        return Epoch(self, stage.resolution, dealt)

    def _by_step(self, dealt: Tensor) -> list[Tensor]:
        """What every worker was dealt, [workers, images], as steps of [micro-batches, workers in one * batch]."""
        size = self.recipe.batch_size
        full = dealt.shape[1] // size * size
        steps = dealt[:, :full].unflatten(1, (-1, size)).transpose(0, 1).flatten()
        steps = torch.cat([steps, dealt[:, full:].flatten()])
        return [step.view(self.micro_batches, -1) for step in steps.split(len(self.workers) * size)]


@dataclass(frozen=True)
class Epoch:
    """The steps of an epoch, each a list of micro-batches of augmented images and their labels, made in its turn.

    Images come as [B, 3, H, W] of the stage's resolution in channels-last memory, labels as int64 [B]; B is the
    batch size times the workers in a micro-batch. It holds its workers one after the other, worker 0's images
    first. A short last batch is as short for every worker.
    """

    shards: Shards
    resolution: int
    dealt: list[list[Tensor]]  # rows, and what augmentation chose, of each step [micro-batches, B]

    def __len__(self) -> int:
        return len(self.dealt[0])

    def __iter__(self) -> Iterator[list[Batch]]:
        images, labels, augment = self.shards.images, self.shards.labels, self.shards.recipe.augmentation
        for step in zip(*self.dealt, strict=True):
            yield [
                (scaled_down(augment(images, *chosen), self.resolution), labels[chosen[0]])
                for chosen in zip(*step, strict=True)
            ]

    @property
    def rows(self) -> Tensor:
        """Where its images stand among the shards' (int64), in the order in which they are trained on."""
        return torch.cat([step.flatten() for step in self.dealt[0]])


def hardest(deal: tuple[Tensor, ...], losses: Tensor, count: int) -> tuple[Tensor, ...]:
    """Of what a worker was dealt, so many images, those of the highest loss, in the order they were dealt: what a
    network does well already teaches it little (docs/modern.md)."""
    kept = losses[deal[0]].topk(count).indices.sort().values
    return tuple(part[kept] for part in deal)


def deal_epoch(rows: Tensor, augmentation: Augmentation, seed: int, worker: int, epoch: int) -> tuple[Tensor, ...]:
    """A worker's epoch, of all its images: the rows of its shard in random order, and what augmentation chose for each.

    All are [len(rows)]. The random numbers belong to the worker, not to the process, so the outcome is the
    same wherever the worker lives. Epochs count from 1; what 0 would have is the run's.
    """
    generator, of_the_run = torch.Generator(rows.device), torch.Generator(rows.device)
    generator.manual_seed(derive_seed(seed, worker, epoch))
    of_the_run.manual_seed(derive_seed(seed, worker, 0))
    choices = augmentation.choose(len(rows), generator, of_the_run, epoch)
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    return rows[order], *(choice[order] for choice in choices)


def derive_seed(seed: int, worker: int, epoch: int) -> int:
    """A seed of its own for each worker and epoch of a run, without overlaps (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence([seed, worker, epoch]).generate_state(1, np.uint64)[0] >> 1)


def upload_shards(images: np.ndarray, labels: np.ndarray, recipe: Recipe, world: World, micro_batches: int) -> Shards:
    """Move the training images of this process's workers to its device, as the bytes they are."""
    mine = slice(None)
    if len(world.workers) < recipe.workers:
        mine = np.flatnonzero(np.isin(np.arange(len(images)) % recipe.workers, world.workers))
    uploaded = _upload(images[mine], labels[mine], world.device)
    return Shards(*uploaded, world.workers, len(images), recipe, micro_batches)


def upload_test(images: np.ndarray, labels: np.ndarray, world: World) -> Batch:
    """Move this process's share of the test images, every P-th, to its device."""
    return _upload(images[world.rank :: world.world_size], labels[world.rank :: world.world_size], world.device)


def _upload(images: np.ndarray, labels: np.ndarray, device: torch.device) -> Batch:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (images, labels))


def normalise(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel, computed in `dtype`."""
    mean, std = (torch.tensor(figure, dtype=dtype, device=images.device) for figure in (MEAN, STD))
    return images.to(dtype).sub_(mean).div_(std)
