"""Measure whether runs of the same seed are alike, and whether pairing them shortens intervals, on the runs in results.

python notebook/seeds.py
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).resolve().parent.parent / "results"
VARIANTS = {  # campaigns with the same seeds, those of a list taken together
    "width 16, bf16": [[f"muon-w16-{name}-copies"] for name in ("baseline", "tail", "brightness", "contrast")],
    "width 16, fp32": [
        [f"muon-w16-fp32-{name}-copies"] for name in ("baseline", "smoothing-0.1", "fewer-images", "whitening-3")
    ],
    "width 16, workers": [["muon-w16-one-worker-copies"], ["muon-w16-eight-workers-copies"]],
    "width 8": [["muon-w8-copies-a"], ["muon-w8-batch-1000-copies"], ["muon-w8-later-figures-copies"]],
    "full width, fewer images": [
        ["muon-two-thirds-copies"],
        [f"muon-all-images-copies-{letter}" for letter in "abc"],
    ],
    "full width, workers": [["muon-cpu-copies-c"], ["muon-eight-workers-copies"]],
    "full width, precision": [
        ["muon-cpu-copies-c", "muon-cpu-copies-d"],
        ["muon-fp32-copies-a", "muon-fp32-copies-b"],
    ],
}
RUNS = pd.read_csv(RESULTS / "runs.tsv", sep="\t")


def accuracies(campaigns: list[str]) -> pd.Series:
    """Return the accuracies of campaigns in percent, by seed."""
    return 100 * RUNS[RUNS["campaign"].isin(campaigns)].set_index("seed")["validation_accuracy"]


def correlation(tables: list[np.ndarray]) -> float:
    """Return the mean correlation of the columns of tables [seeds, variants], weighted by degrees of freedom."""
    shared, own = 0.0, 0.0
    for table in tables:
        covariance = np.cov(table.T / table.std(0, ddof=1).mean())
        freedom, variants = len(table) - 1, len(covariance)
        shared += freedom * (covariance.sum() - np.trace(covariance)) / (variants * (variants - 1))
        own += freedom * np.trace(covariance) / variants
    return shared / own


ablation = pd.read_csv(RESULTS / "ablation.tsv", sep="\t")
ablation = 100 * ablation.pivot(index="seed", columns="variant", values="accuracy")
views = ablation[["as published", "without test-time augmentation"]]  # the same training
sets = {"ablation, training": ablation.drop(columns="without test-time augmentation")}
sets |= {name: pd.concat(map(accuracies, sides), axis=1, join="inner") for name, sides in VARIANTS.items()}
for name, table in (sets | {"ablation, test-time augmentation": views}).items():
    ratios = []
    for a, b in itertools.combinations(table.to_numpy().T, 2):
        tests = stats.ttest_rel(a, b), stats.ttest_ind(a, b, equal_var=False)
        pairs, welch = (float(np.ptp(test.confidence_interval())) for test in tests)
        ratios.append(pairs / welch)
    lengths = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {name} | {len(table)} | {table.shape[1]} | {correlation([table.to_numpy()]):+.2f} | {lengths} |")
random, tables = np.random.default_rng(0), [table.to_numpy() for table in sets.values()]
found = correlation(tables)
shuffled = [correlation([random.permuted(table, axis=0) for table in tables]) for _ in range(1000)]
print(f"all but the last: correlation {found:+.2f}, p = {np.mean([r >= found for r in shuffled]):.3f} (seeds shuffled)")
