"""Augmentation of a whole batch on the device: crop, flip, color jitter, rotation, resolution (method, section 2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

SIZE = 32  # pixels a side of an image
MAX_OPTIONS = 200  # of a transform, in one epoch
Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of red, green and blue, on the 0..255 scale
CIFAR_10_NORMALIZATION = MEAN, STD = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # as published
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in gray (ITU-R 601, like PIL)


def draw(generators: Sequence[Generator], function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return what a random function gives with each worker's generator, stacked; all else is done for all at once."""
    return torch.stack([function(*arguments, generator=each, device=each.device) for each in generators])


def assign_balanced(count: int, options: int, generators: Sequence[Generator]) -> Tensor:
    """Assign one of `options` to each of a worker's `count` images, each equally often up to one (int64 [W, count])."""
    used = draw(generators, torch.randperm, options)[:, :MAX_OPTIONS]
    images = draw(generators, torch.randperm, count)  # in random order, in which options take turns
    in_order = torch.arange(count, device=used.device) * used.shape[1] // count
    return torch.empty_like(images).scatter_(1, images, used[:, in_order])


def assign_independent(count: int, options: int, generators: Sequence[Generator]) -> Tensor:
    """Draw one of `options` for each of a worker's `count` images independently (int64 [W, count])."""
    return draw(generators, torch.randint, options, (count,))


@dataclass(frozen=True)
class CropAndFlip:
    """Reflect-pad by `padding`, crop 32x32 and mirror. `assign` chooses crop and mirroring once an epoch.

    `sample` makes the parameters of an epoch for all `count` images of a shard, [workers, count]; a call makes a batch
    from some images and theirs. Each worker has a generator of its own. Those of `generators` belong to the epoch;
    those of `run_generators` start alike in every epoch of a run.
    """

    padding: int
    assign: Callable[[int, int, Sequence[Generator]], Tensor]

    def sample(
        self, count: int, generators: Sequence[Generator], run_generators: Sequence[Generator] = (), epoch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return each image's crop offset, counted row by row, and whether it is mirrored (1), int64 [W, count]."""
        return self.assign(count, (2 * self.padding + 1) ** 2, generators), self.assign(count, 2, generators)

    def __call__(self, images: Tensor, indices: Tensor, crops: Tensor, flips: Tensor) -> Tensor:
        """Gather `images` [n, 32, 32, 3] at these indices as a batch [B, 3, 32, 32], channels-last."""
        offsets, span = 2 * self.padding + 1, torch.arange(SIZE, device=images.device)
        reflected = torch.arange(-self.padding, SIZE + self.padding, device=images.device).abs()
        reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
        y = reflected[(crops // offsets)[:, None] + span]
        x = reflected[(crops % offsets)[:, None] + torch.where(flips[:, None] == 1, SIZE - 1 - span, span)]
        return images[indices[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class CropAndAlternateFlip(CropAndFlip):
    """Crop like CropAndFlip. Mirror at random in the first epoch, then alternately, so that two show both sides."""

    def sample(
        self, count: int, generators: Sequence[Generator], run_generators: Sequence[Generator] = (), epoch: int = 0
    ) -> tuple[Tensor, ...]:
        crops, _ = super().sample(count, generators)
        return crops, (assign_independent(count, 2, run_generators) + epoch) % 2


@dataclass(frozen=True)
class CropJitterRotateFlip(CropAndFlip):
    """Crop; scale brightness, contrast and saturation by 1 +- `strength`; rotate by +- `degrees`; flip."""

    strength: float
    degrees: float
    normalization: Normalization

    def sample(
        self, count: int, generators: Sequence[Generator], run_generators: Sequence[Generator] = (), epoch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return crops and flips like CropAndFlip, then float32 [W, count]: three factors, and angles in radians."""
        crops, flips = super().sample(count, generators)
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


def downscale(images: Tensor, resolution: int) -> Tensor:
    """Resize images [B, 3, H, W] to `resolution` pixels a side, bilinear."""
    if images.shape[-1] == resolution:
        return images
    return F.interpolate(images, size=(resolution, resolution), mode="bilinear", align_corners=False)
