"""Reading what campaigns left behind: run logs (ours and the published form), runs.tsv, DAWNBench's tables.

Rounded figures stay what they are: how far each may be off is kept beside it, and a count that rounding hides
is given as bounds.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from .settings import REPO
from .tables import COLUMNS, GOAL, METHOD_COLUMNS

PUBLISHED = REPO / "published"
PUBLISHED_FACTS = {"images": "CIFAR-10", "device": "8 x Tesla V100-SXM2-32GB", "workers": "8"}
NUMBER = r"(nan|inf|\d+(?:\.\d+)?)"
RUN_LINE = re.compile(rf"Train acc {NUMBER} loss {NUMBER}, validation acc {NUMBER} loss {NUMBER} wall time {NUMBER}s")
DATA_LINE = re.compile(r"# data (.*): \d+ training and (\d+) test images, SHA-256 (\w+)")
TEAM_LINE = re.compile(r"# (\d+) workers on (\d+) process(?:es)?, (.*)")


class Unreadable(Exception):  # noqa: N818 (the same kind of answer to the user as Refusal)
    """A log that cannot be read. Its text is one line: file, line and reason."""


@dataclass(frozen=True)
class Log:
    """A campaign as its log tells it, one entry a run; NaN where the log does not tell.

    Accuracies are fractions, each within `rounding` of the true one (0: exact). `reached` are the least and
    the most runs that may have reached 94%. `epochs` is the first run's curve, seconds and accuracies, if told.
    """

    name: str
    accuracy: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    goal_seconds: np.ndarray
    reached: tuple[int, int]
    rounding: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lowest: float = math.nan  # these two more exactly than the rounded accuracies tell them, where a summary does
    median: float = math.nan
    epochs: tuple[np.ndarray, np.ndarray] | None = None


def read_log(source: str, campaign: str | None = None) -> Log:
    """Read a file by what is in it, or the word `published`. Raises Unreadable."""
    if source == "published":
        log = read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv"))
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text().splitlines()
        return replace(_with_summary(log, summary), name="published", facts=PUBLISHED_FACTS)
    path = Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{source}: cannot be read ({error})") from error
    head = lines[0].split("\t") if lines else []
    if campaign and head != COLUMNS:
        raise Unreadable(f"{source}: --campaign is for a runs.tsv, which this is not")
    if head == COLUMNS:
        return _read_runs(path, lines, campaign)
    if head[:1] in (["epoch"], ["epochs"]):
        return _read_epochs(path, lines)
    if head == ["run", "train_acc", "train_loss", "valid_acc", "valid_loss", "seconds"]:
        return _read_published_table(path, lines)
    if any(line.startswith("Train acc") for line in lines):
        return _read_run_log(path, lines)
    raise Unreadable(f"{source}, line 1: neither a run log with finished runs, nor runs.tsv, nor a DAWNBench table")


def _fields(path: Path, lines: list[str]) -> pd.DataFrame:
    """A tab-separated table as text, indexed by line number; every row as long as the header."""
    head = lines[0].split("\t")
    rows = {number: line.split("\t") for number, line in enumerate(lines[1:], 2) if line.strip()}
    for number, row in rows.items():
        if len(row) != len(head):
            raise Unreadable(f"{path}, line {number}: {len(row)} fields where the header has {len(head)}")
    if not rows:
        raise Unreadable(f"{path}, line 1: a header and nothing below it")
    return pd.DataFrame.from_dict(rows, orient="index", columns=head)


def _numbers(path: Path, table: pd.DataFrame, column: str, empty: bool = False) -> np.ndarray:
    """A column as float64; an empty field is NaN where `empty` allows it."""
    if column not in table:
        raise Unreadable(f"{path}, line 1: no column {column}")
    for number, text in table[column].items():
        try:
            _ = float(text) if text or not empty else math.nan
        except ValueError:
            raise Unreadable(f"{path}, line {number}: {column} is {text!r}, not a number") from None
    return table[column].replace("", "nan").astype(float).to_numpy()


def _decimals(texts: list[str]) -> int:
    return max(len(text.partition(".")[2]) for text in texts)


def bounds(accuracy: np.ndarray, rounding: float) -> tuple[int, int]:
    """The least and the most of these accuracies that are truly at 94%, each known to within `rounding`."""
    slack = 1e-12  # of binary fractions
    return int((accuracy - rounding >= GOAL - slack).sum()), int((accuracy + rounding >= GOAL - slack).sum())


def _read_runs(path: Path, lines: list[str], campaign: str | None) -> Log:
    text = path.read_text(encoding="utf-8")
    table = _fields(path, lines if text.endswith("\n") else lines[:-1])
    known = table["campaign"].unique()
    if campaign and campaign not in known:
        raise Unreadable(f"{path}: no campaign {campaign}, only {', '.join(known)}")
    table = table[table["campaign"] == (campaign or known[-1])]
    count, images = _numbers(path, table, "validation_count"), _numbers(path, table, "validation_images")
    reached = int((count >= GOAL * images - 1e-9).sum())
    last = table.iloc[-1]
    planned = int(last["runs"])
    notes = (f"{path} holds {len(table)} of the campaign's {planned} runs",) if len(table) < planned else ()
    return Log(
        str(path), count / images, _numbers(path, table, "validation_loss"), _numbers(path, table, "seconds"),
        _numbers(path, table, "goal_seconds", empty=True), (reached, reached),
        facts={name: last[name] for name in ("images", "digest", "device", "workers", "processes", *METHOD_COLUMNS)},
        notes=notes,
    )  # fmt: skip


def _read_epochs(path: Path, lines: list[str]) -> Log:
    table = _fields(path, lines)
    hours, percent = _numbers(path, table, "hours"), _numbers(path, table, "top1Accuracy")
    # Not more digits than float64 holds: some entries print 12.839999999999998 for 12.84.
    decimals = min(_decimals([f"{float(text):.10g}" for text in table["top1Accuracy"]]), 10)
    rounding = 0.5 * 10.0 ** -(decimals + 2)
    accuracy, seconds = percent / 100, hours * 3600
    at_goal = np.flatnonzero(accuracy >= GOAL - 1e-12)
    goal = seconds[at_goal[0]] if len(at_goal) else math.nan
    last = accuracy[-1:]
    return Log(
        str(path), last, np.array([math.nan]), seconds[-1:], np.array([goal]), bounds(last, rounding), rounding,
        epochs=(seconds, accuracy),
    )  # fmt: skip


def _read_published_table(path: Path, lines: list[str]) -> Log:
    table = _fields(path, lines)
    accuracy = _numbers(path, table, "valid_acc")
    rounding = 0.5 * 10.0 ** -_decimals(list(table["valid_acc"]))
    return Log(
        str(path), accuracy, _numbers(path, table, "valid_loss"), _numbers(path, table, "seconds"),
        np.full(len(accuracy), math.nan), bounds(accuracy, rounding), rounding,
    )  # fmt: skip


def _read_run_log(path: Path, lines: list[str]) -> Log:
    """Ours, whose `#` lines tell on what, or the published form, which does not."""
    facts, runs, test_images = {}, [], None
    for number, line in enumerate(lines, 1):
        if match := DATA_LINE.fullmatch(line):
            facts |= {"images": match[1], "digest": match[3]}
            test_images = int(match[2])
        elif match := TEAM_LINE.fullmatch(line):
            facts |= {"workers": match[1], "processes": match[2], "device": match[3]}
        elif line.startswith("# settings "):
            settings = dict(re.findall(r"(\w+)=(\S*)", line))
            facts |= {name: settings[name] for name in METHOD_COLUMNS if name in settings}
        elif line.startswith("Train acc"):
            match = RUN_LINE.fullmatch(line.rstrip())
            if not match:
                raise Unreadable(f"{path}, line {number}: not a whole run line: {line[:60]!r}")
            runs.append(match.groups())
    columns = np.array(runs, dtype=float).T
    accuracy = columns[2]
    rounding = 0.5 * 10.0 ** -_decimals([run[2] for run in runs])
    if test_images and test_images * 2 * rounding <= 1:  # every count of images prints differently
        accuracy, rounding = np.rint(accuracy * test_images) / test_images, 0.0
    log = Log(
        str(path), accuracy, columns[3], columns[4], np.full(len(runs), math.nan), bounds(accuracy, rounding), rounding,
        facts,
    )  # fmt: skip
    return _with_summary(log, lines)


def _with_summary(log: Log, lines: list[str]) -> Log:
    """What the closing lines tell more exactly than the rounded lines above them, if they are of these runs."""
    text = "\n".join(lines)
    total = re.search(r"^(\d+) runs reached 0\.94 out of (\d+)$", text, re.M)
    if not total:
        return replace(log, notes=(*log.notes, f"{log.name} has no summary: its campaign did not finish"))
    if int(total[2]) != len(log.accuracy):
        note = f"{log.name} holds {len(log.accuracy)} runs, its summary speaks of {total[2]}: not used"
        return replace(log, notes=(*log.notes, note))
    log = replace(log, reached=(int(total[1]), int(total[1])))
    if figures := re.search(rf"^Lowest accuracy {NUMBER} median {NUMBER}$", text, re.M):
        log = replace(log, lowest=float(figures[1]), median=float(figures[2]))
    return log
