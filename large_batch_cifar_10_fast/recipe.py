"""The interface of a recipe, and what is derived from it: stages, fresh weights, a model, FLOP of a run.

A recipe is everything that decides the weights. Where and how it runs are Options (config.py).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from . import ConfigError
from .devices import Precision
from .distributed import DistContext
from .layers import norms_of, running_statistics

Logits = Callable[[Tensor], Tensor]  # images [B, 3, H, W] to logits [B, classes]: a network, compiled or not
Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of red, green and blue, on the 0..255 scale
CIFAR_10_NORMALIZATION: Normalization = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # as published

# Test-time augmentation: views of an image and their weights. A view is a shift by so many pixels up and left (by fewer
# than 0: down and right), and whether the image is mirrored then.
Views = dict[tuple[int, bool], float]
ONE_VIEW: Views = {(0, False): 1.0}
TWO_VIEWS: Views = {(0, False): 1 / 2, (0, True): 1 / 2}
SIX_VIEWS: Views = {view: weight / 2 for view, weight in TWO_VIEWS.items()}
SIX_VIEWS |= {(shift, mirrored): 1 / 8 for mirrored in (False, True) for shift in (1, -1)}


@dataclass(frozen=True)
class Stage:
    """Settings that change within a run. A stage holds from its first epoch until the next stage's."""

    first_epoch: int = 1
    resolution: int = 32  # pixels a side, to which images are scaled down
    frozen: tuple[str, ...] = ()  # parameters whose names begin with one of these are not trained
    keep_fraction: float = 1.0  # of each worker's images, those with the highest loss when last seen

    @property
    def signature(self) -> "Stage":
        """The settings that a step's graph depends on: stages of one signature share compiled code and CUDA graphs."""
        return replace(self, first_epoch=1, keep_fraction=1.0)


class Recipe(ABC):
    """A frozen dataclass, whose fields are its options on the command line. It states where it differs from this."""

    name: str
    batch_size: int  # images a worker takes each step
    epochs: int
    augmentation: Any  # CropAndFlip (data/shards.py) or a class like it
    whole_epochs: bool = False  # whether the images that fill no batch make a short last one
    reduction: Literal["sum", "mean"] = "sum"  # of the loss over a worker's batch; over workers it is always the mean
    half: Literal["fp16", "bf16"] = "fp16"  # default precision on a GPU; fp16 where the GPU has no bf16
    half_weights: bool = True  # with fp16: whether weights are fp16, too; if not, operations cast float32 weights
    loss_scale: int = 1  # multiplies the loss and divides gradients: half precision loses small gradients
    label_smoothing: float = 0.0  # part of a label that is spread over all classes
    tta: Views = ONE_VIEW  # after the last epoch, and for saved weights
    tta_early: Views = ONE_VIEW  # after the other epochs
    classes: int = 10  # this and the next belong to the images
    normalization: Normalization = CIFAR_10_NORMALIZATION

    def for_images(self, classes: int, normalization: Normalization) -> Self:
        """Return the recipe for images of so many classes, with this normalization."""
        made = copy.copy(self)
        vars(made).update(classes=classes, normalization=normalization)
        return made

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def stages(self) -> Sequence[Stage]:
        """Stages in their order; the first begins with epoch 1."""
        return (Stage(),)

    @property
    @abstractmethod
    def workers(self) -> int:
        """The number of replicas, each with its own shard of the training images."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return an initialized network: images [B, 3, 32, 32] to logits [B, classes]. Its norms are GhostBatchNorm."""

    def whiten(self, network: nn.Module, images: Tensor) -> None:  # noqa: B027 (optional)
        """Set the whitening filters, if any, from worker 0's images [n, 32, 32, 3], normalized and unpadded."""

    @abstractmethod
    def optimizers(self, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
        """Return optimizers whose groups have `schedules`: lr, momentum, ... as functions of the time in epochs.

        All processes of the ctx give them the same gradients and weights, and must get the same weights back.
        """

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return losses [B], in float32 or float64, for logits [B, classes] and labels int64 [B]."""
        logits = at_least_float32(logits)
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)


# Options of the command line

MOST = 100_000  # the largest number that an option takes, unless it has another limit


def option(default: Any, text: str, least: float = 0, most: float = MOST, choices: Sequence[str] = ()) -> Any:
    """Return a dataclass field that is an option of the command line; numbers lie within limits."""
    return field(default=default, metadata={"help": text, "limits": (least, most), "choices": choices or None})


def same_option(owner: Any, name: str, default: Any) -> Any:
    """Return an option of another recipe with another default."""
    return field(default=default, metadata=owner.__dataclass_fields__[name].metadata)


def check_limits(options: Any) -> None:
    """Raise ConfigError for a number outside the limits of its option."""
    for entry in fields(options):
        value, (least, most) = getattr(options, entry.name), entry.metadata.get("limits", (-MOST, MOST))
        if isinstance(value, int | float) and not least <= value <= most:
            raise ConfigError(f"--{entry.name} {value} must lie in {least} to {most}")


def stage_of(recipe: Recipe, epoch: int) -> Stage:
    return [stage for stage in recipe.stages if stage.first_epoch <= epoch][-1]


def distinct_stages(recipe: Recipe) -> list[Stage]:
    """Return a stage of each signature, in their order."""
    return list({stage.signature: stage for stage in recipe.stages}.values())


def images_of_an_epoch(recipe: Recipe, total_images: int, epoch: int) -> int:
    """Return how many images of each worker's shard an epoch trains on; shards count as long as the shortest."""
    kept = round(total_images // recipe.workers * stage_of(recipe, epoch).keep_fraction)
    return kept if recipe.whole_epochs else kept - kept % recipe.batch_size


def apply_stage(network: nn.Module, stage: Stage) -> None:
    """Freeze the stage's parameters, of which no gradient is computed, and train all others."""
    for name, weight in network.named_parameters():
        weight.requires_grad_(not name.startswith(stage.frozen))


def make_network(recipe: Recipe, seed: int) -> nn.Module:
    """Return the recipe's network; `seed` alone decides its weights, and the global random stream is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.network()


def place(network: nn.Module, precision: Precision) -> nn.Module:
    """Move the network to the device, channels-last, in the type of weights; norms stay in float32 at least."""
    network.to(precision.device, precision.weights, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision.weights == torch.float16:
        for norm in norms_of(network):
            norm.float()
    return network


@torch.no_grad()
def reset(network: nn.Module, recipe: Recipe, seed: int) -> None:
    """Give the network fresh weights and statistics, in the same memory, so that compiled code and graphs stay valid.

    Whitening filters stay: they are computed once, for all runs.
    """
    tensors, fresh = ([*x.parameters(), *running_statistics(x)] for x in (network, make_network(recipe, seed)))
    for tensor, value in zip(tensors, fresh, strict=True):
        tensor.copy_(value)


# A model


def at_least_float32(logits: Tensor) -> Tensor:
    """Half-precision logits would often tie when they are added up or compared."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class TrainingPass(NamedTuple):
    """The results of a forward pass over images [B]."""

    loss: Tensor  # to differentiate: summed over the workers, and scaled
    losses: Tensor  # of each image, float32 [B]
    sums: Tensor  # correct images, images, and their summed losses, [3]


Forward = Callable[[Tensor, Tensor], TrainingPass]  # of images and labels


@dataclass(frozen=True)
class Model:
    """A recipe's network on this process's device, trained by all runs one after the other from fresh weights."""

    recipe: Recipe
    ctx: DistContext
    precision: Precision
    network: nn.Module
    optimizers: list[Optimizer]
    forward: Forward  # compiled or not
    micro_batches: int = 1  # forward and backward passes of a step
    compiled: bool = False
    evaluation: Logits | None = None  # the network compiled for evaluation


@cache
def training_flop(recipe: Recipe, stage: Stage) -> int:
    """Return the floating-point operations of one image's forward and backward pass, by torch's counter."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = recipe.network()
        apply_stage(network, stage)
        network(torch.empty(2, 3, stage.resolution, stage.resolution)).sum().backward()  # one has no variance
    return counter.get_total_flops() // 2


def run_flop(recipe: Recipe, total_images: int) -> int:
    """Return the floating-point operations of a run's training steps, without evaluation."""
    return recipe.workers * sum(
        images_of_an_epoch(recipe, total_images, epoch) * training_flop(recipe, stage_of(recipe, epoch).signature)
        for epoch in range(1, recipe.epochs + 1)
    )
