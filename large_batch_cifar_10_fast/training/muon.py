"""Muon: momentum whose matrices are made orthogonal, for the filters of convolutions (docs/modern.md)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .world import World

# Of one step X <- aX + bX(X'X) + cX(X'X)^2: it moves every singular value of at most 1 towards 1, fast rather than
# exactly; after three most lie between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 3
TINY = 1e-30  # what a matrix of zeros is divided by


class Muon(Optimizer):
    """Nesterov momentum, made orthogonal, for weights [out, ...] that are kept at length sqrt(out):

        m = momentum * m + grad;  d = grad + momentum * m
        w = w * sqrt(out) / |w|;  w = w - lr * orthogonal(d)

    With every direction of the same size, none that gradients rarely show is left behind, and the size of gradients
    (their scale, their sum or mean) does not matter. The length is restored every `rescale_every` steps.
    The processes share the matrices out; those of one shape are one batch of products, which autocast makes half.
    torch.optim.Muon (2.9) takes matrices alone, one by one, and has no length to keep.
    """

    def __init__(self, groups: Iterable[dict], momentum: float, rescale_every: int, world: World) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "rescale_every": rescale_every})
        self.steps, self.world = 0, world
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]  # others rest
            if not weights:
                continue
            gradients, momenta = [w.grad for w in weights], [self.state[w] for w in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            directions = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
            if self.steps % group["rescale_every"] == 0:
                lengths = torch._foreach_norm(weights)
                factors = [math.sqrt(len(w)) / length for w, length in zip(weights, lengths, strict=True)]
                torch._foreach_mul_(weights, factors)
            torch._foreach_add_(weights, orthogonal_all(directions, self.world), alpha=-group["lr"])
        self.steps += 1


def orthogonal_all(directions: list[Tensor], world: World) -> list[Tensor]:
    """Each direction [out, ...] made orthogonal as a matrix [out, rest], by one of the processes, for all of them."""
    message = directions[0].new_zeros(sum(map(torch.numel, directions)))  # with what others make it is a sum with 0
    parts = message.split([direction.numel() for direction in directions])
    made = [part.view(direction.shape) for part, direction in zip(parts, directions, strict=True)]
    largest_first = sorted(range(len(directions)), key=lambda place: -directions[place].numel())
    mine = largest_first[world.rank :: world.world_size]
    for shape in dict.fromkeys(directions[place].shape for place in mine):
        places = [place for place in mine if directions[place].shape == shape]
        batch = orthogonal(torch.stack([directions[place].flatten(1) for place in places]))
        torch._foreach_copy_([made[place].flatten(1) for place in places], list(batch))
    world.all_reduce(message)
    return made


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V' of the singular value decomposition U S V' of each matrix [..., out, rest], by Newton and Schulz."""
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.to(matrices.dtype)
