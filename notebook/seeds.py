"""Measure whether runs of the same seed are alike, and whether pairing them shortens intervals, on the logs here.

python notebook/seeds.py
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

TOP = Path(__file__).resolve().parent.parent
MUON, FULL = "notebook/logs/muon_", "logs/muon-jpeg-cpu-"
VARIANTS = {  # files of campaigns with the same seeds
    "width 16, bf16": [f"{MUON}width_16/{name}/runs.tsv" for name in ("base", "tail", "brightness", "contrast")],
    "width 16, fp32": [f"{MUON}width_16_fp32/{name}/runs.tsv" for name in ("base", "smooth", "kept", "whit")],
    "width 16, workers": [f"{MUON}width_16_workers/{name}/runs.tsv" for name in ("one", "eight")],
    "width 8": [f"{MUON}width_8/runs_{name}.tsv" for name in ("default", "batch_1000", "later_figures")],
    "full width, fewer images": [f"{MUON}kept/*/runs.tsv", f"{MUON}6_runs/*/runs.tsv"],
    "full width, workers": [f"{FULL}bf16/seeds_10_13/runs.tsv", f"{MUON}eight_workers_full/runs.tsv"],
    "full width, precision": [f"{FULL}bf16/seeds_1*/runs.tsv", f"{FULL}fp32/*/runs.tsv"],
}


def accuracies(pattern: str) -> pd.Series:
    """Return the accuracies of some tables in percent, by seed."""
    table = pd.concat(pd.read_csv(path, sep="\t") for path in TOP.glob(pattern))
    return 100 * table.set_index("seed")["validation_accuracy"]


def correlation(tables: list[np.ndarray]) -> float:
    """Return the mean correlation of the columns of tables [seeds, variants], weighted by degrees of freedom."""
    shared, own = 0.0, 0.0
    for table in tables:
        covariance = np.cov(table.T / table.std(0, ddof=1).mean())
        freedom, variants = len(table) - 1, len(covariance)
        shared += freedom * (covariance.sum() - np.trace(covariance)) / (variants * (variants - 1))
        own += freedom * np.trace(covariance) / variants
    return shared / own


ablation = pd.read_csv(TOP / "notebook/logs/ablation/ablation.tsv", sep="\t")
ablation = 100 * ablation.pivot(index="seed", columns="variant", values="accuracy")
views = ablation[["as published", "without test-time augmentation"]]  # the same training
sets = {"ablation, training": ablation.drop(columns="without test-time augmentation")}
sets |= {name: pd.concat(map(accuracies, files), axis=1, join="inner") for name, files in VARIANTS.items()}
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
