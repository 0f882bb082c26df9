"""torch.compile of the network: once per launch, before the clock starts, checked against the uncompiled network."""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from . import first_line
from .distributed import DistContext
from .layers import prepare_norms
from .metrics import Logits
from .recipe import Recipe, TrainingPass, apply_stage, autocast, image_dtype, kinds_of_stages, reset

# How far off a compiled gradient may be, as a share of its length. Rounding in another order reached 0.44 in a bias in
# bf16, 0.09 in fp16 and 0.003 in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 or more.
TOLERANCE = 0.7
LOGITS_TOLERANCE = 0.1  # of logits, which rounding moved by up to 0.007 in bf16, by less in fp16

Forward = Callable[[Tensor, Tensor, int], TrainingPass]  # of images, labels and the number of workers


def compiled(
    eager: Forward,
    network: nn.Module,
    recipe: Recipe,
    precision: str,
    sizes: Sequence[int],
    micro_batches: int,
    ctx: DistContext,
) -> Forward:
    """Return the compiled training pass; warn and return the eager one if any process cannot compile it.

    All graphs of training are compiled here, for batches of all `sizes`. The gradients of each are compared with the
    eager ones, because a compiler can be wrong without an error (docs/performance.md, "A trap").
    """
    workers, dtype = len(ctx.workers) // micro_batches, image_dtype(recipe, precision, ctx.device)
    images, _ = noise(recipe.batch_size * workers, 32, dtype, ctx)
    recipe.whiten(network, images.permute(0, 2, 3, 1))
    reset(network, recipe, seed=0)
    torch._dynamo.config.recompile_limit = 64  # four graphs a kind of step; beyond the default 8 it would not compile
    trackings = [True] * ctx.is_main + [False] * (micro_batches > 1 or not ctx.is_main)

    def check(forward: Forward) -> None:
        for kind, tracking, size in itertools.product(kinds_of_stages(recipe), trackings, sizes):
            apply_stage(network, kind)
            prepare_norms(network, workers, tracking)
            batch = noise(size * workers, kind.resolution, dtype, ctx)
            expected = gradients(network, eager, batch, workers)
            check_gradients(gradients(network, forward, batch, workers), expected)

    forward = compiled_or_eager("training", eager, check, ctx)
    network.zero_grad()
    reset(network, recipe, seed=0)  # undoes the last stage
    return forward


def compiled_evaluation(
    network: nn.Module, recipe: Recipe, precision: str, sizes: Iterable[int], ctx: DistContext
) -> Logits:
    """Return the network compiled to evaluate so many images at once; warn and return it as it is if that fails."""

    @torch.no_grad()
    def check(forward: Logits) -> None:
        # A graph serves all views. From torch 2.12 on each set of frozen parameters has its own.
        for kind, size in itertools.product(kinds_of_stages(recipe), set(sizes)):
            apply_stage(network, kind)
            images, _ = noise(size, 32, image_dtype(recipe, precision, ctx.device), ctx)
            with autocast(recipe, precision, ctx.device):
                check_close("evaluation", forward(images), network(images), LOGITS_TOLERANCE)

    network.eval()
    forward = compiled_or_eager("evaluation", network, check, ctx)
    network.train()
    reset(network, recipe, seed=0)  # undoes the last stage
    # Shifted views are slices, whose strides would need graphs of their own.
    return lambda images: forward(images.contiguous(memory_format=torch.channels_last))


def compiled_or_eager(what: str, eager: Callable, check: Callable[[Callable], None], ctx: DistContext) -> Callable:
    """Return `eager` compiled, after `check` has called it; warn and return `eager` if that fails on any process."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it remarks on a missing GPU
    if "TORCH_LOGS" not in os.environ:  # with which a user asks for more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    # On GPUs first with independent kernels in one launch, which torch calls experimental.
    for options in [{"combo_kernels": True}] * ctx.on_gpu + [None]:
        failure = ""
        try:
            forward = torch.compile(eager, dynamic=False, options=options)
            check(forward)
            break
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler raises nearly anything
            failure = first_line(error)
            if failure.endswith("file too short"):
                failure += " (an earlier compilation was interrupted: delete this file)"
    if failure := ctx.first_failure(f"compiled {what}", failure):
        ctx.warn(f"not compiled ({failure}): {what} continues uncompiled; --no_compile skips the attempt")
    return eager if failure else forward


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
        check_close(f"gradient of {name}", found[name], gradient, TOLERANCE)


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ArithmeticError if a tensor differs from the expected one by more than this share of its length."""
    if not expected.isfinite().all():
        raise ArithmeticError(f"the {what} is not finite uncompiled either")
    off = torch.dist(found.double(), expected.double()) / expected.double().norm()
    if not off <= tolerance:
        raise ArithmeticError(f"the compiled {what} is {off:.0%} off")
