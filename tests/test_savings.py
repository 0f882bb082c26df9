"""What LARGE_BATCH_SAVINGS changes: rounding, and the code that the compiler makes."""

import re

import pytest
import torch
from conftest import python

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import savings

ALL = {"LARGE_BATCH_SAVINGS": "passes,launches,erf"}
BLOCK = """
import re
import torch
from torch._inductor.utils import run_and_get_code
from large_batch_cifar_10_fast.core import fast, layers
from large_batch_cifar_10_fast.core.team import Team

def step(x):
    return torch.nn.functional.gelu(norm(pool(x))).square().sum()

team = Team(0, 1, torch.device("cpu"), 1)
pool = layers.MaxPool(2)
for dtype in (torch.bfloat16, torch.float64):
    torch.manual_seed(0)
    norm = layers.GhostBatchNorm(8).to(torch.promote_types(dtype, torch.float32))
    x = torch.randn(64, 8, 6, 6, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    _, code = run_and_get_code(lambda: fast.try_to_compile("a step", step, lambda f: f(x).backward(), team))
    torch.save(x.grad, f"{dtype}.pt")
    print("erf", sum(len(re.findall("[^_]erf[(]", source)) for source in code))
"""


def compiled(folder, **variables) -> list[tuple[int, torch.Tensor]]:
    """Return, in bf16 and in float64, how many erf the code of a block has, and the gradient of its input."""
    folder.mkdir()
    result = python("-c", BLOCK, cwd=folder, **variables)
    assert "Warning" not in result.stderr, result.stderr
    erfs = re.findall(r"erf (\d+)", result.stdout)
    gradients = [torch.load(folder / f"torch.{name}.pt", weights_only=True) for name in ("bfloat16", "float64")]
    return list(zip(map(int, erfs), gradients, strict=True))


@pytest.mark.slow
def test_savings_change_rounding_only(tmp_path):
    (erfs, gradient), (_, exact) = compiled(tmp_path / "before")
    (erfs_after, gradient_after), (_, exact_after) = compiled(tmp_path / "after", **ALL)
    assert erfs > erfs_after == 0
    assert 0 < torch.dist(gradient_after.float(), gradient.float()) < 0.01 * gradient.float().norm()
    assert torch.dist(exact_after, exact) < 1e-12 * exact.norm()


def test_an_unknown_saving_is_refused(monkeypatch):
    monkeypatch.setenv("LARGE_BATCH_SAVINGS", "passes,all")
    with pytest.raises(ConfigError, match="LARGE_BATCH_SAVINGS has all: there are erf, launches, passes"):
        savings.set_compiler()
