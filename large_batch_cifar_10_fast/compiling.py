"""torch.compile of the network: once per launch, before the clock starts, checked against the uncompiled network."""

import itertools
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .distributed import DistContext
from .layers import prepare_norms
from .recipe import Recipe, TrainingPass, apply_stage, reset

# How far off a compiled gradient may be, as a share of its length. Rounding in another order reached 0.44 in a bias in
# bf16, 0.09 in fp16 and 0.003 in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 or more.
TOLERANCE = 0.7

Forward = Callable[[Tensor, Tensor, int], TrainingPass]  # of images, labels and the number of workers


def compiled(
    eager: Forward,
    network: nn.Module,
    recipe: Recipe,
    dtype: torch.dtype,
    sizes: Sequence[int],
    micro_batches: int,
    ctx: DistContext,
) -> Forward:
    """Return the compiled training pass; warn and return the eager one if any process cannot compile it.

    All graphs of training are compiled here, for images of `dtype` and batches of all `sizes`. The gradients of each
    are compared with the eager ones, because a compiler can be wrong without an error (docs/performance.md, "A trap").
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it remarks on a missing GPU
    if "TORCH_LOGS" not in os.environ:  # with which a user asks for more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    workers = len(ctx.workers) // micro_batches
    images, _ = noise(recipe.batch_size * workers, 32, dtype, ctx)
    recipe.whiten(network, images.permute(0, 2, 3, 1))
    reset(network, recipe, seed=0)
    torch._dynamo.config.recompile_limit = 64  # four graphs a kind of step; beyond the default 8 it would not compile
    options = {"combo_kernels": True} if ctx.on_gpu else None  # independent kernels in one launch
    forward = torch.compile(eager, dynamic=False, options=options)
    trackings = [True] * ctx.is_main + [False] * (micro_batches > 1 or not ctx.is_main)
    try:
        kinds = dict.fromkeys(stage.kind for stage in recipe.stages)
        for kind, tracking, size in itertools.product(kinds, trackings, sizes):
            apply_stage(network, kind)
            prepare_norms(network, workers, tracking)
            batch = noise(size * workers, kind.resolution, dtype, ctx)
            expected = gradients(network, eager, batch, workers)
            check_gradients(gradients(network, forward, batch, workers), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises nearly anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        broken = " (an earlier compilation was interrupted: delete this file)" * reason.endswith("file too short")
        ctx.warn(f"not compiled ({reason}){broken}: training continues uncompiled; --no_compile skips the attempt")
        forward = eager
    everywhere = ctx.all_gather_strings("compiled", str(forward is not eager))
    if "False" in everywhere and forward is not eager:
        ctx.warn("not compiled on every process: training continues uncompiled")
        forward = eager
    network.zero_grad()
    reset(network, recipe, seed=0)  # undoes the last stage
    return forward


def noise(count: int, resolution: int, dtype: torch.dtype, ctx: DistContext) -> tuple[Tensor, Tensor]:
    """Return images [count, 3, H, W], in memory as in training, and labels, all equal so that gradients add up."""
    images = torch.randn(count, resolution, resolution, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(count, dtype=torch.int64, device=ctx.device)
    return images.to(ctx.device, dtype).permute(0, 3, 1, 2), labels


def gradients(network: nn.Module, forward: Forward, batch: tuple[Tensor, Tensor], workers: int) -> dict[str, Tensor]:
    """Return the gradient of each trained weight by name, from one forward and backward pass."""
    network.zero_grad()
    forward(*batch, workers).loss.backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.requires_grad}


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ArithmeticError if a gradient differs from the expected one by more than TOLERANCE of its length."""
    for name, gradient in expected.items():
        if not gradient.isfinite().all():
            raise ArithmeticError(f"the gradient of {name} is not finite uncompiled either")
        off = torch.dist(found[name].double(), gradient.double()) / gradient.double().norm()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"the compiled gradient of {name} is {off:.0%} off")
