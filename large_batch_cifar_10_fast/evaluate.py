"""Metrics that do not wait for the device, test-time augmentation, and evaluation on the test images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .devices import out_of_memory_hint
from .distributed import DistContext
from .layers import running_statistics

if TYPE_CHECKING:
    from .recipe import Model

Logits = Callable[[Tensor], Tensor]  # images [B, 3, H, W] to logits [B, classes]: a network, compiled or not
Prediction = Callable[[Logits, Tensor], Tensor]  # logits [n, classes] of a network for test images [n, 32, 32, 3]


@dataclass(frozen=True)
class Score:
    """The number of correct images among `images`, and their mean loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class Metrics:
    """Accumulate correct images, images and losses (float64 [3]) on the device."""

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)

    def read(self) -> Score:
        """Return the score over all processes; waits for the device."""
        self.ctx.all_reduce([sums := self.sums.clone()])
        correct, images, loss = sums.tolist()
        return Score(int(correct), int(images), loss / images)


@torch.no_grad()
def sums_of(logits: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Return the number of correct images, the number of images, and the sum of their losses, [3]."""
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack([correct, torch.full_like(correct, len(labels)), losses.sum()])


AT_ONCE = 1000  # images evaluated at once on a CPU; on a GPU as many for each 4 GiB. Each takes up to 1.6 MiB in fp32


def chunk_sizes(count: int, device: torch.device) -> list[int]:
    """Return how many images a device evaluates at once, by chunk. Most of its memory is left to training."""
    gib = torch.cuda.get_device_properties(device).total_memory >> 30 if device.type == "cuda" else 4
    most = AT_ONCE * max(1, gib) // 4
    return [min(most, count - start) for start in range(0, count, most)]


@dataclass(frozen=True)
class TestTimeAugmentation:
    """Average logits over views of images [B, 3, H, W]; the weights of the views add up to 1."""

    views: Mapping[Callable[[Tensor], Tensor], float]

    def __call__(self, network: Logits, images: Tensor) -> Tensor:
        """Return logits [n, classes] for images [n, 32, 32, 3]."""
        chunks = (chunk.permute(0, 3, 1, 2) for chunk in images.split(chunk_sizes(len(images), images.device)))
        views = self.views.items()
        return torch.cat([reduce(add, (w * at_least_float32(network(view(x))) for view, w in views)) for x in chunks])


def at_least_float32(logits: Tensor) -> Tensor:
    """Half-precision logits would often tie when they are added up or compared."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def unchanged(images: Tensor) -> Tensor:
    return images


def mirrored(images: Tensor) -> Tensor:
    return images.flip(3)


def up_left(images: Tensor) -> Tensor:
    """Shift by one pixel; the border is padded by reflection."""
    return F.pad(images, (0, 1, 0, 1), "reflect")[:, :, 1:, 1:]


def down_right(images: Tensor) -> Tensor:
    return F.pad(images, (1, 0, 1, 0), "reflect")[:, :, :-1, :-1]


ONE_VIEW = TestTimeAugmentation({unchanged: 1.0})
TWO_VIEWS = TestTimeAugmentation({unchanged: 1 / 2, mirrored: 1 / 2})
SHIFTED = (up_left, down_right, lambda images: mirrored(up_left(images)), lambda images: mirrored(down_right(images)))
SIX_VIEWS = TestTimeAugmentation({unchanged: 1 / 4, mirrored: 1 / 4} | dict.fromkeys(SHIFTED, 1 / 8))


@torch.no_grad()
@out_of_memory_hint("evaluation")
def evaluate(model: "Model", predict: Prediction, test: tuple[Tensor, Tensor]) -> Score:
    """Return the score on all test images, of which each process evaluates its part `test`."""
    network, (images, labels), metrics = model.network, test, Metrics(model.ctx)
    network.eval()
    model.ctx.broadcast(*running_statistics(network))  # rank 0's, which are worker 0's
    with model.precision.autocast():
        logits = predict(model.evaluation or network, images)
    metrics.sums += sums_of(logits, labels, model.recipe.loss(logits, labels))
    network.train()
    return metrics.read()
