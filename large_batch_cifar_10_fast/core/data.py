"""Images in memory and on the device: shards, crops and flips (docs/method.md, section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from .clock import Clock
from .precision import Precision
from .team import Team

SIZE = 32  # pixels a side of an image
Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of red, green and blue, on the 0..255 scale
CIFAR_10_NORMALIZATION: Normalization = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # published values

# ---- In host memory


@dataclass(frozen=True)
class Images:
    """A data set, in the order used for training: images uint8 [N, 32, 32, 3] (RGB), labels int64 [N] from 0."""

    name: str  # for logs
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: list[str]
    normalization: Normalization
    digest: str = ""  # SHA-256 of all images and labels
    is_shuffled: bool = False  # the file had the training images in another order

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1


def random_images(train: int, test: int, classes: int) -> Images:
    """Return random images and labels of the right shapes, for the warm-up."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, SIZE, SIZE, 3), np.uint8)
    labels = random.integers(0, classes, train + test)
    parts = images[:train], labels[:train], images[train:], labels[train:]
    return Images("noise", *parts, [str(number) for number in range(classes)], CIFAR_10_NORMALIZATION)


# ---- To the device


class Shards(NamedTuple):
    """The images on a process's device: its workers' training images and its share of the test images.

    Image i of the data set belongs to worker i % `total_workers`, in all epochs. A process with
    workers 0 and 1 of 8 has images 0, 1, 8, 9, ... `shard` returns the positions of one worker's images.
    """

    images: Tensor  # [n, 32, 32, 3], normalized
    labels: Tensor  # int64 [n]
    test_images: Tensor  # [m, 32, 32, 3], normalized; each of P processes has every Pth image
    test_labels: Tensor


def upload(images: Images, clock: Clock, team: Team, precision: Precision) -> Shards:
    """Copy this process's images to its device, and normalize them. Both count as training time.

    Before that, untimed, the images are selected. For a GPU they are put into page-locked memory, for a faster copy.
    """
    share = slice(team.rank, None, team.world_size)
    mine: slice | np.ndarray = slice(None)  # without a copy in host memory
    if team.world_size > 1:
        mine = np.isin(np.arange(len(images.train_images)) % team.total_workers, team.workers)
    own = [images.train_images[mine], images.train_labels[mine], images.test_images[share], images.test_labels[share]]
    tensors = [in_host_memory(array, team) for array in own]
    with clock.timed("upload"):
        train_images, train_labels, test_images, test_labels = copy_to_device(tensors, team.device)
    with clock.timed("preprocessing"):
        train_images = normalize(train_images, images.normalization, precision)
        test_images = normalize(test_images, images.normalization, precision)
    return Shards(train_images, train_labels, test_images, test_labels)


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def in_host_memory(array: np.ndarray, team: Team) -> Tensor:
    """Return an array as a tensor, in page-locked memory if it is for a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if team.on_gpu else tensor


def normalize(images: Tensor, normalization: Normalization, precision: Precision) -> Tensor:
    """Normalize uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel, computed in the type of weights.

    Images that have this type already are changed in place.
    """
    mean, std = normalization
    offset = torch.tensor(mean, dtype=precision.weights, device=images.device)
    scale = torch.tensor(std, dtype=precision.weights, device=images.device)
    return images.to(precision.weights).sub_(offset).div_(scale).to(precision.images)


def count_own(images: int, team: Team) -> int:
    """Return how many of `images` images the workers of this process own."""
    return sum(len(range(worker, images, team.total_workers)) for worker in team.workers)


def shard(number: int, workers: int, images: int, device: torch.device) -> Tensor:
    """Return the positions (int64 [m]) of one worker's images among the process's `images`."""
    return torch.arange(number, images, workers, device=device)


# ---- Draws


def generator(device: torch.device, *key: int) -> Generator:
    """Return a generator whose stream is independent of the streams of other keys (NumPy's SeedSequence).

    The recipes use keys (seed, worker, epoch). For further draws in a copy of a program, add a number: (seed, worker,
    epoch, 1) is used by no recipe, so crops and flips stay the same.
    """
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return Generator(device).manual_seed(int(state >> 1))


def independent_assignment(count: int, options: int, draws: Generator) -> Tensor:
    """Draw one of `options` for each of `count` images independently (int64 [count])."""
    return torch.randint(options, (count,), generator=draws, device=draws.device)


# ---- Batches


def crop_and_flip(images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Return images [n, 32, 32, 3] at these rows, cropped and mirrored: [B, 3, 32, 32], channels last.

    Each image is reflect-padded by `padding`. Crop 0 begins at the upper left corner, crop 1 a pixel further right, and
    so on, row by row. Images with a flip of 1 are mirrored. One gather does all this, without storing a padded copy.
    """
    offsets = 2 * padding + 1
    pixels = torch.arange(SIZE, device=images.device)
    reflected = torch.arange(-padding, SIZE + padding, device=images.device).abs()
    reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
    y = reflected[(crops // offsets)[:, None] + pixels]
    x = reflected[(crops % offsets)[:, None] + torch.where(flips[:, None] == 1, SIZE - 1 - pixels, pixels)]
    return images[rows[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def split_into_steps(plans: Sequence[Tensor], steps: int, batch_size: int, remaining: int = 0) -> list[Tensor]:
    """Return the batch of each step, [rows, workers * batch_size], from each worker's plan [rows, images].

    A batch has `batch_size` images of each worker, one worker after the other. `remaining` images of each worker form a
    short last batch; further images are dropped. All batches have the same memory layout, which compiled code and CUDA
    graphs require.
    """
    full = steps * batch_size
    by_worker = [plan[:, :full].unflatten(1, (steps, batch_size)) for plan in plans]
    batches = list(torch.cat(by_worker, 2).transpose(0, 1).contiguous())
    if remaining:
        batches.append(torch.cat([plan[:, full : full + remaining] for plan in plans], 1))
    return batches
