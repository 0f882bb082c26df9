"""torch.compile of the network: once per launch, before the clock starts, and checked against the network as it is."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .distributed import Team
from .network import DTYPES, Network, autocast, smoothed_cross_entropy
from .run_log import warn
from .settings import Settings

# Of a gradient's length. Rounding in another order was seen to reach 0.44 in a bias of bf16, 0.09 in fp16 and 0.003
# in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 and more.
TOLERANCE = 0.7


def compiled(network: Network, settings: Settings, team: Team) -> nn.Module:
    """The network in few passes over memory; or as it is, with a warning, where it cannot be compiled.

    All graphs that training needs are made here. Each is tried on a batch of noise, and its gradients held to
    the uncompiled network's: a compiler may go wrong without a word (torch 2.11 did, see NormaliseGroups).
    The network's weights, gradients and statistics are of no use afterwards: restart it.
    """
    if not settings.compile:
        return network
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it would remark on a missing GPU
    network.restart(torch.eye(27).view(27, 3, 3, 3), seed=0)  # filters that let the noise through
    fused = torch.compile(network, dynamic=False)
    batch = noise(settings.batch_size * len(team.workers) // settings.passes, settings, team)
    followed = [settings.batch_size] * team.leads + [0] * (settings.passes > 1 or not team.leads)
    try:
        for images in followed:
            network.follow(images)
            expected = gradients(network, network, batch, settings)
            check_agreement(gradients(network, fused, batch, settings), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may say: training goes on without it
        if team.leads:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            broken = " (a compilation was broken off: delete this file)" * reason.endswith("file too short")
            warn(f"not compiled ({reason}){broken}: training goes on uncompiled; --no_compile says so without a try")
        fused = network
    network.zero_grad()
    return fused


def noise(count: int, settings: Settings, team: Team) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 32, 32] as training's are laid out, and labels."""
    images = torch.randn(count, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(count, dtype=torch.int64, device=team.device)  # all alike, or gradients would cancel out
    return images.to(team.device, DTYPES[settings.precision]).permute(0, 3, 1, 2), labels


def gradients(
    network: Network, forward: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor], settings: Settings
) -> dict[str, Tensor]:
    """The gradient of each of the network's weights, by name, from one forward and backward pass."""
    images, labels = batch
    network.zero_grad()
    with autocast(settings.precision, images.device):
        logits = forward(images)
    smoothed_cross_entropy(logits, labels).sum().backward()
    return {name: weight.grad for name, weight in network.named_parameters()}


def check_agreement(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ArithmeticError for a gradient too far from the expected one, as a share of the latter's length."""
    for name, gradient in expected.items():
        off = torch.dist(found[name].double(), gradient.double()) / gradient.double().norm()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"the compiled gradient of {name} is {off:.0%} off")
