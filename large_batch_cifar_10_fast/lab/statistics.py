"""Compare the means of two samples of runs; intervals, verdicts, and tables as text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy  # which imports scipy.stats, half a second, at its first use

SIGNIFICANCE = 0.01  # level of a verdict: intervals have a confidence of 99%
MARGIN = 0.1  # points of accuracy that are equivalent
POWER = 0.8  # probability of finding a difference of FOUND
FOUND = 0.5  # points of accuracy, the difference that runs are counted for
ROUNDING = 1e-9  # differences of equal counts, as percents, differ by less


@dataclass(frozen=True)
class Comparison:
    """The difference of two means, mine - reference, with its confidence interval. Both are over the compared runs.

    `tests` is the number of comparisons made together. The interval has a confidence of 1 - SIGNIFICANCE / tests, so
    that all intervals hold with 1 - SIGNIFICANCE (Bonferroni). `p` is multiplied by `tests`: it is below SIGNIFICANCE
    if and only if the interval leaves out 0.
    """

    difference: float
    low: float
    high: float
    p: float  # p-value of "no difference"
    runs: int  # number of runs per side that finds a difference of FOUND points with POWER
    sample: pd.Series  # the compared values of mine


def compare_means(mine: pd.Series, reference: pd.Series, tests: int = 1) -> Comparison | None:
    """Compare the means of two samples, indexed by seed (NaN: unknown); None if there is no variance to judge by.

    If at least half of the runs of a side have common seeds, these runs are compared in pairs by Student's test.
    Otherwise all runs are compared by Welch's test, which allows different variances.
    """
    if min(len(mine), len(reference)) < 2:
        return None
    common = sorted({*mine.index.dropna()} & {*reference.index.dropna()})
    is_paired = 2 * len(common) >= max(4, min(len(mine), len(reference)))
    if is_paired:
        mine = mine[common]
        reference = reference[common]
    a = mine.to_numpy()
    b = reference.to_numpy()
    varying = [a - b] if is_paired else [a, b]
    if max(map(np.ptp, varying)) < ROUNDING:
        return None
    test = scipy.stats.ttest_rel(a, b) if is_paired else scipy.stats.ttest_ind(a, b, equal_var=False)
    significance = SIGNIFICANCE / tests
    low, high = map(float, test.confidence_interval(1 - significance))
    p = min(1.0, tests * float(test.pvalue))
    counts = np.arange(2, 10_000)
    errors = np.sqrt(sum(np.var(each, ddof=1) for each in varying) / counts)
    detectable = errors * (scipy.stats.t.ppf(1 - significance / 2, counts - 1) + scipy.stats.t.ppf(POWER, counts - 1))
    runs = counts[0] + np.sum(detectable > FOUND)
    return Comparison(a.mean() - b.mean(), low, high, p, int(runs), mine)


def verdict(found: Comparison) -> str:
    """Return equivalent if the interval lies within MARGIN, otherwise better or worse if it excludes 0."""
    if found.low > -MARGIN and found.high < MARGIN:
        return "equivalent"
    if not found.low <= 0 <= found.high:
        return "better" if found.difference > 0 else "worse"
    return "no difference shown"


def mean_and_std(sample: pd.Series) -> str:
    """Return `94.186 ± 0.185`, without the deviation of a single value; "nan" for none."""
    return f"{sample.mean():.3f} ± {sample.std():.3f}".removesuffix(" ± nan")


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 99% score interval of a proportion."""
    return scipy.stats.binomtest(count, total).proportion_ci(1 - SIGNIFICANCE, method="wilson")


def in_columns(lines: Sequence[Sequence[str]]) -> str:
    """Return the cells of a table as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def in_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return the cells of a table as Markdown; the first line is its head."""
    head, *others = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *others])
