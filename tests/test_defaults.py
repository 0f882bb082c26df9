"""Whether to compile, and in which precision a CPU computes, unless it was given: by the length of the runs."""

import pytest
import torch

from large_batch_cifar_10_fast import checks
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.options import RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019


@pytest.fixture
def defaults(monkeypatch):
    """Return a function of a machine and options: cores, seconds of a run on one of them, whether bf16 is faster."""

    def resolve(cores: int, seconds: float, bf16: bool, **options: object) -> RunConfig:
        monkeypatch.setattr(checks, "run_flop", lambda recipe, images: seconds * checks.CORE)
        monkeypatch.setattr(checks, "count_cores", lambda: cores)
        monkeypatch.setattr(checks, "gains_by_bf16", lambda: bf16)
        return checks.resolve_defaults(
            RunConfig(**options), Apple2019(), DistContext(0, 1, torch.device("cpu"), 8), 50_000
        )

    return resolve


@pytest.mark.parametrize(
    ("seconds", "options", "compiles"),
    [(700, {}, True), (500, {}, False), (250, {"runs": 3, "share": "2/3"}, True), (1, {"compile": True}, True)],
)
def test_a_campaign_of_ten_minutes_or_more_compiles_all_shares_alike(defaults, seconds, options, compiles):
    assert defaults(1, seconds, False, **options).compile is compiles


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
def test_bf16_is_for_long_runs_on_any_number_of_cores(defaults, capsys, cores, seconds, bf16, given, precision, hours):
    """The seed decides a run, so neither cores nor runs may change the precision."""
    assert defaults(cores, seconds, bf16, runs=36, precision=given).precision == precision
    assert f"this takes about {hours / cores:.1f} hours" in capsys.readouterr().err
