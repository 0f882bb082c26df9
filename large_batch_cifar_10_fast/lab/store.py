"""The runs of a campaign, each a file, and the tables that are made of them.

OUT/runs/NAME/0007.json      the row and the epochs of run 7, which is finished if this file exists
OUT/runs/NAME/0007.part      the epochs so far of a run that is being made
OUT/runs/NAME/campaign.json  the conditions that all runs share, and how many runs were asked for
OUT/runs/NAME/claims         byte N is locked by the process that makes run N
OUT/runs.tsv, epochs.tsv, timing_log.tsv    views: written anew from these files, and never read while training

Parallel launches share the runs of a campaign, but do not communicate. A file is written beside and published whole. A
lock ends with its process, so a killed launch leaves nothing that stops another.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from .. import ConfigError, system_errors_in_one_line
from ..core.printing import warn
from ..files import (
    LAUNCHES,
    OPEN,
    WRITER,
    claim,
    lock,
    locked_byte,
    publish,
    share,
    write_atomically,
    write_patiently,
)
from .table import EPOCHS, TIMES, Row, decides, differences

PAUSE = 10  # seconds between two writings of the tables


class Campaign:
    """The files of a campaign, which rank 0 reads and writes."""

    @system_errors_in_one_line()
    def __init__(self, out: Path, name: str, runs: int) -> None:
        """Read the finished runs. Raise ConfigError if this is impossible."""
        self.name = name
        self.out = out
        self.runs = runs
        self.folder = out / "runs" / name
        self.rows: dict[int, Row] = {}  # the finished ones, by run
        self.common: dict[str, str] = {"campaign": name}
        self.written = 0.0  # when the tables were
        if (out / "runs.tsv").exists() and not (out / "runs" / "lock").exists():
            raise ConfigError(f"{out}/runs.tsv is of an earlier version, and would be replaced: choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.folder.resolve() in OPEN:  # record locks are of a process, not of a thread
            raise ConfigError(f"this process already trains campaign {name}: wait for it, or start another process")
        # Opened once: closing any descriptor of a file frees all record locks of the process on it.
        path = self.folder / "claims"
        self.claims = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        OPEN.add(self.folder.resolve())
        self.is_alone = claim(self.claims, LAUNCHES, path)
        if self.is_alone:
            for left in [*self.folder.glob("*.part"), *self.folder.glob(".unfinished.*")]:
                left.unlink(missing_ok=True)
        share(self.claims, LAUNCHES)
        self.read_rows()

    def __enter__(self) -> "Campaign":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.claims)  # frees all claims
        OPEN.discard(self.folder.resolve())

    def read_rows(self) -> None:
        """Read the runs that were finished since the last time."""
        for run in finished_runs(self.folder):
            if run not in self.rows:
                self.rows[run] = row_of(self.folder, run)

    @system_errors_in_one_line()
    def agree(self, values: Mapping[str, str]) -> None:
        """Add conditions that the campaign lacks. Raise ConfigError if others differ.

        The conditions of a campaign without any finished run or running launch are forgotten.
        """
        self.common |= values
        path = self.folder / "campaign.json"
        with locked_byte(self.claims, WRITER):
            known: dict[str, Any] = {"runs": 0, "conditions": {}}
            if path.exists() and not (self.is_alone and not self.rows):
                known = json.loads(path.read_text())
            self.is_alone = False
            conditions = {name: value for name, value in values.items() if decides(name)}
            text = differences(conditions, known["conditions"], conditions)
            if text:
                advice = "give the same options again, or another --campaign"
                raise ConfigError(f"campaign {self.name} cannot be continued with {text}: {advice}")
            agreed = {"runs": max(self.runs, known["runs"]), "conditions": {**conditions, **known["conditions"]}}
            with write_atomically(path) as unfinished:
                unfinished.write_text(json.dumps(agreed, indent=1))

    # ---- Runs

    @property
    def missing(self) -> list[int]:
        return [run for run in range(self.runs) if run not in self.rows]

    def take_run(self) -> int | None:
        """Claim the next run that is neither finished nor claimed by another process; None if there is none."""
        for run in self.missing:
            if claim(self.claims, run, self.folder / "claims"):
                self.read_rows()  # another process may just have finished it
                if run not in self.rows:
                    return run
        return None

    def add_epochs(self, run: int, epochs: Sequence[Mapping[str, object]]) -> None:
        """Write the epochs so far of a run."""
        unfinished = self.folder / f".unfinished.{run:04}"
        unfinished.write_text(json.dumps({"epochs": self.with_names(run, epochs)}))
        unfinished.replace(self.folder / f"{run:04}.part")

    def with_names(self, run: int, epochs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        own = {"campaign": self.name, "run": run, "launch": self.common["launch"]}
        return [{**own, **epoch} for epoch in epochs]

    def add_run(self, run: int, row: Mapping[str, object], epochs: Sequence[Mapping[str, object]]) -> None:
        """Publish a finished run. If the disk is full, wait. Raise LostError if the campaign's folder is gone."""
        path = self.folder / f"{run:04}.json"
        whole = {**self.common, **row}
        content = {"row": whole, "epochs": self.with_names(run, epochs)}
        what = f"run {run} of {self.folder} (seed {row['seed']}, accuracy {row['validation_accuracy']:.4f})"
        is_first = write_patiently(lambda: publish(path, json.dumps(content).encode()), what)
        path.with_suffix(".part").unlink(missing_ok=True)
        self.rows[run] = row_of(self.folder, run)
        mine = {name: str(value) for name, value in whole.items()}
        deciding = [name for name in mine if decides(name) and name not in TIMES]
        if not is_first and differences(mine, self.rows[run], deciding):
            warn(f"another launch has also made run {run}, with another result: the seed did not decide it")
        elif not is_first:
            warn(f"another launch has also made run {run}, because locks have no effect here: give each its own --out")

    def write_tables(self, at_once: bool = False) -> None:
        """Write the tables of all campaigns in OUT, at most once in PAUSE seconds unless `at_once`."""
        if at_once or time.monotonic() - self.written > PAUSE:
            self.written = time.monotonic()
            self.read_rows()
            write_tables(self.out)


# ---- Files of runs


def finished_runs(folder: Path) -> list[int]:
    """Return the finished runs of a campaign's folder, in order."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{4,}\.json", name))


def row_of(folder: Path, run: int) -> Row:
    """Return the row of a finished run, as texts."""
    return {name: str(value) for name, value in read_run(folder / f"{run:04}.json")["row"].items()}


def read_run(path: Path) -> dict[str, Any]:
    """Return the file of a run. A finished one is never changed, so this process reads it once."""
    return read_once(path, path.stat().st_mtime_ns) if path.suffix == ".json" else json.loads(path.read_text())


@cache
def read_once(path: Path, changed: int) -> dict[str, Any]:
    return json.loads(path.read_text())


def rows_of(out: Path) -> dict[str, list[Row]]:
    """Return the rows of the finished runs of all campaigns that have some, by campaign. The last begun is last."""
    found = {}
    for folder in folders_of(out):
        rows = [row_of(folder, run) for run in finished_runs(folder)]
        if rows:
            found[folder.name] = rows
    return found


def folders_of(out: Path) -> list[Path]:
    """Return the folders of all campaigns, as they began: nothing is written to a file `claims`."""
    markers = sorted(out.glob("runs/*/claims"), key=lambda claims: claims.stat().st_mtime_ns)
    return [claims.parent for claims in markers]


# ---- Tables


def write_tables(out: Path) -> None:
    """Write runs.tsv and epochs.tsv of all campaigns, and timing_log.tsv of the last one that has run 0."""
    with open(out / "runs" / "lock", "w") as file:
        lock(file.fileno(), Path(file.name))
        rows = rows_of(out)  # with the lock: an older view must not replace a newer one
        write_table(out / "runs.tsv", [row for of_campaign in rows.values() for row in of_campaign], ["campaign"])
        epochs = []
        curve: list[dict[str, Any]] = []
        for folder in folders_of(out):
            files = [folder / f"{run:04}.json" for run in finished_runs(folder)]
            for path in [*files, *sorted(folder.glob("*.part"))]:
                with contextlib.suppress(FileNotFoundError):  # a run that was just finished has no part
                    own = read_run(path)["epochs"]
                    epochs += own
                    curve = own if path.name == "0000.json" else curve
        write_table(out / "epochs.tsv", epochs, EPOCHS)
        if curve:
            write_table(out / "timing_log.tsv", [as_dawnbench(epoch) for epoch in curve], [])


def as_dawnbench(epoch: Mapping[str, Any]) -> dict[str, object]:
    """Return an epoch as DAWNBench has it: the time in hours, and the accuracy in percent."""
    return {
        "epoch": epoch["epoch"],
        "hours": epoch["seconds"] / 3600,
        "top1Accuracy": round(100 * epoch["validation_accuracy"], 4),
    }


def write_table(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Write rows with tabs. The columns are the given ones, then all that any row has."""
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    texts = [{name: re.sub(r"[\t\r\n]", " ", str(value)) for name, value in row.items()} for row in rows]
    with write_atomically(path) as unfinished:
        table = pd.DataFrame(texts, columns=[*names])
        table.to_csv(unfinished, sep="\t", index=False, quoting=3, na_rep="")
