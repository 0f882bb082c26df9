"""How a step is made fast: torch.compile, checked against the uncompiled network, and CUDA graphs; once per launch."""

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import first_line
from .core.fast import CACHE_WARNING
from .data.shards import Sample
from .devices import out_of_memory_hint
from .distributed import DistContext
from .evaluate import chunk_sizes
from .layers import norms_of
from .optim import Muon, NesterovSGD
from .recipe import Forward, Logits, Model, apply_stage, at_least_float32, distinct_stages, images_of_an_epoch, reset

# How far off compiled gradients may be, as a share of their length. Rounding in another order reached 0.44 in bf16,
# 0.22 in fp16 and 0.003 in fp32; a gradient that is lost, doubled or of the wrong sign is off by 1 or more.
GRADIENTS = {"fp64": 1e-5, "fp32": 0.02, "tf32": 0.2, "fp16": 0.5, "bf16": 0.7}
# Likewise losses, metrics, norm statistics and logits: rounding reached 0.002 in bf16, 4e-6 in fp32.
VALUES = {"fp64": 1e-6, "fp32": 0.002, "tf32": 0.02, "fp16": 0.02, "bf16": 0.02}

Step = Callable[[Sample], None]  # a training step


# torch.compile


def compiled(model: Model, train_images: int = 0, test_images: int = 0) -> Model:
    """Return the model with a compiled training pass, and on a GPU with compiled updates and evaluation.

    All graphs are compiled here, for the batches that so many images make (0: for full ones). What any process cannot
    compile stays uncompiled on all, with a warning. On a CPU evaluations gain less than compiling them takes.
    """
    network, recipe, ctx = model.network, model.recipe, model.ctx
    if CACHE_WARNING:
        ctx.warn(CACHE_WARNING)
    recipe.whiten(network, noise(recipe.batch_size, 32, model).permute(0, 2, 3, 1))
    reset(network, recipe, seed=0)
    torch._dynamo.config.recompile_limit = 64  # four graphs a stage; beyond the default 8 it would not compile
    short = images_of_an_epoch(recipe, train_images, epoch=1) % recipe.batch_size
    forward = compiled_training(model, [recipe.batch_size, short] if short else [recipe.batch_size])
    if forward is None:
        return model
    evaluation = None
    if ctx.on_gpu:
        for optimizer in model.optimizers:
            if isinstance(optimizer, NesterovSGD | Muon):  # ours; this makes an update few launches
                optimizer.compile()
        if test_images:
            of_this_process = len(range(ctx.rank, test_images, ctx.world_size))
            evaluation = compiled_evaluation(model, chunk_sizes(of_this_process, ctx.device))
    return replace(model, forward=forward, compiled=True, evaluation=evaluation)


def compiled_training(model: Model, sizes: Sequence[int]) -> Forward | None:
    """Return the training pass compiled for batches of these sizes, or None if it fails.

    All that each graph computes is compared with the eager results, because a compiler can be wrong without an error
    (docs/performance.md, "A trap").
    """

    def check(forward: Forward) -> None:
        for stage, size in itertools.product(distinct_stages(model.recipe), sizes):
            apply_stage(model.network, stage)
            images = noise(size * len(model.ctx.workers) // model.micro_batches, stage.resolution, model)
            with torch.no_grad(), model.precision.autocast():
                predicted = model.network(images).argmax(1)
            # All labels are equal, so that gradients add up, and of the most predicted class, so that some are correct.
            labels = predicted.mode().values.expand_as(predicted).contiguous()
            expected = results_of_pass(model.network, model.forward, images, labels)
            check_all_close(results_of_pass(model.network, forward, images, labels), expected, model.precision.name)

    forward = try_to_compile("training", model.forward, check, model.ctx)
    model.network.zero_grad()
    return forward


@out_of_memory_hint("evaluation")
def compiled_evaluation(model: Model, sizes: Iterable[int]) -> Logits | None:
    """Return the network compiled to evaluate so many images at once, or None if it fails."""
    network = model.network

    def eager(images: Tensor) -> Tensor:
        return at_least_float32(network(images))  # in the network's last kernel

    @torch.no_grad()
    def check(forward: Logits) -> None:
        # A graph serves all views. From torch 2.12 on each set of frozen parameters has its own.
        for stage, size in itertools.product(distinct_stages(model.recipe), set(sizes)):
            apply_stage(network, stage)
            images = noise(size, 32, model)
            with model.precision.autocast():
                found, expected = forward(images), eager(images)
            check_all_close({"evaluation": found}, {"evaluation": expected}, model.precision.name)

    network.eval()
    forward = try_to_compile("evaluation", eager, check, model.ctx)
    network.train()
    if forward is None:
        return None
    # Shifted views are slices, whose strides would need graphs of their own.
    return lambda images: forward(images.contiguous(memory_format=torch.channels_last))


def try_to_compile(what: str, eager: Callable, check: Callable[[Callable], None], ctx: DistContext) -> Callable | None:
    """Return `eager` compiled, after `check` has called it; None, with a warning, if that fails on any process."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it remarks on a missing GPU
    if "TORCH_LOGS" not in os.environ:  # with which a user asks for more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    marks: set[bool] = set()
    failure = ""

    def forward(*inputs: Tensor) -> Any:
        results, mark = marked(*inputs)
        marks.add(mark)
        return results

    try:
        marked = torch.compile(lambda *inputs: (eager(*inputs), torch.compiler.is_compiling()), dynamic=False)
        with torch._dynamo.config.patch(suppress_errors=False):  # or torch would continue uncompiled, and not say so
            check(forward)
        if marks != {True}:
            failure = "torch compiled nothing: is TORCH_COMPILE_DISABLE set?"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises nearly anything
        causes = re.findall(".*(?:error:|cannot find|undefined reference).*", str(error))  # in a compiler's output
        failure = ": ".join(dict.fromkeys([first_line(error), *causes[:1]]))
        if failure.endswith("file too short"):
            failure += " (an earlier compilation was interrupted: delete this file)"
    if failure := ctx.first_failure(f"compiled {what}", failure):
        ctx.warn(f"not compiled ({failure}): {what} continues uncompiled; --no_compile skips the attempt")
    return None if failure else forward


def noise(count: int, resolution: int, model: Model) -> Tensor:
    """Return images [count, 3, H, W], in memory as in training."""
    images = torch.randn(count, resolution, resolution, 3, generator=torch.Generator().manual_seed(0))
    return images.to(model.ctx.device, model.precision.images).permute(0, 3, 1, 2)


def results_of_pass(network: nn.Module, forward: Forward, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return gradients, losses, metrics and norm statistics of a forward and backward pass, by name."""
    network.zero_grad()
    for norm in norms_of(network):
        norm.batch_statistics = ()  # or a pass that stores none would seem to have stored the last pass's
    loss, losses, sums = forward(images, labels)
    loss.backward()
    weights = network.named_parameters()
    results = {f"gradient of {name}": weight.grad for name, weight in weights if weight.grad is not None}
    results |= {"loss": loss.detach(), "losses": losses, "metrics": sums / len(labels)}
    for number, norm in enumerate(norms_of(network)):
        results[f"mean of norm {number}"], results[f"variance of norm {number}"] = norm.batch_statistics
    return results


def check_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    """Raise ArithmeticError for a tensor that is missing, or differs from the expected one by too large a share."""
    for name, value in expected.items():
        if name not in found:
            raise ArithmeticError(f"the compiled pass has no {name}")
        if not value.isfinite().all():
            raise ArithmeticError(f"the {name} is not finite uncompiled either")
        off = torch.dist(found[name].double(), value.double()) / value.double().norm()
        if not off <= (GRADIENTS if name.startswith("gradient") else VALUES)[precision]:
            raise ArithmeticError(f"the compiled {name} is {100 * off:.3g}% off")


# CUDA graphs


class CudaGraphs:
    """Train on a sample by replaying a graph of its signature: the host launches a step once, not each of its kernels.

    A graph reads and writes the memory it was captured with: the shards' images, weights, momenta, learning rates and
    metrics stay where they are. A sample is copied into the one the graph was captured with.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Sample]] = {}
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # of all graphs: none reads what another left

    def warm_up(self, step: Step, sample: Sample) -> None:
        """Take a step a few times on the stream of the capture, as torch asks for."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                step(sample)
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, step: Step, sample: Sample) -> None:
        static = replace(sample, tensors=[tensor.clone() for tensor in sample.tensors])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool, self.stream):
            step(static)
        self.graphs[sample.signature] = graph, static

    def __call__(self, sample: Sample) -> None:
        graph, static = self.graphs[sample.signature]
        torch._foreach_copy_(static.tensors, sample.tensors)
        graph.replay()


def graphed(step: Step, samples: Iterable[Sample], ctx: DistContext) -> Step:
    """Return graphs of the step with these samples; warn and return `step` if any process cannot capture them."""
    graphs = CudaGraphs()
    for number, sample in enumerate(samples):
        graphs.warm_up(step, sample)  # raises the errors that training would raise
        error = ""
        try:
            graphs.capture(step, sample)
        except RuntimeError as reason:
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own
            error = first_line(reason)
        if error := ctx.first_failure(f"graph {number}", error):
            ctx.warn(f"no CUDA graphs ({error}): training continues without; --no_graph skips the attempt")
            return step
    return graphs
