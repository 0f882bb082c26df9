"""Compare the means of two samples of runs: Welch's interval and test, and a verdict in words."""

import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats

SIGNIFICANCE = 0.01  # of "better" and "worse"
EQUIVALENCE = 0.05  # of each of the two one-sided tests


@dataclass(frozen=True)
class Comparison:
    """The difference of two means, mine - reference, with its 95% confidence interval."""

    difference: float
    low: float
    high: float
    p: float  # of no difference
    p_margin: float  # of a difference as large as the margin: the larger one of two one-sided tests

    def __str__(self) -> str:
        interval = f"95% confidence interval [{self.low:+.3f}, {self.high:+.3f}]"
        return f"difference {self.difference:+.3f}, {interval}, p = {self.p:.2g}"


def welch(mine: np.ndarray, reference: np.ndarray, margin: float = 0.0) -> Comparison | None:
    """Compare two means by Welch's t-test, which lets the variances differ; None if a sample has a single value."""
    if min(len(mine), len(reference)) < 2:
        return None
    difference = float(mine.mean() - reference.mean())
    if np.ptp(mine) == np.ptp(reference) == 0:  # no variance, so no test
        p, p_margin = float(difference == 0), float(abs(difference) >= margin)
        return Comparison(difference, difference, difference, p, p_margin)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nearly equal values
        test = stats.ttest_ind(mine, reference, equal_var=False)
        above = stats.ttest_ind(mine + margin, reference, equal_var=False, alternative="greater")
        below = stats.ttest_ind(mine - margin, reference, equal_var=False, alternative="less")
    low, high = test.confidence_interval(0.95)
    return Comparison(difference, float(low), float(high), float(test.pvalue), max(above.pvalue, below.pvalue))


def verdict(found: Comparison | None, more_is_better: bool) -> str:
    """Return "better" or "worse", "equivalent" if the difference is within the margin, else "nothing is shown"."""
    if found and found.p_margin < EQUIVALENCE:
        return "equivalent"
    if found and found.p < SIGNIFICANCE:
        return "better" if (found.difference > 0) == more_is_better else "worse"
    return "nothing is shown"


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion."""
    return stats.binomtest(count, total).proportion_ci(method="wilson")
