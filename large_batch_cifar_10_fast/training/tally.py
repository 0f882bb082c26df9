"""Counting right answers and losses without waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .world import World


@dataclass(frozen=True)
class Score:
    """How many of so many images were right, and their mean loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class Tally:
    """Images right, images seen, and their losses added up (float64 [3]), on the device until they are read; and each
    micro-batch's losses, float32 [B]."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def count(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        right = (logits.argmax(1) == labels).sum()
        self.sums += torch.stack([right, torch.full_like(right, len(labels)), losses.sum()])
        self.losses.append(losses.detach().float())

    def read(self) -> Score:
        """Of all processes together."""
        correct, images, loss = self.world.all_reduce(self.sums).tolist()
        return Score(int(correct), int(images), loss / images)
