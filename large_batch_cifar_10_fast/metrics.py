"""Metrics without waiting for the device, and test-time augmentation: logits averaged over views of an image."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .distributed import DistContext
from .recipe import widened


@dataclass(frozen=True)
class Score:
    """How many of so many images were right, and their mean loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class Metrics:
    """Images right, images seen, and their losses added up (float64 [3]), on the device until they are read; and each
    micro-batch's losses, float32 [B]."""

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def count(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        right = (logits.argmax(1) == labels).sum()
        self.sums += torch.stack([right, torch.full_like(right, len(labels)), losses.sum()])
        self.losses.append(losses.detach().float())

    def read(self) -> Score:
        """Of all processes together."""
        correct, images, loss = self.ctx.all_reduce(self.sums).tolist()
        return Score(int(correct), int(images), loss / images)


View = Callable[[Tensor], Tensor]  # of images [B, 3, H, W]
MOST_AT_ONCE = 1000  # images, which fit any device


@dataclass(frozen=True)
class Averaged:
    """Logits averaged over views, each with its weight; weights add up to 1."""

    views: Mapping[View, float]

    def __call__(self, network: nn.Module, images: Tensor) -> Tensor:
        chunks = (chunk.permute(0, 3, 1, 2) for chunk in images.split(MOST_AT_ONCE))
        return torch.cat(
            [sum(weight * widened(network(v(chunk))) for v, weight in self.views.items()) for chunk in chunks]
        )


def unchanged(images: Tensor) -> Tensor:
    return images


def mirrored(images: Tensor) -> Tensor:
    """Left and right exchanged."""
    return images.flip(3)


def up_left(images: Tensor) -> Tensor:
    """Moved by one pixel up and left; the reflected next row and column come in."""
    return F.pad(images, (0, 1, 0, 1), "reflect")[:, :, 1:, 1:]


def down_right(images: Tensor) -> Tensor:
    return F.pad(images, (1, 0, 1, 0), "reflect")[:, :, :-1, :-1]


def mirrored_up_left(images: Tensor) -> Tensor:
    return mirrored(up_left(images))


def mirrored_down_right(images: Tensor) -> Tensor:
    return mirrored(down_right(images))


ONE_VIEW = Averaged({unchanged: 1.0})
TWO_VIEWS = Averaged({unchanged: 1 / 2, mirrored: 1 / 2})
SIX_VIEWS = Averaged(
    {unchanged: 1 / 4, mirrored: 1 / 4}
    | dict.fromkeys((up_left, down_right, mirrored_up_left, mirrored_down_right), 1 / 8)
)
