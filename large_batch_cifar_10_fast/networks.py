"""What holds for the network of every recipe: precision, and fresh weights from a seed."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .devices import DTYPES
from .layers import norms_of
from .recipe import Recipe, Stage, images_of_an_epoch, stage_of


def weight_dtype(recipe: Recipe, precision: str) -> torch.dtype:
    """Of weights and images: float32 where bf16 computes, or fp16 for a recipe that keeps float32 weights beside it."""
    mixed = precision == "bf16" or (precision == "fp16" and not recipe.half_weights)
    return torch.float32 if mixed else DTYPES[precision]


def autocast(recipe: Recipe, precision: str, device: torch.device) -> torch.autocast:
    """Within it the network computes in its precision, whatever its weights are."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != weight_dtype(recipe, precision))


def make_network(recipe: Recipe, seed: int) -> nn.Module:
    """A recipe's network; `seed` alone determines its initial weights, and the global stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.network()


def cast(network: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Move to the device and to this type of weights; norms never in half."""
    network.to(device, dtype, memory_format=torch.channels_last)
    if dtype == torch.float16:
        for norm in norms_of(network):
            norm.float()
    return network


def frozen_weights(network: nn.Module) -> dict[str, Tensor]:
    """What is not trained, by name: it is computed from worker 0's images before training, once for all runs."""
    return {name: weight.data for name, weight in network.named_parameters() if not weight.requires_grad}


def reset(network: nn.Module, recipe: Recipe, seed: int) -> None:
    """Begin again as if just made, in the same memory: what was compiled for it stays valid. Frozen weights stay."""
    fresh = make_network(recipe, seed)
    for name, weight in fresh.named_parameters():
        network.get_parameter(name).requires_grad_(weight.requires_grad)  # one that rested is awake again
    network.load_state_dict({**fresh.state_dict(), **frozen_weights(network)})


def apply_stage(network: nn.Module, stage: Stage) -> None:
    """Put to rest what is no longer trained from this stage on: no gradient of it is computed, until a reset."""
    for name, weight in network.named_parameters():
        if name.startswith(stage.frozen):
            weight.requires_grad_(False)


@cache
def training_flop(recipe: Recipe, stage: Stage) -> int:
    """Floating-point operations of an image's forward and backward pass in a stage, by torch's counter."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = recipe.network()
        apply_stage(network, stage)
        network(torch.empty(1, 3, stage.resolution, stage.resolution)).sum().backward()
    return counter.get_total_flops()


def work_of_epoch(recipe: Recipe, total_images: int, epoch: int) -> int:
    """Floating-point operations of its forward and backward passes; evaluation is left out."""
    images = recipe.workers * images_of_an_epoch(recipe, total_images, epoch)
    return images * training_flop(recipe, stage_of(recipe, epoch).kind)


def work(recipe: Recipe, total_images: int) -> int:
    """The same of a run."""
    return sum(work_of_epoch(recipe, total_images, epoch) for epoch in range(1, recipe.epochs + 1))
