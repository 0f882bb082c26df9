"""torch.compile of the network: once per launch, before the clock starts, and checked against the network as it is."""

import itertools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .distributed import DistContext
from .layers import prepare_norms
from .networks import apply_stage, autocast, reset, weight_dtype
from .recipe import Recipe

# How far off a compiled gradient may be, as a share of its length. Rounding in another order was seen to reach 0.44 in
# a bias of bf16, 0.09 in fp16 and 0.003 in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 and
# more.
TOLERANCE = 0.7


def compiled(network: nn.Module, recipe: Recipe, precision: str, micro_batches: int, ctx: DistContext) -> nn.Module:
    """The network in few passes over memory; or as it is, with a warning, where any process cannot compile it.

    All graphs that training needs are made here, but for a short last batch's. Each is tried on a batch of noise, and
    its gradients held to the uncompiled network's: a compiler may go wrong without a word (docs/performance.md, "A
    trap").
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it would remark on a missing GPU
    if "TORCH_LOGS" not in os.environ:  # by which a user asks for more than the one line below
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    workers = len(ctx.workers) // micro_batches
    batch = noise(recipe.batch_size * workers, 32, weight_dtype(recipe, precision), ctx)
    recipe.whiten(network, batch[0].permute(0, 2, 3, 1))
    reset(network, recipe, seed=0)
    torch._dynamo.config.recompile_limit = 64  # graphs, two a kind of step at most; from its 8 on it would not compile
    fused = torch.compile(network, dynamic=False)
    trackings = [True] * ctx.is_main + [False] * (micro_batches > 1 or not ctx.is_main)
    try:
        kinds = dict.fromkeys(stage.kind for stage in recipe.stages)
        for kind, tracking in itertools.product(kinds, trackings):
            apply_stage(network, kind)
            prepare_norms(network, workers, tracking)
            batch = noise(recipe.batch_size * workers, kind.resolution, weight_dtype(recipe, precision), ctx)
            expected = gradients(network, network, recipe, batch, precision)
            check_gradients(gradients(network, fused, recipe, batch, precision), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may say: training goes on without it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        broken = " (a compilation was broken off: delete this file)" * reason.endswith("file too short")
        ctx.warn(f"not compiled ({reason}){broken}: training goes on uncompiled; --no_compile says so without a try")
        fused = network
    done = ctx.all_gather_words("compiled", str(fused is not network))
    if "False" in done and fused is not network:
        ctx.warn("not compiled on every process: training goes on uncompiled")
        fused = network
    network.zero_grad()
    reset(network, recipe, seed=0)  # what rests in the last stage is awake in the first
    return fused


def noise(count: int, resolution: int, dtype: torch.dtype, ctx: DistContext) -> tuple[Tensor, Tensor]:
    """Images [count, 3, H, W] of so many pixels a side as training's are laid out, and labels."""
    images = torch.randn(count, resolution, resolution, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(count, dtype=torch.int64, device=ctx.device)  # all alike, or gradients would cancel out
    return images.to(ctx.device, dtype).permute(0, 3, 1, 2), labels


def gradients(
    network: nn.Module,
    forward: Callable[[Tensor], Tensor],
    recipe: Recipe,
    batch: tuple[Tensor, Tensor],
    precision: str,
) -> dict[str, Tensor]:
    """The gradient of each of the network's trained weights, by name, from one forward and backward pass."""
    images, labels = batch
    network.zero_grad()
    with autocast(recipe, precision, images.device):
        logits = forward(images)
    recipe.loss(logits, labels).sum().backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.requires_grad}


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ArithmeticError for a gradient too far from the expected one, as a share of the latter's length."""
    for name, gradient in expected.items():
        if not gradient.isfinite().all():
            raise ArithmeticError(f"the gradient of {name} is not finite uncompiled either")
        off = torch.dist(found[name].double(), gradient.double()) / gradient.double().norm()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"the compiled gradient of {name} is {off:.0%} off")
