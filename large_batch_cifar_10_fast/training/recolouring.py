"""What fast.ai's entry did to an image: crop, jitter of its colours, a small rotation, flip; for a batch at once."""

from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .augmentation import CropAndFlip, draw_uniformly
from .shards import MEAN, STD

LUMA = (0.299, 0.587, 0.114)  # how much red, green and blue add to an image's grey (ITU-R 601, as PIL's)


@dataclass(frozen=True)
class CropRecolourRotateFlip:
    """Each image's own crop; brightness, contrast and saturation, factors in 1 +- `strength`; rotation; flip.

    Factors and angles are uniform, drawn once an epoch. Unlike torchvision's on single images, the three colour
    operations come in one order and colours are not rounded to bytes in between.
    """

    crop_and_flip: CropAndFlip
    strength: float
    degrees: float

    def choose(self, count: int, generator: Generator, *_: object) -> tuple[Tensor, ...]:
        """Crops and flips as CropAndFlip's; float32 [count] each: three factors, and the angle in radians."""
        crops, flips = self.crop_and_flip.choose(count, generator)
        factors = [draw_uniformly(count, 1, self.strength, generator) for _ in range(3)]
        return crops, flips, *factors, draw_uniformly(count, 0, self.degrees * pi / 180, generator)

    def __call__(self, images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor, *changes: Tensor) -> Tensor:
        """Of `images` [n, 32, 32, 3], normalised, a batch [B, 3, 32, 32] of the same kind, channels-last."""
        *factors, angles = changes
        crop = self.crop_and_flip(images, rows, crops, torch.zeros_like(flips))
        pixels = [crop[:, c] * (STD[c] / 255) + MEAN[c] / 255 for c in range(3)]  # 0 to 1
        turned = rotate_and_flip(recolour(torch.stack(pixels, 1), *factors), angles, flips)
        normalised = [(turned[:, c] - MEAN[c] / 255) * (255 / STD[c]) for c in range(3)]
        return torch.stack(normalised, -1).permute(0, 3, 1, 2)


def recolour(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Images [B, 3, H, W] of 0 to 1 mixed with black, with their mean grey, and with their grey, in this order.

    A factor of 1 changes nothing, one above 1 moves away from what is mixed in; clipped to 0 to 1 each time.
    """
    images = mix(images, torch.zeros_like(images), brightness)
    images = mix(images, grey(images).mean((2, 3), keepdim=True), contrast)
    return mix(images, grey(images), saturation)


def mix(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    factors = factors.to(images.dtype)[:, None, None, None]
    return (factors * images + (1 - factors) * other).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """[B, 1, H, W]."""
    return sum(weight * images[:, c : c + 1] for c, weight in enumerate(LUMA))


def rotate_and_flip(images: Tensor, angles: Tensor, flips: Tensor) -> Tensor:
    """Turn images [B, 3, H, W] counter-clockwise by `angles` (radians), then mirror them where `flips` is 1.

    Each pixel takes the nearest one's colour, or black where that lies outside.
    """
    cos, sin, sign = angles.cos(), angles.sin(), 1 - 2 * flips
    zero = torch.zeros_like(cos)
    # Where a pixel's colour comes from: mirrored back, then turned back. Rows of matrices are x and y, y downwards.
    origins = torch.stack([cos * sign, -sin, zero, sin * sign, cos, zero], 1).view(-1, 2, 3).to(images.dtype)
    grid = F.affine_grid(origins, images.shape, align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
