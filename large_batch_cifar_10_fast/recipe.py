"""What training asks of a recipe: everything that decides the weights, and nothing about where or how it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from .distributed import DistContext


class Augmentation(Protocol):
    """Choices are sampled once an epoch for a whole shard; a batch is then made of its images and their choices.

    `generator` is the epoch's own; `run_generator` begins alike in every epoch of a run.
    """

    def sample(self, count: int, generator: Generator, run_generator: Generator, epoch: int) -> Sequence[Tensor]: ...

    def __call__(self, images: Tensor, rows: Tensor, *choices: Tensor) -> Tensor: ...


class Prediction(Protocol):
    """Logits [n, 10] of a process's test images [n, 32, 32, 3], from one view of them or several."""

    def __call__(self, network: nn.Module, images: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Stage:
    """From its first epoch on, until the next stage: images scaled down to so many pixels a side; weights that rest,
    whose names begin with one of these; the share of each worker's images that an epoch trains on, those of the
    highest loss when last seen."""

    first_epoch: int = 1
    resolution: int = 32
    frozen: tuple[str, ...] = ()
    kept: float = 1.0

    @property
    def kind(self) -> "Stage":
        """This stage but for when it begins and how much it keeps: stages of one kind take the same steps, by one
        graph, compiled before the clock starts."""
        return replace(self, first_epoch=1, kept=1.0)


class Recipe(Protocol):
    """A frozen dataclass, whose fields are its options on the command line; write one beside apple2019.py."""

    name: str
    workers: int  # replicas, each with its own shard of the training images
    batch_size: int  # images a worker takes each step
    epochs: int
    augmentation: Augmentation
    whole_epochs: bool  # whether what full batches leave of a shard is trained on too, as a short one
    reduction: Literal["sum", "mean"]  # of the loss over a worker's batch; over the workers it is always the mean
    half: Literal["fp16", "bf16"]  # what a GPU computes in by default; fp16 where the GPU has no bf16
    half_weights: bool  # in fp16; else it trains float32 weights and only computes in half
    loss_scale: int  # the loss is multiplied by it, and gradients divided: half precision loses small ones
    stages: Sequence[Stage]  # by their first epochs, of which the first is 1
    predict: Prediction  # after the last epoch, and of saved weights
    predict_early: Prediction  # after the epochs before

    def network(self) -> nn.Module:
        """Images [B, 3, 32, 32] to logits [B, 10], initialised; its norms are GhostBatchNorm."""
        ...

    def whiten(self, network: nn.Module, images: Tensor) -> None:
        """Set the network's frozen weights from worker 0's images [n, 32, 32, 3], normalised and unpadded."""
        ...

    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        """Each parameter group has `schedules`: what moves in it (lr, momentum), as functions of the time in epochs.

        They find the same gradients and weights on all processes of the ctx, and leave the same.
        """
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses [B], of logits [B, 10] and labels int64 [B]."""
        ...


def reduced(recipe: Recipe, losses: Tensor, workers: int) -> Tensor:
    """The sum over workers, so many side by side, of each one's loss over its batch; scaled."""
    total = losses.sum() if recipe.reduction == "sum" else losses.sum() / (len(losses) // workers)
    return total * recipe.loss_scale


def images_of_an_epoch(recipe: Recipe, total_images: int, epoch: int) -> int:
    """How many images of each worker's shard an epoch trains on: as many as the stage keeps of the shortest shard, or
    the full batches of them alone."""
    kept = round(total_images // recipe.workers * stage_of(recipe, epoch).kept)
    return kept if recipe.whole_epochs else kept - kept % recipe.batch_size


def images_to_warm_up(recipe: Recipe, total_images: int) -> int:
    """How many, of all workers, make a step of every kind, however little a stage keeps, and of every size of batch."""
    last = images_of_an_epoch(recipe, total_images, epoch=1) % recipe.batch_size or recipe.batch_size
    return recipe.workers * (recipe.batch_size * math.ceil(1 / min(stage.kept for stage in recipe.stages)) + last)


def stage_of(recipe: Recipe, epoch: int) -> Stage:
    """The stage that an epoch belongs to."""
    return [stage for stage in recipe.stages if stage.first_epoch <= epoch][-1]


def widened(logits: Tensor) -> Tensor:
    """In float32 at least: sums of half-precision logits would tie."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Losses [B], in float32 at least."""
    return F.cross_entropy(widened(logits), labels, reduction="none", label_smoothing=label_smoothing)
