"""What may be concluded from two samples of runs: intervals, equivalence, and how many runs it would take."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

FEW = 5  # runs below which resampling says nothing
RESAMPLES = 1000, 5000  # at least, where runs are very many, and else
DRAWS = 100_000_000  # values that more than the least resamples may draw, which take a minute
AT_ONCE = 10_000_000  # values drawn at a time: memory must not grow with resamples times runs
SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Conclusion:
    """`verdict` is equivalent, better, worse, open, or (of the goal) shown; `text` says it in a sentence."""

    verdict: str
    text: str


def finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def welch_interval(a: np.ndarray, b: np.ndarray, confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval for mean(a) - mean(b), of unequal variances; None where one run on a side leaves the spread unknown."""
    if min(len(a), len(b)) < 2:
        return None
    difference = a.mean() - b.mean()
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return difference, difference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal times are no fault
        return stats.ttest_ind(a, b, equal_var=False).confidence_interval(confidence)


def resampled_interval(
    a: np.ndarray, b: np.ndarray, statistic: Callable[[np.ndarray, np.ndarray], float]
) -> tuple[float, float] | None:
    """95% interval of a statistic of two samples by the bootstrap (percentiles, always the same draws)."""
    if min(len(a), len(b)) < FEW:
        return None
    values = len(a) + len(b)
    resamples = int(np.clip(DRAWS // values, *RESAMPLES))
    return stats.bootstrap(
        (a, b),
        statistic,
        vectorized=False,
        n_resamples=resamples,
        batch=int(np.clip(AT_ONCE // values, 1, resamples)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval


def wilson(count: int, total: int) -> tuple[float, float]:
    """95% interval of a share (Wilson's score interval)."""
    return stats.binomtest(count, total).proportion_ci(method="wilson")


def newcombe(a: int, m: int, b: int, n: int) -> tuple[float, float]:
    """95% interval of a/m - b/n from the two Wilson intervals (Newcombe 1998, method 10)."""
    p, q, (p_low, p_high), (q_low, q_high) = a / m, b / n, wilson(a, m), wilson(b, n)
    return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def runs_needed(spread: float, margin: float) -> int:
    """Runs on each side for two one-sided 5% tests to find equal means equivalent in 80 of 100 cases."""
    quantiles = stats.norm.ppf(0.95) + stats.norm.ppf(0.90)
    return max(2, math.ceil(2 * (spread * quantiles / margin) ** 2))


def judge_goal(accuracy: np.ndarray, goal: float) -> Conclusion:
    """Is the mean at or above the goal (percent)? One-sided t-test; by the field's convention p < 0.01 shows it.

    Where it is not shown, how many runs like these would show it in 80 of 100 cases.
    """
    what = f"Mean at or above {goal:g}%"
    if len(accuracy) < 2:
        return Conclusion("open", f"{what}: one run does not tell.")
    mean, std = accuracy.mean(), accuracy.std(ddof=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runs that are all alike
        p = float(stats.ttest_1samp(accuracy, goal, alternative="greater").pvalue)
    said = f"mean {mean:.3f}%, std {std:.3f}, {len(accuracy)} runs, one-sided t-test p = {p:.2g}"
    if p < SIGNIFICANCE:
        return Conclusion("shown", f"{what}: shown; {said}.")
    if mean <= goal:
        return Conclusion("open", f"{what}: not shown; {said}; no number of such runs would show it.")
    quantiles = stats.norm.ppf(1 - SIGNIFICANCE) + stats.norm.ppf(0.80)
    runs = max(len(accuracy) + 1, math.ceil((std * quantiles / (mean - goal)) ** 2))
    return Conclusion("open", f"{what}: not shown; {said}; it would take about {runs} runs.")


def judge(
    a: np.ndarray, b: np.ndarray, margin: float, what: str, shown: Callable[[float], str], more_is_better: bool
) -> Conclusion:
    """Equivalent within the margin (two one-sided tests, 5% each), else different, else too few runs to tell."""
    narrow, wide = welch_interval(a, b, 0.90), welch_interval(a, b, 0.95)
    if narrow is None:
        return Conclusion("open", f"{what}: too few runs to tell: one run does not show how far runs differ.")
    difference = a.mean() - b.mean()
    said = f"a difference of {shown(difference)} (95% interval {shown(wide[0])} to {shown(wide[1])})"
    if -margin < narrow[0] and narrow[1] < margin:
        return Conclusion("equivalent", f"{what}: equivalent within {shown(margin).lstrip('+')}; {said}.")
    if wide[0] > 0 or wide[1] < 0:
        verdict = "better" if (difference > 0) == more_is_better else "worse"
        return Conclusion(verdict, f"{what}: different, mine is {verdict}; {said}.")
    spread = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    return Conclusion(
        "open",
        f"{what}: too few runs to tell; {said}. Showing equivalence within {shown(margin).lstrip('+')} "
        f"would take about {runs_needed(spread, margin)} runs on each side.",
    )
