"""Compare the means of two samples of runs: Student's or Welch's interval and test, and a verdict in words."""

import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

SIGNIFICANCE = 0.01  # of a difference
EQUIVALENCE = 0.05  # of each of the two one-sided tests
POWER = 0.8  # with which a detectable difference is found


@dataclass(frozen=True)
class Comparison:
    """The difference of two means, mine - reference, with its 95% confidence interval."""

    difference: float
    low: float
    high: float
    p: float  # of no difference
    p_margin: float  # of a difference as large as the margin: the larger one of two one-sided tests
    detectable: float  # the difference that is found, at SIGNIFICANCE, with POWER
    paired: bool


def compare_means(mine: pd.Series, reference: pd.Series, margin: float = 0.0) -> Comparison | None:
    """Compare the means of two samples, indexed by seed (NaN: unknown); None if one has a single value.

    Samples of the same seeds are compared in pairs, by Student's test, others by Welch's, which lets variances differ.
    """
    if min(len(mine), len(reference)) < 2:
        return None
    mine, reference = mine.sort_index(), reference.sort_index()
    paired = np.array_equal(mine.index, reference.index)  # which two NaN are not
    a, b = mine.to_numpy(), reference.to_numpy()
    difference = float(a.mean() - b.mean())
    if (np.ptp(a - b) if paired else max(np.ptp(a), np.ptp(b))) == 0:  # no variance, so no test
        p, p_margin = float(difference == 0), float(abs(difference) >= margin)
        return Comparison(difference, difference, difference, p, p_margin, 0.0, paired)
    run_test = stats.ttest_rel if paired else partial(stats.ttest_ind, equal_var=False)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nearly equal values
        test = run_test(a, b)
        above = run_test(a + margin, b, alternative="greater").pvalue
        below = run_test(a - margin, b, alternative="less").pvalue
    low, high = map(float, test.confidence_interval(0.95))
    quantile = partial(stats.t.ppf, df=test.df)
    error = (high - low) / 2 / quantile(0.975)
    detectable = float(error * (quantile(1 - SIGNIFICANCE / 2) + quantile(POWER)))
    return Comparison(difference, low, high, float(test.pvalue), max(above, below), detectable, paired)


def verdict(found: Comparison | None, more_is_better: bool) -> str:
    """Say whether mine is better or worse, or the two are equivalent: their difference is within the margin."""
    if found and found.p_margin < EQUIVALENCE:
        return "equivalent"
    if found and found.p < SIGNIFICANCE:
        return "mine is better" if (found.difference > 0) == more_is_better else "mine is worse"
    return "no difference shown"


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion."""
    return stats.binomtest(count, total).proportion_ci(method="wilson")
