"""torch.compile with a check: compiled code trains only if it computes what the plain code computes."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import first_line
from .optim import set_rate
from .precision import Precision
from .printing import warn
from .team import Team

Function = TypeVar("Function", bound=Callable)

# Largest allowed error of compiled gradients, relative to their norm. Different rounding reached 0.44 in bf16, 0.22 in
# fp16 and 0.003 in fp32. A gradient that is missing, doubled or has the wrong sign is off by 1 or more.
GRADIENTS = {"fp64": 1e-5, "fp32": 0.02, "tf32": 0.2, "fp16": 0.5, "bf16": 0.7}
# The same for losses, metrics, norm statistics and logits. Rounding reached 0.002 in bf16, 4e-6 in fp32.
VALUES = {"fp64": 1e-6, "fp32": 0.002, "tf32": 0.02, "fp16": 0.02, "bf16": 0.02}


def compile_checked(
    what: str,
    plain: Function,
    results: Callable[..., dict[str, Tensor]],
    examples: Sequence[tuple],
    precision: str,
    team: Team,
) -> Function:
    """Return a function compiled. If that fails on a process, or changes the results, warn and return `plain`.

    `results(function, *example)` calls it, and returns tensors by name. They are compared for each kind of step,
    because a compiler can be wrong without an error: torch 2.11.0 gave zero gradients to all layers before a former
    norm of ours (notebook/cpu_speed.md).
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a missing GPU
    if "TORCH_LOGS" not in os.environ:  # set by users who want more than our one line
        logging.getLogger("torch._inductor").setLevel(logging.CRITICAL + 1)
    torch._dynamo.config.recompile_limit = 64  # versions of a function; each kind of step is one; the default is 8
    function: Any = torch.compile(lambda *inputs: plain(*inputs), dynamic=False)
    failure = ""
    try:
        for example in examples:
            expected = results(plain, *example)
            with torch._dynamo.config.patch(suppress_errors=False):  # by default torch would fall back silently
                check_all_close(results(function, *example), expected, precision)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises nearly anything
        causes = re.findall(".*(?:error:|cannot find|undefined reference).*", str(error))  # in a compiler's output
        failure = ": ".join(dict.fromkeys([first_line(error), *causes[:1]]))
    failure = team.first_failure(f"compiled {what}", failure)
    if failure:
        warn(f"not compiled ({failure}): {what} continues uncompiled; --no_compile skips the attempt")
        return plain
    return function


def check_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    """Raise ArithmeticError if a tensor is missing, or its relative difference from the expected one is too large."""
    for name, value in expected.items():
        if name not in found:
            raise ArithmeticError(f"the compiled pass has no {name}")
        if not value.isfinite().all():
            raise ArithmeticError(f"the uncompiled {name} is not finite")
        off = torch.dist(found[name].double(), value.double()) / value.double().norm().clamp_min(1e-300)
        if not off <= (GRADIENTS if name.startswith("gradient") else VALUES)[precision]:
            raise ArithmeticError(f"the compiled {name} is {100 * off:.3g}% off")


def results_of_pass(network: nn.Module, forward: Callable, *inputs: Any) -> dict[str, Tensor]:
    """Return the results of a forward pass and the gradients of its loss, by name.

    `forward(*inputs)` returns a NamedTuple of tensors and lists of tensors, with the `loss` to differentiate.
    """
    network.zero_grad()
    made = forward(*inputs)
    made.loss.backward()
    results = {f"gradient of {name}": w.grad for name, w in network.named_parameters() if w.grad is not None}
    for name, value in made._asdict().items():
        parts = {name: value} if isinstance(value, Tensor) else {f"{name} {i}": part for i, part in enumerate(value)}
        results |= {part: tensor.detach() for part, tensor in parts.items()}
    network.zero_grad()
    return results


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
    for now, then in zip(tensors, before, strict=True):
        now.copy_(then)
    # Named like gradients, for their tolerance: rounding changes an update as much as a gradient.
    return {
        "gradient of weights by an update": torch.cat(changes[: len(weights)]),
        "gradient of momenta by an update": torch.cat(changes[len(weights) :]),
    }
