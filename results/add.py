"""Append campaigns of FOLDER/runs.tsv and epochs.tsv to the tables here: python results/add.py FOLDER NAME=CAMPAIGN ...

NAME is the campaign's name here. A NAME that is here gets the seeds that it lacks, and run counts from its first seed.
"""

import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from large_batch_cifar_10_fast.lab.results import read_results  # noqa: E402


def read(path):
    """Return a table as texts."""
    return pd.read_csv(path, sep="\t", dtype=str, na_filter=False, quoting=3)


def add(folder, name, campaign):
    """Append a campaign's runs and epochs to the tables here."""
    runs = read(folder / "runs.tsv").query("campaign == @campaign")
    here = read(HERE / "runs.tsv")
    known = here.query("campaign == @name")
    first = known if len(known) else runs
    shift = (runs["seed"].astype(int) - runs["run"].astype(int)).iloc[0]
    shift -= (first["seed"].astype(int) - first["run"].astype(int)).iloc[0]
    new = runs[~runs["seed"].isin(known["seed"])]
    for file, rows in (("runs.tsv", new), ("epochs.tsv", read(folder / "epochs.tsv").query("campaign == @campaign"))):
        rows = rows[rows["run"].isin(new["run"])]
        rows = rows.assign(campaign=name, run=(rows["run"].astype(int) + shift).astype(str))
        table = pd.concat([read(HERE / file), rows]).fillna("")
        table.to_csv(HERE / file, sep="\t", index=False, quoting=3)


if __name__ == "__main__":
    for word in sys.argv[2:]:
        name, _, campaign = word.partition("=")
        add(Path(sys.argv[1]), name, campaign)
        read_results(f"{HERE}/runs.tsv:{name}")  # raises an error if it cannot be read
