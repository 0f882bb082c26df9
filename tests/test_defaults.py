"""Whether to compile, and in which precision a CPU computes, unless it was given: by the length of the runs."""

import pytest
import torch

from large_batch_cifar_10_fast import checks
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.options import RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

CPU = DistContext(0, 1, torch.device("cpu"), 8)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the cores, the seconds of a run on one of them, and whether bf16 is faster."""

    def is_one(cores: int, seconds: float, bf16: bool = False) -> None:
        monkeypatch.setattr(checks, "work", lambda recipe, images: seconds * checks.CORE)
        monkeypatch.setattr(checks, "count_cores", lambda: cores)
        monkeypatch.setattr(checks, "gains_by_bf16", lambda: bf16)

    return is_one


@pytest.mark.parametrize(
    ("seconds", "options", "compiles"),
    [
        (700, {}, True),
        (500, {}, False),
        (250, {"runs": 3, "share": "2/3"}, True),
        (700, {"no_compile": True}, False),
        (1, {"compile": True}, True),
    ],
)
def test_a_campaign_of_ten_minutes_or_more_compiles_all_shares_alike(machine, seconds, options, compiles):
    machine(1, seconds)
    assert checks.resolve_defaults(RunConfig(**options), Apple2019(), CPU, 50_000).compile is compiles


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize(
    ("seconds", "bf16", "given", "precision", "hours"),
    [
        (700, True, "", "bf16", 3.5),
        (700, True, "fp32", "fp32", 7),
        (700, False, "", "fp32", 7),
        (500, True, "", "fp32", 5),
    ],
)
def test_bf16_is_for_long_runs_whatever_the_number_of_cores(
    machine, capsys, cores, seconds, bf16, given, precision, hours
):
    """The seed decides a run, so neither cores nor runs may change the precision."""
    machine(cores, seconds, bf16)
    config = RunConfig(runs=36, precision=given)
    assert checks.resolve_defaults(config, Apple2019(), CPU, 50_000).precision == precision
    assert f"this takes about {hours / cores:.1f} hours" in capsys.readouterr().err


def test_bf16_is_for_all_processes_or_none(machine, monkeypatch):
    machine(1, 700, bf16=True)
    monkeypatch.setattr(DistContext, "all_gather_words", lambda ctx, subject, word: [word, "False"])
    assert checks.precision_on(CPU, "", Apple2019(), 50_000) == "fp32"
