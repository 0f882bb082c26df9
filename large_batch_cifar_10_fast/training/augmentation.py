"""Which crop and flip each image gets in an epoch, and the gather that makes a batch of them (method, section 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

SIZE = 32  # of an image, in pixels a side
MOST_OPTIONS = 200  # of a transform, in one epoch

Deal = Callable[[int, int, Generator], Tensor]


def deal_evenly(count: int, options: int, generator: Generator) -> Tensor:
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


def draw_independently(count: int, options: int, generator: Generator) -> Tensor:
    """One of `options` for each of `count` images, each drawn by itself (int64 [count])."""
    return torch.randint(options, (count,), generator=generator, device=generator.device)


def draw_uniformly(count: int, middle: float, reach: float, generator: Generator) -> Tensor:
    """A number in middle +- reach for each of `count` images, each drawn by itself (float32 [count])."""
    return middle + reach * (2 * torch.rand(count, generator=generator, device=generator.device) - 1)


@dataclass(frozen=True)
class CropAndFlip:
    """Reflect-pad by `padding`, cut 32x32 out of it, mirror: each image as `deal` assigns it, once an epoch."""

    padding: int
    deal: Deal

    def choose(self, count: int, generator: Generator, *_: object) -> tuple[Tensor, Tensor]:
        """For each image, where its crop begins (row by row) and whether it is mirrored (1), both int64 [count]."""
        return self.deal(count, (2 * self.padding + 1) ** 2, generator), self.deal(count, 2, generator)

    def __call__(self, images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor) -> Tensor:
        """Of `images` [n, 32, 32, 3], a batch [B, 3, 32, 32], channels-last, in one gather: padding is but an index."""
        places, span = 2 * self.padding + 1, torch.arange(SIZE, device=images.device)
        reflected = torch.arange(-self.padding, SIZE + self.padding, device=images.device).abs()
        reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
        down = reflected[(crops // places)[:, None] + span]
        columns = torch.where(flips[:, None] == 1, SIZE - 1 - span, span)
        across = reflected[(crops % places)[:, None] + columns]
        return images[rows[:, None, None], down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class CropAndAlternate(CropAndFlip):
    """Crops as CropAndFlip's; each image is mirrored or not at random in the first epoch, and then every other epoch.

    Two epochs in a row so see an image both ways, which chance would give half of them. It goes by the epoch's number:
    what a recipe leaves out of one epoch comes back as it was seen in the last.
    """

    def choose(self, count: int, generator: Generator, of_the_run: Generator, epoch: int) -> tuple[Tensor, Tensor]:
        crops, _ = super().choose(count, generator)
        return crops, (draw_independently(count, 2, of_the_run) + epoch) % 2


def scaled_down(images: Tensor, resolution: int) -> Tensor:
    """Images [B, 3, H, W] with so many pixels a side, bilinear: what they cost falls with its square."""
    if images.shape[-1] == resolution:
        return images
    return F.interpolate(images, size=(resolution, resolution), mode="bilinear", align_corners=False)
