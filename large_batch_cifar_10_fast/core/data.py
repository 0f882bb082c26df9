"""Images on the device: each worker's own, crops and flips, views of a test image (method, section 2)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..data.cifar10 import Images, load_images, random_images
from ..recipe import CIFAR_10_NORMALIZATION, Normalization
from .fast import Precision, evaluation_chunks
from .team import Team

__all__ = ["CIFAR_10_NORMALIZATION", "Images", "load_images", "random_images"]

SIZE = 32  # pixels a side of an image

# ---- To the device


def upload_training_images(images: Images, team: Team) -> list[Tensor]:
    """Copy the images of this process's workers to its device: uint8 [n, 32, 32, 3], and labels int64 [n].

    Image i of the data set belongs to worker i % `total_workers`, in all epochs. The order of the data set stays, so
    that the images of k workers take turns: `shard` finds those of one.
    """
    mine: slice | np.ndarray = slice(None)  # without a copy in host memory
    if team.world_size > 1:
        mine = np.isin(np.arange(len(images.train_images)) % team.total_workers, team.workers)
    return [copy_to_device(part[mine], team.device) for part in images.train]


def upload_test_images(images: Images, team: Team) -> list[Tensor]:
    """Copy this process's share of the test images to its device, and their labels: of P processes every Pth image."""
    return [copy_to_device(part[team.rank :: team.world_size], team.device) for part in images.test]


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def normalize(images: Tensor, normalization: Normalization, precision: Precision) -> Tensor:
    """Convert uint8 [n, 32, 32, 3] to mean 0 and std 1 per channel: in the type of the weights, then of images."""
    mean, std = normalization
    offset = torch.tensor(mean, dtype=precision.weights, device=images.device)
    scale = torch.tensor(std, dtype=precision.weights, device=images.device)
    return images.to(precision.weights).sub_(offset).div_(scale).to(precision.images)


def noise_like(images: Images, team: Team, few: int) -> Images:
    """Return noise for a warm-up: as many images on a GPU, which chooses kernels by sizes; on a CPU only a `few`."""
    if team.on_gpu:
        return random_images(len(images.train_images), len(images.test_images), images.classes)
    return random_images(few, team.world_size, images.classes)


def shard(number: int, workers: int, images: int, device: torch.device) -> Tensor:
    """Return the places of the images of this process's worker `number` among its `images` (int64 [m])."""
    return torch.arange(number, images, workers, device=device)


# ---- Draws


def generator(device: torch.device, *key: int) -> Generator:
    """Return a generator whose stream is independent of those of other keys (NumPy's SeedSequence)."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return Generator(device).manual_seed(int(state >> 1))


def independent_assignment(count: int, options: int, draws: Generator) -> Tensor:
    """Draw one of `options` for each of `count` images independently (int64 [count])."""
    return torch.randint(options, (count,), generator=draws, device=draws.device)


# ---- Batches


def crop_and_flip(images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Return images [n, 32, 32, 3] at these rows, cropped and mirrored: [B, 3, 32, 32], channels last.

    An image is reflect-padded by `padding`; crop 0 begins at its upper left corner, the next a pixel further right,
    and so on, row by row. It is mirrored where `flips` is 1. All of it is one gather: no padded copy is stored.
    """
    offsets = 2 * padding + 1
    pixels = torch.arange(SIZE, device=images.device)
    reflected = torch.arange(-padding, SIZE + padding, device=images.device).abs()
    reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
    y = reflected[(crops // offsets)[:, None] + pixels]
    x = reflected[(crops % offsets)[:, None] + torch.where(flips[:, None] == 1, SIZE - 1 - pixels, pixels)]
    return images[rows[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def split_into_steps(plans: Sequence[Tensor], steps: int, batch_size: int) -> list[Tensor]:
    """Return the batch of each step, [rows, workers * batch_size], from each worker's plan [rows, images].

    A batch has `batch_size` images of each worker, one worker after the other. The remaining images are dropped.
    """
    by_worker = [plan[:, : steps * batch_size].unflatten(1, (steps, batch_size)) for plan in plans]
    return list(torch.cat(by_worker, 2).unbind(1))


# ---- Evaluation


def chunks(images: Tensor) -> Iterator[Tensor]:
    """Yield images [n, 32, 32, 3] as chunks [B, 3, 32, 32], channels last, that a device evaluates at once."""
    for chunk in images.split(evaluation_chunks(len(images), images.device)):
        yield chunk.permute(0, 3, 1, 2)


def shifted(images: Tensor, pixels: int) -> Tensor:
    """Shift images [B, 3, H, W] up and left by so many pixels (below 0: down and right), padded by reflection."""
    before = max(-pixels, 0)
    after = max(pixels, 0)
    size = images.shape[-1]
    padded = F.pad(images, (before, after, before, after), "reflect")
    return padded[:, :, after : after + size, after : after + size]


def mirrored(images: Tensor) -> Tensor:
    return images.flip(3)
