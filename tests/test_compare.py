"""Verdicts of comparisons, what forbids them, and their statistics."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_results import write_runs

from large_batch_cifar_10_fast.commands import compare as command
from large_batch_cifar_10_fast.lab.report import compare
from large_batch_cifar_10_fast.lab.results import read_results
from large_batch_cifar_10_fast.lab.statistics import compare_means, wilson

COUNTS = 10 * [9400, 9410]


@pytest.fixture
def compared(capsys):
    """Return a function that runs the command: it returns the status and the text."""

    def run(*arguments) -> tuple[int, str]:
        status = command.main([*map(str, arguments)])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a log of a name, and reads it."""
    return lambda name, counts=COUNTS, **fields: read_results(write_runs(tmp_path / name, counts, **fields))


def test_published_runs_are_equivalent_to_themselves(compared):
    status, text = compared("published", "published")
    assert status == 0
    assert "94.186 ± 0.185  +0.000      [-0.097, +0.097]  1  equivalent" in text


def test_each_verdict_has_its_status(tmp_path, compared):
    reference = write_runs(tmp_path / "ref", 8 * [9400, 9410, 9420], seed=100)
    for counts, word, expected in (
        ([9370, 9380, 9390], "worse", 1),
        ([9430, 9440, 9450], "better", 0),
        ([9400, 9410, 9420], "equivalent", 0),
        ([9380, 9400, 9420], "no difference shown", 0),
    ):
        status, text = compared(write_runs(tmp_path / "mine", 8 * counts), reference)
        line = text.partition("accuracy, %")[2].splitlines()[1]
        assert (status, line.endswith(f"  {word}")) == (expected, True)


def test_two_sides_have_intervals_that_hold_together(written):
    counts = {"a": [9420, 9430, 9450], "b": [9300, 9330, 9310], "c": [9400, 9410, 9420]}
    found = compare({name: written(name, counts[name], seed=10 * i) for i, name in enumerate(counts)}, "c").verdicts
    for name in ("a", "b"):
        test = stats.ttest_ind(np.array(counts[name]) / 100, [94, 94.1, 94.2], equal_var=False)
        interval = test.confidence_interval(1 - 0.01 / 2)
        assert (found[name].found.low, found[name].found.high) == pytest.approx((*interval,))
        assert found[name].found.p == pytest.approx(2 * test.pvalue)


def test_the_reference_is_the_last_campaign(tmp_path, compared):
    """Of an asterisk, each campaign of the table is one."""
    a, b = (write_runs(tmp_path / name, COUNTS, name) for name in "ab")
    (tmp_path / "both").write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text().partition("\n")[2])
    assert compared(f"{tmp_path}/both:*") == compared(a, b)
    assert re.search(r"\nb .* reference\n", compared(a, b)[1])


def test_conditions_that_differ_are_listed(tmp_path, compared):
    """A run of another width does not look like a reproduction. An option that only one program has is no alarm."""
    options = {"hyp.width": 8, "hyp.batch_size": 256, "hyp.lr_scaler": 1.5, "hyp.decay": 0.95}
    text = compared(write_runs(tmp_path / "a", COUNTS, recipe="apple2019", **options), "published")[1]
    lines = [re.split("  +", line) for line in text.partition("\n\n")[0].splitlines()]
    assert ["--width", "8", "64"] in lines
    assert ["recipe", "apple2019", "apple2019"] in lines
    assert ["images", "unknown", "CIFAR-10"] in lines
    assert not {"--decay", "--batch_size"} & {line[0] for line in lines}
    assert lines[-1][0] == "seconds"
    assert "seconds" not in compared(write_runs(tmp_path / "b", COUNTS, device="CPU"), "published")[1], "of a GPU"


def test_a_report_is_a_document_in_markdown(tmp_path, compared):
    a, b = (write_runs(tmp_path / name, COUNTS) for name in "ab")
    text = compared(a, b, "--markdown")[1]
    assert len(re.findall(r"(?m)^\| --- ", text)) == 2
    assert re.search(r"(?m)^\| accuracy, % \| n \| mean ± std \|", text)


# ---- One's own table


def test_a_table_alone_is_shown(tmp_path, compared):
    table = write_runs(tmp_path / "a", [9400, 9410, 9390], campaign="night")
    for source in (table, f"{table}:night"):
        status, text = compared(source)
        assert status == 0
        assert [re.split("  +", line) for line in text.splitlines()] == [
            ["campaign", "runs", "accuracy, %"],
            ["night", "3", "94.000 ± 0.100"],
        ]


# ---- What forbids a verdict


def test_diverged_runs_forbid_all_verdicts(written):
    """The other runs are no fair sample."""
    bad = written("bad", table={"train_loss": ["nan", *19 * ["0.9"]]})
    good = written("good")
    assert (len(bad.runs), bad.diverged) == (19, 1)
    for mine, reference in ((bad, good), (good, bad)):
        found = compare({"mine": mine, "ref": reference}, "ref")
        assert found.verdicts["mine"].word == "-"
        assert f"mine: not compared: runs of {bad.name} diverged (1).\n" in found.text


# ---- Statistics


def test_welch_and_wilson_are_the_textbooks():
    a = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4])
    b = np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4])
    va, vb = a.var(ddof=1) / 15, b.var(ddof=1) / 15
    error, freedom = math.sqrt(va + vb), (va + vb) ** 2 / (va**2 / 14 + vb**2 / 14)
    assert freedom == pytest.approx(24.99, abs=0.01)  # published
    found = compare_means(pd.Series(a), pd.Series(b, index=range(15, 30)))  # by seed
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.995, freedom) * error)
    assert found.p == pytest.approx(0.021, abs=5e-4)
    freedom = found.runs - 1
    shift = 0.5 / math.sqrt(15 * (va + vb) / found.runs)
    assert stats.nct.sf(stats.t.ppf(0.995, freedom), freedom, shift) == pytest.approx(0.8, abs=0.01)
    z = stats.norm.ppf(0.995)
    low, high = wilson(81, 263)
    for share in (low, high):  # where the score test just keeps the observed share
        assert abs(81 / 263 - share) / math.sqrt(share * (1 - share) / 263) == pytest.approx(z)
    assert low < 81 / 263 < high


@pytest.mark.parametrize("counts", [[11, 12, 13], [10, 11, 12]])
def test_without_a_spread_there_is_no_verdict(written, counts):
    """Three runs on 20 images often differ by the same number. A change without an effect does so, too."""
    reference = written("ref", [10, 11, 12], validation_images=20)
    found = compare({"mine": written("mine", counts, validation_images=20), "ref": reference}, "ref").verdicts["mine"]
    assert found.word == "-"
    assert found.why_not.startswith("a single run, or all differences are equal")


def test_a_single_value_and_equal_values_have_no_spread():
    """Float64 means of 5 and 7 values 94.21 differ."""
    values = pd.Series([94.0, 95.0, 96.0])
    assert compare_means(values[:1], values) is None
    assert compare_means(pd.Series([94.21] * 5), pd.Series([94.21] * 7, index=range(5, 12))) is None


def test_samples_of_the_same_seeds_are_compared_in_pairs():
    """Differences 1, 2, 3, 4 have mean 2.5 and standard error sqrt(5/3) / 2. A fifth run changes a mean alone."""
    b = pd.Series([100.0, -200, 300, 50], index=[7, 8, 9, 10])
    a = b + np.arange(1, 5)
    for reference in (b, b[::-1], pd.concat([b, pd.Series([1e6], index=[3])])):
        found = compare_means(a, reference)
        assert (found.difference, found.low + found.high) == pytest.approx((2.5, 5))
        assert found.p == pytest.approx(2 * stats.t.sf(2.5 / (math.sqrt(5 / 3) / 2), 3))
    assert len(compare_means(a, b.set_axis([9, 10, 11, 12])).sample) == 2
    assert len(compare_means(a, b.set_axis([10, 11, 12, 13])).sample) == 4, "one pair has no spread"
