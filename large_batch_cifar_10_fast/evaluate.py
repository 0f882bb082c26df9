"""The score of a network on the test images, averaged over views of each."""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from .devices import out_of_memory_hint
from .distributed import DistContext
from .layers import running_statistics
from .recipe import Logits, Model, Views, at_least_float32

AT_ONCE = 1000  # images evaluated at once on a CPU; on a GPU as many for each 4 GiB. Each takes up to 1.6 MiB in fp32


@dataclass(frozen=True)
class Score:
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


def read_score(sums: Tensor, ctx: DistContext) -> Score:
    """Return the score from the `sums_of` all processes; waits for the device."""
    ctx.all_reduce([sums := sums.to(torch.float64, copy=True)])
    correct, images, loss = sums.tolist()
    return Score(int(correct), int(images), loss / images)


def chunk_sizes(count: int, device: torch.device) -> list[int]:
    """Return how many images a device evaluates at once, by chunk. Most of its memory is left to training."""
    gib = torch.cuda.get_device_properties(device).total_memory >> 30 if device.type == "cuda" else 4
    most = AT_ONCE * max(1, gib) // 4
    return [min(most, count - start) for start in range(0, count, most)]


def view(images: Tensor, shift: int, mirrored: bool) -> Tensor:
    """Shift images [B, 3, H, W] up and left by so many pixels, padded by reflection, then mirror them."""
    if shift:
        before, after, size = max(-shift, 0), max(shift, 0), images.shape[-1]
        padded = F.pad(images, (before, after, before, after), "reflect")
        images = padded[:, :, after : after + size, after : after + size]
    return images.flip(3) if mirrored else images


def predict(network: Logits, images: Tensor, views: Views) -> Tensor:
    """Return logits [n, classes] for images [n, 32, 32, 3], averaged over their weighted views."""
    chunks = (chunk.permute(0, 3, 1, 2) for chunk in images.split(chunk_sizes(len(images), images.device)))
    return torch.cat(
        [reduce(add, (w * at_least_float32(network(view(x, *v))) for v, w in views.items())) for x in chunks]
    )


@torch.no_grad()
@out_of_memory_hint("evaluation")
def evaluate(model: Model, views: Views, test: tuple[Tensor, Tensor]) -> Score:
    """Return the score on all test images, of which each process evaluates its part `test`."""
    network, (images, labels) = model.network, test
    network.eval()
    model.ctx.broadcast(*running_statistics(network))  # rank 0's, which are worker 0's
    with model.precision.autocast():
        logits = predict(model.evaluation or network, images, views)
    network.train()
    return read_score(sums_of(logits, labels, model.recipe.loss(logits, labels)), model.ctx)
