"""Intervals, tests and the runs they need, against textbooks and SciPy called directly."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from large_batch_cifar_10_fast import stats as ours


def test_welch_interval_is_the_textbooks():
    a = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4])
    b = np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4])
    va, vb = a.var(ddof=1) / 15, b.var(ddof=1) / 15
    freedom = (va + vb) ** 2 / (va**2 / 14 + vb**2 / 14)
    assert freedom == pytest.approx(24.99, abs=0.01)  # published with this example
    half = stats.t.ppf(0.975, freedom) * math.sqrt(va + vb)
    expected = a.mean() - b.mean() - half, a.mean() - b.mean() + half
    assert ours.welch_interval(a, b) == pytest.approx(expected)
    assert ours.welch_interval(a[:1], b) is None
    assert ours.welch_interval(np.ones(3), np.ones(2)) == (0, 0)


def test_two_one_sided_tests_are_scipys():
    random = np.random.default_rng(0)
    for spread in (0.1, 0.2, 0.3, 0.5):
        a, b = random.normal(94.15, spread, 30), random.normal(94.2, spread, 40)
        p = max(
            stats.ttest_ind(a + 0.1, b, equal_var=False, alternative="greater").pvalue,
            stats.ttest_ind(a - 0.1, b, equal_var=False, alternative="less").pvalue,
        )
        verdict = ours.judge(a, b, 0.1, "Accuracy", str, more_is_better=True).verdict
        assert (verdict == "equivalent") == (p < 0.05)


def test_wilson_and_newcombe_are_the_textbooks():
    # Newcombe (1998), Statistics in Medicine 17: 81 of 263, and 56/70 against 48/80.
    assert ours.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert ours.newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_resampled_interval_is_scipys_and_needs_five_runs():
    random = np.random.default_rng(5)
    a, b = random.normal(5, 1, 100), random.normal(4, 1, 50)
    between = lambda x, y: np.median(x) / np.median(y)  # noqa: E731
    how = {"vectorized": False, "n_resamples": 5000, "method": "percentile", "rng": np.random.default_rng(0)}
    expected = stats.bootstrap((a, b), between, **how).confidence_interval
    assert ours.resampled_interval(a, b, between) == (expected.low, expected.high)
    assert ours.resampled_interval(a[:4], b, between) is None


def test_runs_needed_gives_the_power_it_promises():
    needed = ours.runs_needed(spread=0.16, margin=0.10)
    assert needed == 44  # 2 (0.16 (1.645 + 1.282) / 0.10)^2 = 43.9
    random = np.random.default_rng(2)
    pairs = random.normal(0, 0.16, (300, 2, needed))
    hits = sum(ours.judge(a, b, 0.1, "", str, more_is_better=True).verdict == "equivalent" for a, b in pairs)
    assert 0.7 < hits / 300 < 0.9


def test_the_mean_at_94_percent_is_students_one_sided_test():
    """By the tables: of five runs (four degrees of freedom) t is above 3.747 with p = 0.01, above 2.132 with 0.05."""
    scattered = np.array([-1.0, -0.5, 0.0, 0.5, 1.0]) / 0.625**0.5
    for t, verdict, p in ((3.80, "significant", "0.0096"), (3.70, "open", "0.01"), (2.132, "open", "0.05")):
        conclusion = ours.judge_goal(94.0 + 0.15 * (scattered + t / 5**0.5), 94.0)
        assert conclusion.verdict == verdict
        assert re.search(rf"std 0.150, n = 5, one-sided t-test p = {p}[;.]", conclusion.text)
    below = 94.0 + 0.15 * (scattered - 0.5)
    assert [ours.judge_goal(runs, 94.0).verdict for runs in (below, below[:1])] == ["open", "open"]


def test_the_runs_it_would_take_show_the_mean_in_four_of_five_cases():
    few = 94.03 + 0.15 * np.array([-1.3, 0.2, 1.1]) / np.std([-1.3, 0.2, 1.1], ddof=1)
    told = ours.judge_goal(few, 94.0).text
    runs = int(told.split("about ")[1].split()[0])
    assert runs == 251  # (0.15 (2.326 + 0.842) / 0.03)^2 = 250.9
    random = np.random.default_rng(4)
    shown = sum(ours.judge_goal(random.normal(94.03, 0.15, runs), 94.0).verdict == "significant" for _ in range(300))
    assert 0.72 < shown / 300 < 0.88
