"""Append campaigns of FOLDER/runs.tsv and epochs.tsv to the tables here: python results/add.py FOLDER NAME=CAMPAIGN ...

NAME is the campaign's name here. A NAME that is here gets the seeds that it lacks, and run counts from its first seed.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from large_batch_cifar_10_fast.lab.results import read_log  # noqa: E402
from large_batch_cifar_10_fast.lab.table import COLUMNS, EPOCHS, SIZES  # noqa: E402

TABLES = {"runs.tsv": COLUMNS, "epochs.tsv": EPOCHS}


def read(folder):
    """Return the rows of both tables, each by column. What an older table does not have is empty."""
    tables = {}
    for file, columns in TABLES.items():
        text = (folder / file).read_text() if (folder / file).exists() else "\n"
        head, *lines = [line.split("\t") for line in text.split("\n")[:-1]]
        tables[file] = [dict.fromkeys(columns, "") | dict(zip(head, line, strict=True)) for line in lines]
    return tables


def add(tables, folder, name, campaign):
    """Append a campaign's runs and epochs to the rows of `tables`."""
    runs, epochs = ([row for row in rows if row["campaign"] == campaign] for rows in read(folder).values())
    here = [row for row in tables["runs.tsv"] if row["campaign"] == name] or runs
    known = {row["seed"] for row in here if here is not runs}
    seeds_of_run_0 = [int(rows[0]["seed"]) - int(rows[0]["run"]) for rows in (runs, here)]
    for row in runs + epochs:
        row |= {"campaign": name, "run": str(int(row["run"]) + seeds_of_run_0[0] - seeds_of_run_0[1])}
    for row in runs:
        row |= {size: row[size] or here[0][size] for size in SIZES}
    tables["runs.tsv"] += [row for row in runs if row["seed"] not in known]
    tables["epochs.tsv"] += [row for row in epochs if row not in tables["epochs.tsv"]]


def write(tables, names):
    """Write the tables if each of these campaigns can be read."""
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        for file, columns in TABLES.items():
            lines = ["\t".join(columns), *("\t".join(row[column] for column in columns) for row in tables[file])]
            Path(folder, file).write_text("\n".join(lines) + "\n")
        for name in names:
            read_log(f"{folder}/runs.tsv:{name}")
        for file in TABLES:
            Path(folder, file).replace(HERE / file)


if __name__ == "__main__":
    everything = read(HERE)
    for word in sys.argv[2:]:
        add(everything, Path(sys.argv[1]), *word.split("=", 1))
    write(everything, [word.partition("=")[0] for word in sys.argv[2:]])
