"""torch.compile of the network: once per launch, before the clock starts, checked against the uncompiled network."""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from . import first_line
from .devices import out_of_memory_hint
from .distributed import DistContext
from .layers import norms_of, prepare_norms
from .metrics import Logits, at_least_float32
from .recipe import Recipe, TrainingPass, apply_stage, autocast, image_dtype, kinds_of_stages, reset

# How far off compiled gradients may be, as a share of their length. Rounding in another order reached 0.44 in bf16,
# 0.09 in fp16 and 0.003 in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 or more.
GRADIENTS = {"fp64": 1e-5, "fp32": 0.02, "tf32": 0.2, "fp16": 0.2, "bf16": 0.7}
# Likewise losses, metrics, norm statistics and logits: rounding reached 0.002 in bf16, 4e-6 in fp32.
VALUES = {"fp64": 1e-6, "fp32": 0.002, "tf32": 0.02, "fp16": 0.02, "bf16": 0.02}

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

    All graphs of training are compiled here, for batches of all `sizes`. All that each computes is compared with the
    eager results, because a compiler can be wrong without an error (docs/performance.md, "A trap").
    """
    workers, dtype = len(ctx.workers) // micro_batches, image_dtype(recipe, precision, ctx.device)
    images = noise(recipe.batch_size * workers, 32, dtype, ctx)
    recipe.whiten(network, images.permute(0, 2, 3, 1))
    reset(network, recipe, seed=0)
    torch._dynamo.config.recompile_limit = 64  # four graphs a kind of step; beyond the default 8 it would not compile
    trackings = [True] * ctx.is_main + [False] * (micro_batches > 1 or not ctx.is_main)

    def check(forward: Forward) -> None:
        for kind, tracking, size in itertools.product(kinds_of_stages(recipe), trackings, sizes):
            apply_stage(network, kind)
            prepare_norms(network, workers, tracking)
            images = noise(size * workers, kind.resolution, dtype, ctx)
            with torch.no_grad(), autocast(recipe, precision, ctx.device):
                predicted = network(images).argmax(1)
            # All labels are equal, so that gradients add up, and of the most predicted class, so that some are correct.
            labels = predicted.mode().values.expand_as(predicted).contiguous()
            gradients, values = results_of_pass(network, eager, images, labels, workers)
            found_gradients, found_values = results_of_pass(network, forward, images, labels, workers)
            check_all_close(found_gradients, gradients, GRADIENTS[precision])
            check_all_close(found_values, values, VALUES[precision])

    forward = compiled_or_eager("training", eager, check, ctx)
    network.zero_grad()
    reset(network, recipe, seed=0)  # undoes the last stage
    return forward


@out_of_memory_hint("evaluation")
def compiled_evaluation(
    network: nn.Module, recipe: Recipe, precision: str, sizes: Iterable[int], ctx: DistContext
) -> Logits:
    """Return the network compiled to evaluate so many images at once; warn and return it as it is if that fails."""

    def eager(images: Tensor) -> Tensor:
        return at_least_float32(network(images))  # in the network's last kernel

    @torch.no_grad()
    def check(forward: Logits) -> None:
        # A graph serves all views. From torch 2.12 on each set of frozen parameters has its own.
        for kind, size in itertools.product(kinds_of_stages(recipe), set(sizes)):
            apply_stage(network, kind)
            images = noise(size, 32, image_dtype(recipe, precision, ctx.device), ctx)
            with autocast(recipe, precision, ctx.device):
                check_close("evaluation", forward(images), eager(images), VALUES[precision])

    network.eval()
    forward = compiled_or_eager("evaluation", eager, check, ctx)
    network.train()
    reset(network, recipe, seed=0)  # undoes the last stage
    # Shifted views are slices, whose strides would need graphs of their own.
    return lambda images: forward(images.contiguous(memory_format=torch.channels_last))


def compiled_or_eager(what: str, eager: Callable, check: Callable[[Callable], None], ctx: DistContext) -> Callable:
    """Return `eager` compiled, after `check` has called it; warn and return `eager` if that fails on any process."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it remarks on a missing GPU
    if "TORCH_LOGS" not in os.environ:  # with which a user asks for more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    failure, forward = "", eager
    try:
        forward = torch.compile(eager, dynamic=False)
        check(forward)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises nearly anything
        failure = first_line(error)
        if failure.endswith("file too short"):
            failure += " (an earlier compilation was interrupted: delete this file)"
    if failure := ctx.first_failure(f"compiled {what}", failure):
        ctx.warn(f"not compiled ({failure}): {what} continues uncompiled; --no_compile skips the attempt")
    return eager if failure else forward


def noise(count: int, resolution: int, dtype: torch.dtype, ctx: DistContext) -> Tensor:
    """Return images [count, 3, H, W], in memory as in training."""
    images = torch.randn(count, resolution, resolution, 3, generator=torch.Generator().manual_seed(0))
    return images.to(ctx.device, dtype).permute(0, 3, 1, 2)


def results_of_pass(
    network: nn.Module, forward: Forward, images: Tensor, labels: Tensor, workers: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a forward and backward pass; and its losses, metrics and norm statistics; by name."""
    network.zero_grad()
    for norm in norms_of(network):
        norm.latest = ()  # or a pass that keeps none would seem to have kept the last pass's
    loss, losses, sums = forward(images, labels, workers)
    loss.backward()
    named = ((name, weight.grad) for name, weight in network.named_parameters())
    gradients = {f"gradient of {name}": gradient for name, gradient in named if gradient is not None}
    values = {"loss": loss.detach(), "losses": losses, "metrics": sums / len(labels)}
    for number, norm in enumerate(norms_of(network)):
        if norm.tracking:
            mean, variance = norm.latest
            values |= {f"mean of norm {number}": mean, f"variance of norm {number}": variance}
    return gradients, values


def check_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Raise ArithmeticError for a tensor that is missing, or too far from the expected one."""
    for name, value in expected.items():
        if name not in found:
            raise ArithmeticError(f"the compiled pass has no {name}")
        check_close(name, found[name], value, tolerance)


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ArithmeticError if a tensor differs from the expected one by more than this share of its length."""
    if not expected.isfinite().all():
        raise ArithmeticError(f"the {what} is not finite uncompiled either")
    off = torch.dist(found.double(), expected.double()) / expected.double().norm()
    if not off <= tolerance:
        raise ArithmeticError(f"the compiled {what} is {100 * off:.3g}% off")
