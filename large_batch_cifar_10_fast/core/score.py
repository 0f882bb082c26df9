"""Metrics: correct images and mean loss of a pass, and the result that a run yields after each epoch."""

from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .team import Team


class Score(NamedTuple):
    """The number of correct images among `images`, and their mean loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


@torch.no_grad()
def sums_of(logits: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Return the number of correct images, the number of images, and the sum of their losses, [3]."""
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack([correct, torch.full_like(correct, len(labels)), losses.sum()])


def read_score(sums: Tensor, team: Team) -> Score:
    """Return the score from all processes' sums [3]: correct images, images, losses. Waits for the device."""
    total = sums.to(torch.float64, copy=True)
    team.sum_up([total])
    correct, images, loss = total.tolist()
    return Score(int(correct), int(images), loss / images)


@dataclass(frozen=True)
class Epoch:
    """The result that a run yields after each epoch."""

    number: int  # from 1
    seconds: float  # timed so far: upload, preprocessing, whitening, training
    train: Score  # while training
    validation: Score  # after the epoch
    network: nn.Module = field(repr=False)  # not a copy: the next epoch changes it

    def row(self) -> dict[str, float]:
        """Return the columns of epochs.tsv."""
        return {
            "epoch": self.number,
            "seconds": self.seconds,
            "train_loss": self.train.loss,
            "train_accuracy": self.train.accuracy,
            "validation_loss": self.validation.loss,
            "validation_accuracy": self.validation.accuracy,
        }

    @property
    def diverged(self) -> bool:
        """Whether a loss is not finite: such weights never recover."""
        return not isfinite(self.train.loss + self.validation.loss)
