"""Ways to a faster compiled step that no GPU has judged yet.

    LARGE_BATCH_SAVINGS=passes,launches,erf bash train_cifar_parallel.sh     # all of them; by default none

* `passes`: the backward pass of a norm and its activation reads the gradient twice and stores nothing in between.
* `launches`: small kernels that do not depend on each other are launched as one.
* `erf`: GELU and its gradient take an exponential for the error function.

They change results by rounding only. docs/performance.md#launches-counted has the launches and bytes that they save.
"""

import os
from typing import Any

import torch

from .. import ConfigError

VARIABLE = "LARGE_BATCH_SAVINGS"
NAMES = {"passes", "launches", "erf"}


def set_compiler() -> None:
    """Let torch's compiler make the savings that the environment variable names. Raise ConfigError for others."""
    chosen = set(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := sorted(chosen - NAMES):
        raise ConfigError(f"{VARIABLE} has {', '.join(unknown)}: there are {', '.join(sorted(NAMES))}")
    if "passes" in chosen:
        # The compiler stores a value that takes many operations or reads and is used twice. The gradient of an
        # activation is computed again in less time.
        torch._inductor.config.realize_opcount_threshold = 200
        torch._inductor.config.realize_reads_threshold = 30
        torch._inductor.config.realize_acc_reads_threshold = 30
    if "launches" in chosen:
        torch._inductor.config.combo_kernels = True
    if "erf" in chosen:
        replace_erf()
        torch._inductor.config.fx_graph_cache = False  # whose keys know nothing of this
        torch._functorch.config.enable_autograd_cache = False


def replace_erf() -> None:
    """Replace the compiler's code for erf, but in float64."""
    from torch._inductor import lowering  # not above: it is slow, and needs the compiler's folder

    erf = torch.ops.aten.erf.default
    accurate = lowering.lowerings[erf]
    by_exponential = lowering.make_pointwise(erf_by_exponential)

    def lower(x: Any) -> Any:
        return accurate(x) if x.get_dtype() == torch.float64 else by_exponential(x)

    lowering.lowerings[erf] = lower


def erf_by_exponential(x: Any) -> Any:
    """Return the error function of a float32 within 1.5e-7 (Abramowitz and Stegun, 7.1.26).

    With t = 1 / (1 + 0.3275911 |x|) it is sign(x) (1 - (a1 t + a2 t² + ... + a5 t⁵) exp(-x²)).
    """
    from torch._inductor.virtualized import ops

    size = ops.abs(x)
    t = number(1) / (number(1) + number(0.3275911) * size)
    polynomial = number(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = polynomial * t + number(coefficient)
    positive = number(1) - polynomial * t * ops.exp(number(0) - x * x)
    return ops.where(x < number(0), number(0) - positive, positive)


def number(value: float) -> Any:
    from torch._inductor.virtualized import ops

    return ops.constant(value, torch.float32)
