"""What holds for the network of every recipe: precision, and fresh weights from a seed."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .norm import norms_of
from .recipe import Recipe

DTYPES = {"fp16": torch.float16, "bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Within it, bf16 keeps float32 weights and computes in bfloat16; the other precisions are their weights'."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def make_network(recipe: Recipe, seed: int) -> nn.Module:
    """A recipe's network; `seed` alone determines its initial weights, and the global stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.network()


def cast(network: nn.Module, precision: str, device: torch.device) -> nn.Module:
    """Move to the device: half weights for fp16, float64 for fp64, float32 else; norms never in half."""
    dtype = DTYPES[precision]
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
    network.load_state_dict({**make_network(recipe, seed).state_dict(), **frozen_weights(network)})


def training_flop(recipe: Recipe) -> int:
    """Floating-point operations of an image's forward and backward pass: backward takes twice what forward does."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        recipe.network().eval()(torch.empty(1, 3, 32, 32))
    return 3 * counter.get_total_flops()
