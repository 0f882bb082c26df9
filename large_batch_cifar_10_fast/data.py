"""From images on the host to batches on the device: preprocessing, shards, balanced augmentation.

A worker owns one shard for good (method, section 2). A process holds the shards of all its workers side by
side, and every step takes one batch of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .images import Images

MEAN = (125.31, 122.95, 113.87)  # of CIFAR-10's channels, on the 0..255 scale
DEVIATION = (62.99, 62.09, 66.70)
PADDING = 4
OFFSETS = (2 * PADDING + 1) ** 2  # crops of 32x32 out of 40x40
MOST_OPTIONS = 200  # of a transform, in one epoch
EVALUATION_BATCH = 1000

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shards:
    """The training images of a process's workers.

    `images` [n, 32, 32, 3] and `labels` int64 [n] hold the data set's images i, in their order, whose i % W
    is one of `workers`. So worker `workers[q]`'s j-th image stands at row j * len(workers) + q.
    """

    images: Tensor
    labels: Tensor
    workers: range
    total_workers: int
    total_images: int
    batch_size: int
    passes: int

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the shortest shard; every worker drops its tail beyond them."""
        return self.total_images // self.total_workers // self.batch_size

    def rows_of(self, worker: int) -> Tensor:
        """Where a worker's shard stands in `images` (int64 [shard size])."""
        first = self.workers.index(worker)
        return torch.arange(first, len(self.images), len(self.workers), device=self.images.device)

    def epoch(self, seed: int, epoch: int) -> Iterator[list[Batch]]:
        """One epoch of steps, each a list of `passes` batches of augmented images and their labels.

        Images come as [B, 3, 32, 32] in channels-last memory, labels as int64 [B]; B is the batch size
        times the workers in a pass. A batch holds its workers one after the other, worker 0's images first.
        """
        deals = [deal_epoch(self.rows_of(w), seed, w, epoch) for w in self.workers]
        used = self.steps_per_epoch * self.batch_size
        # [workers, steps * batch] -> [steps, passes, workers in a pass * batch]
        rows, offsets, flips = (
            torch.stack([deal[part][:used] for deal in deals])
            .view(len(self.workers), self.steps_per_epoch, self.batch_size)
            .transpose(0, 1)
            .reshape(self.steps_per_epoch, self.passes, -1)
            for part in range(3)
        )
        labels = self.labels[rows]
        for step in range(self.steps_per_epoch):
            yield [
                (crop_and_flip(self.images, rows[step, p], offsets[step, p], flips[step, p]), labels[step, p])
                for p in range(self.passes)
            ]


def upload_shards(images: Images, workers: range, total_workers: int, batch_size: int, passes: int,
                  device: torch.device) -> Shards:  # fmt: skip
    """Move the images of these workers to the device, as the bytes they are."""
    mine = slice(None)
    if len(workers) < total_workers:
        mine = np.flatnonzero(np.isin(np.arange(len(images.train_images)) % total_workers, workers))
    return Shards(
        torch.from_numpy(images.train_images[mine]).to(device),
        torch.from_numpy(images.train_labels[mine]).to(device),
        workers, total_workers, len(images.train_images), batch_size, passes,
    )  # fmt: skip


def upload_test(images: Images, rank: int, processes: int, device: torch.device) -> Batch:
    """Move this process's share of the test images, every P-th, to the device."""
    share = slice(rank, None, processes)
    return (
        torch.from_numpy(np.ascontiguousarray(images.test_images[share])).to(device),
        torch.from_numpy(images.test_labels[share].copy()).to(device),
    )


def normalise(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, 32, 32, 3] to zero mean and unit deviation per channel, computed in `dtype`.

    The method pads by reflection after this. Here padding is an index (see crop_and_flip) and takes no memory.
    """
    mean = torch.tensor(MEAN, dtype=dtype, device=images.device)
    deviation = torch.tensor(DEVIATION, dtype=dtype, device=images.device)
    return images.to(dtype).sub_(mean).div_(deviation)


def deal_evenly(count: int, options: int, generator: torch.Generator) -> Tensor:
    """Assign one of `options` to each of `count` images, every option equally often (int64 [count]).

    The images are permuted and dealt in equal consecutive chunks over the options, themselves in random
    order: over an epoch each option occurs the same number of times, give or take one, which independent
    draws would not give (method, section 2).
    """
    device = generator.device
    deck = torch.randperm(options, generator=generator, device=device)[:MOST_OPTIONS]
    chunk = torch.arange(count, device=device) * len(deck) // count
    dealt = torch.empty(count, dtype=torch.int64, device=device)
    dealt[torch.randperm(count, generator=generator, device=device)] = deck[chunk]
    return dealt


def deal_epoch(rows: Tensor, seed: int, worker: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """A worker's epoch: the rows of its shard in random order, and each image's crop offset and flip.

    All three are int64 [len(rows)]. The stream of random numbers belongs to the worker, not to the process,
    so the outcome is the same wherever the worker lives.
    """
    generator = torch.Generator(rows.device)
    generator.manual_seed(stream(seed, worker, epoch))
    offsets = deal_evenly(len(rows), OFFSETS, generator)
    flips = deal_evenly(len(rows), 2, generator)
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    return rows[order], offsets[order], flips[order]


def stream(seed: int, worker: int, epoch: int) -> int:
    """A seed of its own for each worker and epoch of a run, without overlaps (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence([seed, worker, epoch]).generate_state(1, np.uint64)[0] >> 1)


def crop_and_flip(images: Tensor, rows: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Pad, crop and mirror `images[rows]` in one gather; [B, 3, 32, 32], channels-last.

    `offsets` 0..80 count the crops out of the padded 40x40 image row by row; `flips` of 1 mirror the crop.
    """
    size = images.shape[1]
    span = torch.arange(size, device=images.device)
    reflected = torch.arange(-PADDING, size + PADDING, device=images.device).abs()
    reflected = torch.where(reflected < size, reflected, 2 * (size - 1) - reflected)
    down = reflected[(offsets // (2 * PADDING + 1))[:, None] + span]
    columns = torch.where(flips[:, None] == 1, size - 1 - span, span)
    across = reflected[(offsets % (2 * PADDING + 1))[:, None] + columns]
    return images[rows[:, None, None], down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def evaluation_batches(images: Tensor, labels: Tensor) -> Iterator[Batch]:
    """Test images [n, 32, 32, 3] as channels-last [B, 3, 32, 32] in chunks that fit any device."""
    for start in range(0, len(images), EVALUATION_BATCH):
        chunk = slice(start, start + EVALUATION_BATCH)
        yield images[chunk].permute(0, 3, 1, 2), labels[chunk]
