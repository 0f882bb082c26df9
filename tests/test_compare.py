"""Verdicts and statuses of comparisons, and their statistics."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from conftest import REPO
from scipy import stats
from test_results import write_runs

from large_batch_cifar_10_fast.lab import compare, plot
from large_batch_cifar_10_fast.lab.program import PROGRAMS
from large_batch_cifar_10_fast.lab.results import compare_means, read_log, verdict, wilson


@pytest.fixture
def compared(capsys):
    """Return a function that runs the command: it returns the status, and lines by their first word."""

    def run(*arguments) -> tuple[int, dict[str, str]]:
        status = compare.main([*map(str, arguments)])
        lines = capsys.readouterr().out.splitlines()
        return status, {line.strip().partition(" ")[0].rstrip(":,"): line for line in lines}

    return run


def test_published_is_equivalent_to_itself(compared):
    status, lines = compared("published", "published")
    assert (status, lines["Time"][:37]) == (0, "Time: equivalent within 0.394 seconds")
    assert lines["Accuracy"].startswith("Accuracy: equivalent within 0.1 points: +0.000 points")
    assert re.search(r"94.186 ± 0.185, n = 50 .* \[-0.097, \+0.097\]", lines["accuracy"])
    assert "41 of 50, [65%, 92%]" in lines["runs"]


@pytest.mark.parametrize(
    ("counts", "found", "status"),
    [
        ([9370, 9380, 9390], "mine is worse", 1),
        ([9430, 9440, 9450], "mine is better", 0),
        ([9400, 9410, 9420], "equivalent within 0.1 points", 0),
        ([9380, 9400, 9420], "no difference shown", 0),
    ],
)
def test_each_verdict_on_accuracy(tmp_path, compared, counts, found, status):
    reference = write_runs(tmp_path / "ref", 8 * [9400, 9410, 9420], seed=100)
    result, lines = compared(write_runs(tmp_path / "mine", 8 * counts), reference)
    assert (result, lines["Accuracy"].startswith(f"Accuracy: {found}: ")) == (status, True)


def test_slower_is_worse(tmp_path, compared):
    fast = write_runs(tmp_path / "fast", [9400] * 20)
    slow = write_runs(tmp_path / "slow", [9400] * 20, table={"seconds": 9 + np.arange(20)})
    status, lines = compared(slow, fast)
    assert (status, lines["Time"][:34]) == (1, "Time: mine is worse: +4.000 second")
    assert compared(fast, slow)[0] == 0


@pytest.mark.parametrize(
    ("share", "fields", "line"),
    [
        (1.86, {}, "Time: equivalent"),
        (1.6, {}, "Time: not compared: 1.60 (mine) and 1.90 (reference) CPU seconds a second: the machine was busy"),
        (1.9, {"device": "H200"}, "Time: not compared: device H200 (mine) and CPU (reference)."),
        (1.9, {"processes": 2}, "Time: not compared: processes 2 (mine) and 1 (reference)."),
        (1.9, {"train_loss": "nan"}, "Time: not compared: all runs of a side diverged."),
        (1.9, {"options": "epochs=8 label_smoothing=0.1"}, "Loss: not compared: label_smoothing (0.1, not 0.2)."),
        (1.9, {"code": "b"}, "code (b, not a): the program or core/ was changed"),
        (1.9, {"digest": "b"}, "Images may differ: these intervals are of chance over runs, not of"),
    ],
)
def test_differences_are_named_and_not_compared(tmp_path, compared, share, fields, line):
    """1.9 CPU seconds a second are two threads' share; muon's label smoothing is 0.2."""
    mine, reference = ({"cpu_seconds": factor * (5 + np.arange(20))} for factor in (share, 1.9))
    made = {"device": "CPU", "code": "a", "digest": "a"}
    reference = write_runs(tmp_path / "ref", 10 * [9400, 9410], table=reference, **made)
    lines = compared(write_runs(tmp_path / "mine", 10 * [9400, 9410], table=mine, **made | fields), reference)[1]
    assert lines[line.split()[0].rstrip(":")].strip().startswith(line)
    assert lines["the"].endswith("unknown images, precision")
    assert ("Images" in lines) == ("digest" in fields)


def test_only_apple2019_on_cifar_10_has_a_reference_by_default(tmp_path, compared, error_line):
    mine, *others = (
        write_runs(tmp_path / f"{recipe}{images}", [9400], recipe=recipe, images=images)
        for recipe, images in (("apple2019", "CIFAR-10"), ("muon", "CIFAR-10"), ("apple2019", "synthetic"))
    )
    assert "94.186" in compared(mine)[1]["accuracy"]
    for other in (*others, "published"):
        assert f"{other} needs a REFERENCE" in error_line(compare.main, [other])


def test_what_cannot_be_read_is_one_line(tmp_path, error_line):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG\r\n\xff\n,\0")
    for path in (picture, tmp_path, "absent/*.tsv"):
        assert str(path) in error_line(compare.main, [str(path), "published"])
    mine = write_runs(tmp_path / "mine", [9400])
    assert "no campaign c, only b" in error_line(compare.main, [f"{mine}:c", "published"])


def test_welch_and_wilson_are_the_textbooks():
    a = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4])
    b = np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4])
    va, vb = a.var(ddof=1) / 15, b.var(ddof=1) / 15
    error, freedom = math.sqrt(va + vb), (va + vb) ** 2 / (va**2 / 14 + vb**2 / 14)
    assert freedom == pytest.approx(24.99, abs=0.01)  # published
    a, b = pd.Series(a), pd.Series(b, index=range(15, 30))  # by seed
    found = compare_means(a, b)
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.995, freedom) * error)
    assert found.p == pytest.approx(0.021, abs=5e-4)
    power = stats.nct.sf(stats.t.ppf(1 - 0.01 / 2, freedom), freedom, found.detectable / error)
    assert power == pytest.approx(0.8, abs=0.01)
    assert compare_means(a[:1], b) is None
    z = stats.norm.ppf(0.995)
    low, high = wilson(81, 263)
    for share in (low, high):  # where the score test just keeps the observed share
        assert abs(81 / 263 - share) / math.sqrt(share * (1 - share) / 263) == pytest.approx(z)
    assert low < 81 / 263 < high


@pytest.mark.parametrize("count", [5, 7])
def test_samples_without_variance_differ_surely_or_not_at_all(count):
    """As pairs, too. The float64 means of 5 and of 7 values 94.21 differ."""
    a, b = pd.Series([94.21] * 5), pd.Series([94.21] * count, index=range(2 * (count == 7), 2 * (count == 7) + count))
    found = compare_means(a, b)
    assert (found.p, verdict(found, True, margin=0.1)) == (1, "equivalent")
    found = compare_means(a, b + 0.5)
    assert found.p < 1e-9
    assert [verdict(found, more_is_better, margin=0.1) for more_is_better in (True, False)] == ["worse", "better"]


def test_samples_of_the_same_seeds_are_compared_in_pairs():
    """Differences 1, 2, 3, 4 have mean 2.5 and standard error sqrt(5/3) / 2."""
    b = pd.Series([100.0, -200, 300, 50], index=[7, 8, 9, 10])
    a = b + np.arange(1, 5)
    for reference in (b, b[::-1]):
        found = compare_means(a, reference)
        assert found.low + found.high == pytest.approx(5)
        assert found.p == pytest.approx(2 * stats.t.sf(2.5 / (math.sqrt(5 / 3) / 2), 3))
        assert found.pairs == 4
    assert compare_means(a, b.set_axis([9, 10, 11, 12])).pairs == 2
    assert compare_means(a, b.set_axis([10, 11, 12, 13])).pairs == 0, "one pair has no spread, and few are not the runs"


def test_pairs_are_formed_over_common_seeds():
    """A fifth run of one side changes its mean, and not the difference."""
    b = pd.Series([100.0, -200, 300, 50], index=[7, 8, 9, 10])
    a = b + np.arange(1, 5)
    assert compare_means(pd.concat([a, pd.Series([1e6], index=[3])]), b) == compare_means(a, b)


@pytest.mark.parametrize("tests", [1, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_a_verdict_agrees_with_its_interval_and_its_p(tests, paired):
    draws = np.random.default_rng(tests)
    words = set()
    for shift in np.linspace(0, 4, 60):
        a = pd.Series(draws.normal(shift, 1, 6))
        b = pd.Series(draws.normal(0, 1, 6), index=a.index if paired else a.index + 6)
        found = compare_means(a, b, tests)
        word = verdict(found, True, margin=1e-9)
        words.add(word)
        assert bool(found.pairs) == paired
        assert (word != "no difference shown") == (found.p < 0.01) == (not found.low <= 0 <= found.high)
    assert words == {"better", "no difference shown"}


@pytest.mark.slow
def test_compare_and_plot_read_every_log(compared):
    paths = [path for path in (REPO / "logs").rglob("*") if path.name in ("runs.tsv", "run_log.txt", "timing_log.tsv")]
    assert len(paths) > 40
    for path in paths:
        assert compared(path, path)[0] == 0
        log = read_log(str(path))
        table = plot.table_of(log, "", "")
        assert table["final"].dropna().tolist() == (100 * log.runs["accuracy"]).tolist()
        assert (table["work"].max() > 0) == (log.conditions.get("recipe") in PROGRAMS)
