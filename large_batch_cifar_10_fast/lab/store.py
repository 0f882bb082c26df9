"""The runs of a campaign, each a file, and the tables that are made of them.

OUT/runs/NAME/0007.json      the row and the epochs of run 7, which is finished if this file exists
OUT/runs/NAME/campaign.json  the conditions that all runs share
OUT/runs/NAME/claims         byte N is locked by the process that makes run N
OUT/runs.tsv, epochs.tsv, timing_log.tsv    views: written anew from these files, and never read while training

Parallel launches share the runs of a campaign, but do not communicate. A file is written beside and published whole. A
lock ends with its process, so a killed launch leaves nothing that stops another.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from .. import ConfigError
from ..core.printing import warn, warn_once
from ..files import LAUNCHES, claim, link, locked, share, write_atomically, write_patiently
from .table import TIMES, Row, differences, must_agree

PAUSE = 10  # seconds between two writings of the tables


class Campaign(AbstractContextManager):
    """The files of a campaign, which rank 0 reads and writes."""

    def __init__(self, out: Path, name: str, runs: int) -> None:
        """Read the finished runs. Raise ConfigError if this is impossible."""
        self.name = name
        self.out = out
        self.runs = runs
        self.folder = out / "runs" / name
        self.rows: dict[int, Row] = {}  # the finished ones, by run
        self.common: dict[str, str] = {"campaign": name}
        self.written = 0.0  # when the tables were
        self.folder.mkdir(parents=True, exist_ok=True)
        # Opened once: closing any descriptor of a file frees all record locks of the process on it.
        self.claims = os.open(self.folder / "claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.is_alone = claim(self.claims, LAUNCHES)
        if self.is_alone:
            for left in self.folder.glob(".unfinished.*"):
                left.unlink(missing_ok=True)
        share(self.claims, LAUNCHES)
        self.read_rows()

    def __exit__(self, *error: object) -> None:
        os.close(self.claims)  # frees all claims

    def read_rows(self) -> None:
        """Read the runs that were finished since the last time."""
        for path in files_in(self.folder):
            if int(path.stem) not in self.rows:
                self.rows[int(path.stem)] = as_row(read_run(path)["row"])

    def agree(self, values: Mapping[str, str]) -> None:
        """Add conditions that the campaign lacks. Raise ConfigError if others differ.

        The conditions of a campaign without any finished run or running launch are forgotten.
        """
        self.common |= values
        path = self.folder / "campaign.json"
        with locked(self.folder / "lock"):
            known: dict[str, str] = {}
            if path.exists() and not (self.is_alone and not self.rows):
                known = json.loads(path.read_text())["conditions"]
            self.is_alone = False
            conditions = {name: value for name, value in values.items() if must_agree(name)}
            text = differences(conditions, known, conditions)
            if text:
                advice = "give the same options (and --nproc, OMP_NUM_THREADS) again, or another --campaign"
                raise ConfigError(f"campaign {self.name} cannot be continued with {text}: {advice}")
            with write_atomically(path) as unfinished:
                unfinished.write_text(json.dumps({"conditions": {**conditions, **known}}, indent=1))

    # ---- Runs

    @property
    def requested(self) -> list[Row]:
        """The rows of the finished runs among those that were asked for."""
        return [self.rows[run] for run in sorted(self.rows) if run < self.runs]

    def take_run(self) -> int | None:
        """Claim the next run that is neither finished nor claimed by another process; None if there is none."""
        for run in range(self.runs):
            if run not in self.rows and claim(self.claims, run):
                self.read_rows()  # another process may just have finished it
                if run not in self.rows:
                    return run
        return None

    def add_run(self, run: int, row: Mapping[str, object], epochs: Sequence[Mapping[str, object]]) -> None:
        """Publish a finished run. If the disk is full, wait. Raise LostError if the campaign's folder is gone."""
        path = self.folder / f"{run:04}.json"
        mine = {**self.common, **row}
        own = {"campaign": self.name, "run": run}
        text = json.dumps({"row": mine, "epochs": [{**own, **epoch} for epoch in epochs]})

        def publish() -> bool:
            try:
                with write_atomically(path, link) as unfinished:
                    unfinished.write_text(text)
            except FileExistsError:
                return False
            return True

        what = f"run {run} of {self.folder} (seed {row['seed']}, accuracy {row['validation_accuracy']:.4f})"
        is_first = write_patiently(publish, what)
        self.read_rows()
        if not is_first:
            deciding = [name for name in mine if must_agree(name) and name not in TIMES]
            found = differences(as_row(mine), self.rows[run], deciding) or "times only"
            warn(f"another launch has also made run {run}, because locks have no effect here; they differ in {found}")

    def write_tables(self, at_once: bool = False) -> None:
        """Write the tables of all campaigns in OUT, at most once in PAUSE seconds unless `at_once`, or warn."""
        if at_once or time.monotonic() - self.written > PAUSE:
            self.written = time.monotonic()
            self.read_rows()
            try:
                write_tables(self.out)
            except OSError as error:
                warn_once(f"tables are not written ({error})")


# ---- Files of runs


def files_in(folder: Path) -> list[Path]:
    """Return the files of the finished runs in a campaign's folder, in order."""
    return sorted(folder.glob("[0-9]*.json"), key=lambda path: int(path.stem))


def rows_in(folder: Path) -> list[Row]:
    """Return the rows of the finished runs in a campaign's folder, in order."""
    return [as_row(read_run(path)["row"]) for path in files_in(folder)]


def as_row(values: Mapping[str, object]) -> Row:
    return {name: str(value) for name, value in values.items()}


def read_run(path: Path) -> dict[str, Any]:
    """Return the row and the epochs of a finished run."""
    return json.loads(path.read_text())


def folders_of(out: Path) -> list[Path]:
    """Return the folders of all campaigns, as they began: nothing is written to a file `claims`."""
    markers = sorted(out.glob("runs/*/claims"), key=lambda claims: claims.stat().st_mtime_ns)
    return [claims.parent for claims in markers]


# ---- Tables


def write_tables(out: Path) -> None:
    """Write runs.tsv and epochs.tsv of all campaigns, and timing_log.tsv of the last one that has run 0."""
    with locked(out / "runs" / "lock"):
        rows: list[Row] = []  # read with the lock: an older view must not replace a newer one
        epochs: list[dict[str, Any]] = []
        curve: list[dict[str, Any]] = []
        for folder in folders_of(out):
            runs = [read_run(path) for path in files_in(folder)]
            rows += [run["row"] for run in runs]
            epochs += [epoch for run in runs for epoch in run["epochs"]]
            curve = next((run["epochs"] for run in runs if run["row"]["run"] == 0), curve)
        write_table(out / "runs.tsv", rows)
        write_table(out / "epochs.tsv", epochs)
        write_table(out / "timing_log.tsv", [as_dawnbench(epoch) for epoch in curve])


def as_dawnbench(epoch: Mapping[str, Any]) -> dict[str, object]:
    """Return an epoch as DAWNBench has it: the time in hours, and the accuracy in percent."""
    return {
        "epoch": epoch["epoch"],
        "hours": epoch["seconds"] / 3600,
        "top1Accuracy": round(100 * epoch["validation_accuracy"], 4),
    }


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with tabs, if there are some. The columns are all that any row has."""
    texts = [{name: re.sub(r"[\t\r\n]", " ", str(value)) for name, value in row.items()} for row in rows]
    if texts:
        with write_atomically(path) as unfinished:
            pd.DataFrame(texts).to_csv(unfinished, sep="\t", index=False, quoting=3)
