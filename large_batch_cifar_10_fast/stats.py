"""Draw conclusions from two samples of runs: confidence intervals, equivalence, and the number of runs needed."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

FEW = 5  # fewer runs are not resampled
SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Conclusion:
    """`verdict` is equivalent, better, worse or open, of the goal significant or open; `text` is a sentence."""

    verdict: str
    text: str


def finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def welch_interval(a: np.ndarray, b: np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return Welch's interval for mean(a) - mean(b); None if a side has one run."""
    if min(len(a), len(b)) < 2:
        return None
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return (a.mean() - b.mean(),) * 2
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nearly equal times
        return stats.ttest_ind(a, b, equal_var=False).confidence_interval(confidence)


def resampled_interval(a: np.ndarray, b: np.ndarray, statistic: Callable[..., float]) -> tuple[float, float] | None:
    """Return the 95% percentile bootstrap interval of a statistic of two samples; its draws are always the same."""
    if min(len(a), len(b)) < FEW:
        return None
    how = {"n_resamples": 5000, "method": "percentile", "rng": np.random.default_rng(0)}
    return stats.bootstrap((a, b), statistic, vectorized=False, **how).confidence_interval


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion."""
    return stats.binomtest(count, total).proportion_ci(method="wilson")


def newcombe(a: int, m: int, b: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of a/m - b/n from the two Wilson intervals (Newcombe 1998, method 10)."""
    p, q, (p_low, p_high), (q_low, q_high) = a / m, b / n, wilson(a, m), wilson(b, n)
    return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def runs_needed(spread: float, margin: float) -> int:
    """Return the runs per side for two one-sided 5% tests to find equal means equivalent with power 0.8."""
    return max(2, math.ceil(2 * (spread * (stats.norm.ppf(0.95) + stats.norm.ppf(0.90)) / margin) ** 2))


def judge_goal(accuracy: np.ndarray, goal: float) -> Conclusion:
    """Test whether the mean is above the goal (percent), or estimate the runs that would show it with power 0.8."""
    what = f"Mean at or above {goal:g}%"
    if len(accuracy) < 2:
        return Conclusion("open", f"{what}: not testable with one run.")
    mean, std = accuracy.mean(), accuracy.std(ddof=1)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # equal runs
        p = float(stats.ttest_1samp(accuracy, goal, alternative="greater").pvalue)
    test = f"mean {mean:.3f}%, std {std:.3f}, n = {len(accuracy)}, one-sided t-test p = {p:.2g}"
    if p < SIGNIFICANCE:
        return Conclusion("significant", f"{what}: significant; {test}.")
    if mean <= goal:
        return Conclusion("open", f"{what}: not significant; {test}; the mean is not above it.")
    quantiles = stats.norm.ppf(1 - SIGNIFICANCE) + stats.norm.ppf(0.80)
    runs = max(len(accuracy) + 1, math.ceil((std * quantiles / (mean - goal)) ** 2))
    return Conclusion("open", f"{what}: not significant; {test}; about {runs} runs would be needed.")


def judge(
    a: np.ndarray, b: np.ndarray, margin: float, what: str, form: Callable[[float], str], more_is_better: bool
) -> Conclusion:
    """Find two means equivalent within the margin (two one-sided tests, 5% each), else different, else open."""
    narrow, wide = welch_interval(a, b, 0.90), welch_interval(a, b, 0.95)
    if narrow is None:
        return Conclusion("open", f"{what}: too few runs: one run on a side has no spread.")
    difference, within = a.mean() - b.mean(), form(margin).lstrip("+")
    interval = f"95% confidence interval [{form(wide[0])}, {form(wide[1])}]"
    found = f"difference {form(difference)}, {interval}, n = {len(a)} and {len(b)}"
    if -margin < narrow[0] and narrow[1] < margin:
        return Conclusion("equivalent", f"{what}: equivalent within {within}; {found}.")
    if wide[0] > 0 or wide[1] < 0:
        verdict = "better" if (difference > 0) == more_is_better else "worse"
        return Conclusion(verdict, f"{what}: mine is {verdict}; {found}.")
    runs = runs_needed(math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2), margin)
    needed = f"Equivalence within {within} would need about {runs} runs on each side."
    return Conclusion("open", f"{what}: too few runs; {found}. {needed}")
