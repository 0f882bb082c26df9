"""Which crop and flip each image gets in an epoch, and the gather that makes a batch of them (method, section 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class CropAndFlip:
    """Reflect-pad by `padding`, cut 32x32 out of it, mirror: each image as `deal` assigns it, once an epoch."""

    padding: int
    deal: Deal

    @property
    def places(self) -> int:
        """Places a side where a crop may begin."""
        return 2 * self.padding + 1

    def choose(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """For each of `count` images, crops (0 to places² - 1, row by row) and flips (1: mirrored), int64 [count]."""
        return self.deal(count, self.places**2, generator), self.deal(count, 2, generator)

    def __call__(self, images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor) -> Tensor:
        """`images[rows]` padded, cropped and mirrored in one gather: [B, 3, 32, 32], channels-last.

        `images` are [n, 32, 32, 3]. Padding is an index here, and takes no memory.
        """
        span = torch.arange(SIZE, device=images.device)
        reflected = torch.arange(-self.padding, SIZE + self.padding, device=images.device).abs()
        reflected = torch.where(reflected < SIZE, reflected, 2 * (SIZE - 1) - reflected)
        down = reflected[(crops // self.places)[:, None] + span]
        columns = torch.where(flips[:, None] == 1, SIZE - 1 - span, span)
        across = reflected[(crops % self.places)[:, None] + columns]
        return images[rows[:, None, None], down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def unchanged(images: Tensor) -> Tensor:
    """The image itself, as a view to evaluate."""
    return images


def mirrored(images: Tensor) -> Tensor:
    """Left and right exchanged, as a view to evaluate; images are [B, 3, H, W]."""
    return images.flip(3)
