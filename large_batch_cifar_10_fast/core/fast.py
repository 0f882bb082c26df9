"""What makes a step fast: precision, compiled and checked code, CUDA graphs. Also: fresh weights in the same memory.

Everything works on tensors and functions. CUDA graphs need a GPU; options switch compilation and graphs off.
"""

import contextlib
import getpass
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from .. import ConfigError, first_line
from .devices import DTYPES, allow_tf32, has_bf16, is_fast_in_bf16, out_of_memory_hint
from .layers import GhostBatchNorm
from .optim import set_rate
from .team import Team, on_one_machine

Function = TypeVar("Function", bound=Callable)

# ---- Precision


@dataclass(frozen=True)
class Precision:
    """The data types of a network on a device, by --precision.

    With `half_weights`, fp16 uses fp16 weights. Without, and for bf16, autocast casts float32 weights.
    """

    name: str
    device: torch.device
    half_weights: bool

    @property
    def compute(self) -> torch.dtype:
        """The type in which convolutions and matrix products are computed."""
        return DTYPES[self.name]

    @property
    def weights(self) -> torch.dtype:
        mixed = self.name == "bf16" or (self.name == "fp16" and not self.half_weights)
        return torch.float32 if mixed else self.compute

    @property
    def images(self) -> torch.dtype:
        """The type of images: on a GPU that of computation, on a CPU that of the weights."""
        return self.compute if self.device.type == "cuda" else self.weights

    def autocast(self) -> torch.autocast:
        """Return a context in which operations compute in this precision, whatever the type of the weights."""
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != self.weights)


def precision_on_gpu(asked: str, preferred: str, gpu: torch.device) -> str:
    """Return the requested precision, or by default `preferred`, or fp16 if the GPU has no bf16.

    Raise ConfigError for bf16 or tf32 if the GPU lacks it.
    """
    if asked in ("bf16", "tf32") and not has_bf16(gpu):
        instead = "fp16" if asked == "bf16" else "fp32"
        raise ConfigError(f"--precision {asked} needs GPUs of compute capability 8.0 or later: use {instead}")
    return asked or (preferred if has_bf16(gpu) else "fp16")


def precision_on_cpu(asked: str) -> str:
    """Return the requested precision, or by default bf16 where it is fast, otherwise fp32.

    Raise ConfigError for tf32, which needs a GPU.
    """
    if asked == "tf32":
        raise ConfigError("--precision tf32 is for GPUs: use --precision fp32")
    return asked or ("bf16" if is_fast_in_bf16() else "fp32")


def place(network: nn.Module, precision: Precision) -> None:
    """Move a network to the device, channels-last, in the type of weights. Norms stay in float32 at least."""
    allow_tf32(precision.name == "tf32")
    network.to(precision.device, precision.weights, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision.weights == torch.float16:
        for module in network.modules():
            if isinstance(module, GhostBatchNorm | nn.BatchNorm2d):
                module.float()


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32: sums and comparisons of half-precision logits often tie."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# ---- Fresh weights


class Model:
    """A network and its optimizers. A run begins with fresh values in the same memory."""

    def __init__(
        self,
        network: nn.Module,
        optimizers: Sequence[Optimizer],
        fresh: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
        keep: Sequence[str] = (),
    ) -> None:
        """`fresh()` makes a new network and optimizers. `keep` names parameters and buffers that a new run keeps."""
        self.network = network
        self.optimizers = optimizers
        self.fresh = fresh
        self.keep = keep

    @torch.no_grad()
    def restart(self, seed: int, team: Team) -> None:
        """Begin a run as if it were the first: its seed alone determines its weights and random numbers.

        New values are copied to the same memory, so that compiled code and CUDA graphs stay valid. This concerns all
        parameters and buffers, and the state of the optimizers. State that an optimizer creates in its first step is
        deleted. On a GPU it is zeroed in place, because a graph may hold its address. NAdam, ASGD and Rprop do not
        start from zeros, so on a GPU their second run differs from their first. Finally seed and rank start torch's
        generators, for random numbers of the network, such as dropout.
        """
        torch.manual_seed(seed)
        new_network, new_optimizers = self.fresh()
        self.network.zero_grad()
        tensors = tensors_of(self.network)
        values = tensors_of(new_network)
        for name in self.keep:
            del values[name]  # raises KeyError for an unknown name
        for name, value in values.items():
            tensors[name].copy_(value)
        for optimizer, new in zip(self.optimizers, new_optimizers, strict=True):
            for group, new_group in zip(optimizer.param_groups, new.param_groups, strict=True):
                restore(group, {name: value for name, value in new_group.items() if name != "params"})
                for weight, new_weight in zip(group["params"], new_group["params"], strict=True):
                    forget(optimizer.state[weight], new.state[new_weight], team.on_gpu)
                    restore(optimizer.state[weight], new.state[new_weight])
        torch.manual_seed(int(np.random.SeedSequence((seed, team.rank)).generate_state(1, np.uint64)[0] >> 1))


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a number in bytes


@torch.no_grad()
def checksum(network: nn.Module) -> str:
    """Return a checksum of all parameters, which changes if one bit changes. Wait for the device."""
    total = 0
    for weight in network.parameters():
        bits = weight.detach().flatten().view(INTEGERS[weight.element_size()]).to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        total = (31 * total + int((bits * places).sum())) % 2**63
    return str(total)


def restore(entries: dict, first: dict) -> None:
    """Set the entries to their first values. Tensors keep their memory."""
    for name, value in first.items():
        if isinstance(entries.get(name), Tensor):
            entries[name].copy_(torch.as_tensor(value))
        else:
            entries[name] = value


def forget(state: dict, first: dict, in_place: bool) -> None:
    """Delete entries of a weight's state that are not in its first state, or set them to zero in place."""
    for name in [name for name in state if name not in first]:
        if in_place and isinstance(state[name], Tensor):
            state[name].zero_()
        else:
            del state[name]


def keep_rates_on_gpu(optimizers: Iterable[Optimizer], team: Team) -> None:
    """On a GPU, keep learning rates in tensors, which graphs and compiled code read, and fuse torch's SGD."""
    if not team.on_gpu:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros((), device=team.device)
            if isinstance(optimizer, SGD):
                group["fused"] = True


# ---- Work


def count_flop(network: nn.Module, pixels: int = 32) -> float:
    """Return the floating-point operations of an image's forward and backward pass, by torch's counter."""
    network.eval().to("meta")  # in evaluation mode norms accept one image; on "meta" nothing is computed
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, pixels, pixels, device="meta")).sum().backward()
    return counter.get_total_flops()


# ---- torch.compile

# Largest allowed error of compiled gradients, relative to their norm. Different rounding reached 0.44 in bf16, 0.22 in
# fp16 and 0.003 in fp32. A gradient that is missing, doubled or has the wrong sign is off by 1 or more.
GRADIENTS = {"fp64": 1e-5, "fp32": 0.02, "tf32": 0.2, "fp16": 0.5, "bf16": 0.7}
# The same for losses, metrics, norm statistics and logits. Rounding reached 0.002 in bf16, 4e-6 in fp32.
VALUES = {"fp64": 1e-6, "fp32": 0.002, "tf32": 0.02, "fp16": 0.02, "bf16": 0.02}


def replace_cache_folder() -> str:
    """Choose another folder for compiled code if torch's folder cannot be created. Return the reason, or ""."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if folder is None:
            getpass.getuser()  # torch's default folder has this name
        else:
            os.makedirs(folder, exist_ok=True)
    except (OSError, KeyError) as error:  # KeyError: the user has no name
        other = os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        return f"TORCHINDUCTOR_CACHE_DIR cannot be created ({error}): compiled code is kept in {other}"
    return ""


def prepare_cache_folder(team: Team) -> None:
    """Replace an unusable folder, with a warning. Some imports of torch need it, even in uncompiled runs."""
    unusable = replace_cache_folder()
    if unusable:
        team.warn(unusable)


def compile_training(
    forward: Function,
    network: nn.Module,
    examples: Iterable[tuple],
    set_stage: Callable[..., None],
    precision: Precision,
    team: Team,
) -> Function:
    """Return `forward` compiled for each (images, *stage) of `examples`. If that fails, warn and return `forward`.

    `forward(images, labels)` returns a NamedTuple of tensors and lists of tensors, with the `loss` to differentiate.
    These results and the gradients are compared with uncompiled ones, because a compiler can be wrong without an error
    (docs/performance.md#a-trap-a-compiler-can-be-wrong-without-an-error).
    """

    def check(compiled: Callable) -> None:
        for images, *stage in examples:
            set_stage(*stage)
            with torch.no_grad(), precision.autocast():
                predicted = network(images).argmax(1)
            # All labels are the class predicted most often. So gradients add up, and some images are correct.
            labels = predicted.mode().values.expand_as(predicted).contiguous()
            expected = results_of_pass(network, forward, (images, labels))
            check_all_close(results_of_pass(network, compiled, (images, labels)), expected, precision.name)

    found = try_to_compile("training", forward, check, team)
    network.zero_grad()
    return found


def results_of_pass(network: nn.Module, forward: Callable, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the results of a forward pass and the gradients of its loss, by name."""
    network.zero_grad()
    made = forward(*batch)
    made.loss.backward()
    results = {f"gradient of {name}": w.grad for name, w in network.named_parameters() if w.grad is not None}
    for name, value in made._asdict().items():
        if isinstance(value, Tensor):
            results[name] = value.detach()
        else:
            results |= {f"{name} {place}": tensor for place, tensor in enumerate(value)}
    return results


@out_of_memory_hint("evaluation")
def compile_evaluation(
    network: nn.Module,
    test_images: Sequence[Tensor],
    examples: Iterable[tuple],
    set_stage: Callable[..., None],
    precision: Precision,
    team: Team,
) -> Callable[[Tensor], Tensor]:
    """Return `predict` of a network, compiled for test images like these.

    It is checked for the stage of each example, because each set of frozen parameters has its own graph (torch 2.12).
    If that fails, warn and return the uncompiled function.
    """
    eager = partial(predict, network)  # compiled, the last kernel converts to float32

    @torch.no_grad()
    def check(compiled: Callable) -> None:
        for _, *stage in examples:
            set_stage(*stage)
            network.eval()
            for images in (test_images[0], test_images[-1]):  # the last may be smaller
                with precision.autocast():
                    found = compiled(images.contiguous(memory_format=torch.channels_last))
                    expected = eager(images)
                check_all_close({"evaluation": found}, {"evaluation": expected}, precision.name)

    function = try_to_compile("evaluation", eager, check, team)
    network.train()
    # Shifted views are slices. Their strides would need more graphs.
    return lambda images: function(images.contiguous(memory_format=torch.channels_last))


class Functions(NamedTuple):
    """The functions of a step that are compiled."""

    make_batch: Callable  # (all images, all labels, batch, *stage) to (images, labels)
    forward: Callable  # (images, labels) to results of a pass
    predict: Callable[[Tensor], Tensor]  # images to logits


def compile_all(
    plain: Functions,
    model: Model,
    examples: Sequence[tuple],
    set_stage: Callable[..., None],
    noise: Any,
    micro_batches: int,
    precision: Precision,
    team: Team,
) -> Functions:
    """Compile the forward pass; on a GPU also batches, updates and evaluation.

    `examples` has a (batch, *stage) for each kind of step. `noise` has random images, labels and test_images, on which
    compiled and uncompiled code are compared. If compiling the forward pass fails, return `plain`.
    """
    team.say("compiling, which takes about a minute; a cache makes the next launch faster")
    parts = [(batch.chunk(micro_batches, dim=1)[0], *stage) for batch, *stage in examples]  # for one forward pass each
    images = [(plain.make_batch(noise.images, noise.labels, *part)[0], *part[1:]) for part in parts]
    forward = compile_training(plain.forward, model.network, images, set_stage, precision, team)
    if forward is plain.forward:
        return plain
    if not team.on_gpu:
        return plain._replace(forward=forward)

    def backward() -> None:
        set_stage(*parts[0][1:])
        model.network.zero_grad()
        plain.forward(*plain.make_batch(noise.images, noise.labels, *parts[0])).loss.backward()

    compile_updates(model.optimizers, backward, precision, team)
    model.network.zero_grad()
    make_batch = compile_batches(plain.make_batch, examples, noise, micro_batches, precision, team)
    test_images = list(chunks(noise.test_images))
    predict = compile_evaluation(model.network, test_images, examples, set_stage, precision, team)
    return Functions(make_batch, forward, predict)


def compile_batches(
    make_batch: Function, examples: Sequence[tuple], noise: Any, micro_batches: int, precision: Precision, team: Team
) -> Function:
    """Return `make_batch` compiled. If its batches differ for an example, warn and return `make_batch`."""

    def check(compiled: Callable) -> None:
        for batch, *stage in examples:
            part = batch.chunk(micro_batches, dim=1)[0]
            found = compiled(noise.images, noise.labels, part, *stage)
            expected = make_batch(noise.images, noise.labels, part, *stage)
            for name, made, right in zip(("images", "labels"), found, expected, strict=True):
                check_all_close({name: made}, {name: right}, precision.name)

    return try_to_compile("batches", make_batch, check, team)


def compile_updates(
    optimizers: Sequence[Optimizer], backward: Callable[[], None], precision: Precision, team: Team
) -> None:
    """Compile the updates of our optimizers, which then launch few kernels.

    If an optimizer's first compiled update differs, warn and keep it uncompiled. `backward()` sets gradients.
    """
    for number, optimizer in enumerate(optimizers):
        if not hasattr(optimizer, "compile"):  # an optimizer of torch
            continue
        plain = dict(vars(optimizer))
        failure = ""
        try:
            backward()
            expected = change_by_update(optimizer, precision)
            optimizer.compile()
            check_all_close(change_by_update(optimizer, precision), expected, precision.name)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler raises nearly anything
            failure = first_line(error)
        failure = team.first_failure(f"compiled updates {number}", failure)
        if failure:
            vars(optimizer).update(plain)
            team.warn(f"not compiled ({failure}): updates continue uncompiled; --no_compile skips the attempt")


@torch.no_grad()
def change_by_update(optimizer: Optimizer, precision: Precision) -> dict[str, Tensor]:
    """Return the changes of weights and momenta by an update, and restore both."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    momenta = [value for weight in weights for value in optimizer.state[weight].values()]
    for group in optimizer.param_groups:
        set_rate(group, 0.01)  # about as high as in a run, so that half precision does not overflow
    tensors = [*weights, *momenta]
    before = [tensor.clone() for tensor in tensors]
    with precision.autocast():
        optimizer.step()
    changes = [(now - then).double().flatten() for now, then in zip(tensors, before, strict=True)]
    # Named like gradients, for their tolerance: rounding changes an update as much as a gradient.
    found = {
        "gradient of weights by an update": torch.cat(changes[: len(weights)]),
        "gradient of momenta by an update": torch.cat(changes[len(weights) :]),
    }
    for now, then in zip(tensors, before, strict=True):
        now.copy_(then)
    return found


def try_to_compile(what: str, eager: Any, check: Callable[[Callable], None], team: Team) -> Any:
    """Return `eager` compiled, after `check` has called it. If that fails on a process, warn and return `eager`."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a missing GPU
    if "TORCH_LOGS" not in os.environ:  # set by users who want more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    torch._dynamo.config.recompile_limit = 64  # a stage has four graphs; the default limit is 8
    # Otherwise torch 2.10 uses another stage's graph, with gradients of frozen parameters or without needed ones.
    torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
    marks: set[bool] = set()

    def compiled(*inputs: Tensor) -> Any:
        results, mark = marked(*inputs)
        marks.add(mark)
        return results

    failure = ""
    try:
        marked = torch.compile(lambda *inputs: (eager(*inputs), torch.compiler.is_compiling()), dynamic=False)
        # The first process of a machine fills the cache for the others. By default torch would fall back silently.
        with team.after_first_here(f"compiling {what}"), torch._dynamo.config.patch(suppress_errors=False):
            check(compiled)
        if marks != {True}:
            failure = "torch compiled nothing: is TORCH_COMPILE_DISABLE set?"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises nearly anything
        causes = re.findall(".*(?:error:|cannot find|undefined reference).*", str(error))  # in a compiler's output
        failure = ": ".join(dict.fromkeys([first_line(error), *causes[:1]]))
    failure = team.first_failure(f"compiled {what}", failure)
    if failure:
        team.warn(f"not compiled ({failure}): {what} continues uncompiled; --no_compile skips the attempt")
        return eager
    return compiled


def check_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    """Raise ArithmeticError if a tensor is missing, or its relative difference from the expected one is too large."""
    for name, value in expected.items():
        if name not in found:
            raise ArithmeticError(f"the compiled pass has no {name}")
        if not value.isfinite().all():
            raise ArithmeticError(f"the uncompiled {name} is not finite")
        off = torch.dist(found[name].double(), value.double()) / value.double().norm()
        if not off <= (GRADIENTS if name.startswith("gradient") else VALUES)[precision]:
            raise ArithmeticError(f"the compiled {name} is {100 * off:.3g}% off")


# ---- CUDA graphs


class CudaGraphs:
    """Replay the graph of a step's kind: the host launches one graph instead of many kernels.

    A graph reads and writes the memory of its capture, so images, weights, momenta, learning rates and sums stay in
    place. Each batch is copied into the captured batch.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # shared: no graph reads memory that another leaves

    def warm_up(self, step: Callable, batch: Tensor, *stage: Any) -> None:
        """Take a few steps on the stream of the capture, as torch requires."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                step(batch, *stage)
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, step: Callable, batch: Tensor, *stage: Any) -> None:
        static = batch.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool, self.stream):
            step(static, *stage)
        self.graphs[batch.shape, *stage] = graph, static

    def reset(self) -> None:
        """Free the graphs. Otherwise a captured collective makes the end of the process group wait forever."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def __call__(self, batch: Tensor, *stage: Any) -> None:
        graph, static = self.graphs[batch.shape, *stage]
        static.copy_(batch)
        graph.replay()


def graph(
    step: Function, examples: Iterable[tuple], set_stage: Callable[..., None], team: Team, enabled: bool = True
) -> Function | CudaGraphs:
    """Return CUDA graphs of `step(batch, *stage)` for each kind of step. On a CPU or if not `enabled`, return `step`.

    If a capture fails in a single process, warn and return `step`. With several processes, raise ConfigError, because
    the others have captured collectives. Peak memory is counted from this call on.
    """
    if not team.on_gpu:
        return step
    torch.cuda.reset_peak_memory_stats(team.device)  # before the capture: a replay allocates nothing
    # NCCL has no timeout inside a graph: if a machine is lost, processes on the others would wait forever.
    if not (enabled and on_one_machine()):
        return step
    graphs = CudaGraphs()
    for number, (batch, *stage) in enumerate(examples):
        set_stage(*stage)
        graphs.warm_up(step, batch, *stage)  # raises the errors that training would raise
        error = ""
        try:
            graphs.capture(step, batch, *stage)
        except RuntimeError as reason:
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own stream active
            error = first_line(reason)
        error = team.first_failure(f"graph {number}", error)
        if error:
            graphs.reset()
            if team.world_size > 1:
                raise ConfigError(f"no CUDA graphs ({error}): start again with --no_graph")
            team.warn(f"no CUDA graphs ({error}): training continues without; --no_graph skips the attempt")
            return step
    return graphs


# ---- Evaluation


@contextlib.contextmanager
def evaluating(network: nn.Module, precision: Precision, team: Team) -> Iterator[None]:
    """Run the body in evaluation mode, with rank 0's buffers: the running statistics of worker 0."""
    network.eval()
    team.broadcast(*network.buffers())
    try:
        with out_of_memory_hint("evaluation"), torch.no_grad(), precision.autocast():
            yield
    finally:
        network.train()


AT_ONCE = 1000  # images evaluated at once: on a CPU, or per 4 GiB of a GPU. Each takes up to 1.6 MiB in fp32


def evaluation_chunks(count: int, device: torch.device) -> list[int]:
    """Return the number of images in each chunk of an evaluation. Most memory remains free for training."""
    gib = torch.cuda.get_device_properties(device).total_memory >> 30 if device.type == "cuda" else 4
    most = AT_ONCE * max(1, gib) // 4
    return [min(most, count - start) for start in range(0, count, most)]


def predict(network: nn.Module, images: Tensor) -> Tensor:
    """Return logits of at least float32."""
    return at_least_float32(network(images))


def chunks(images: Tensor) -> Iterator[Tensor]:
    """Yield images [n, 32, 32, 3] as chunks [B, 3, 32, 32], channels last, that a device evaluates at once."""
    for chunk in images.split(evaluation_chunks(len(images), images.device)):
        yield chunk.permute(0, 3, 1, 2)
