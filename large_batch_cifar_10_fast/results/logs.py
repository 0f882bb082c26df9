"""Reading what campaigns left behind: run logs (ours and the published form), runs.tsv, DAWNBench's tables.

Rounded figures stay what they are: how far each may be off is kept beside it, and a count that rounding hides
is given as bounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ..settings.settings import REPO, Refusal, Settings
from . import lines
from .tables import COLUMNS, CONDITIONS, GOAL

PUBLISHED = REPO / "published"
PUBLISHED_FACTS = {"images": "CIFAR-10", "device": "8 x Tesla V100-SXM2-32GB", "workers": "8"}
PUBLISHED_FACTS |= {"clock": "upload and training alone"}
OUR_CLOCK = "set-up and training, not validation"
CLOCKS = {  # of DAWNBench's entries, where it is known
    "basenet.tsv": "training and validation, not set-up",
    "fastai_pytorch.tsv": "validation, too",
    "fastai_pytorch_single_volta.tsv": "validation, too",
}
FACTS = ("images", "digest", "device", "recipe", "workers", "processes", *CONDITIONS)  # what may explain a difference


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
    """Read a file by what is in it, or the word `published`. Raises Refusal."""
    if source == "published":
        log = read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv"))
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text().splitlines()
        return replace(_with_summary(log, summary), name="published", facts=PUBLISHED_FACTS)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{source}: cannot be read ({error})") from error
    head = text[0].split("\t") if text else []
    if campaign and head != COLUMNS:
        raise Refusal(f"{source}: --campaign is for a runs.tsv, which this is not")
    if head == COLUMNS:
        return _read_runs(path, text, campaign)
    if head[:1] in (["epoch"], ["epochs"]):
        return _read_epochs(path, text)
    if head == ["run", "train_acc", "train_loss", "valid_acc", "valid_loss", "seconds"]:
        return _read_published_table(path, text)
    if any(line.startswith("Train acc") for line in text):
        return _read_run_log(path, text)
    raise Refusal(f"{source}, line 1: neither a run log with finished runs, nor runs.tsv, nor a DAWNBench table")


def _fields(path: Path, text: list[str]) -> pd.DataFrame:
    """A tab-separated table as text, indexed by line number; every row as long as the header."""
    head = text[0].split("\t")
    rows = {number: line.split("\t") for number, line in enumerate(text[1:], 2) if line.strip()}
    for number, row in rows.items():
        if len(row) != len(head):
            raise Refusal(f"{path}, line {number}: {len(row)} fields where the header has {len(head)}")
    if not rows:
        raise Refusal(f"{path}, line 1: a header and nothing below it")
    return pd.DataFrame.from_dict(rows, orient="index", columns=head)


def _numbers(path: Path, table: pd.DataFrame, column: str, empty: bool = False) -> np.ndarray:
    """A column as float64; an empty field is NaN where `empty` allows it."""
    if column not in table:
        raise Refusal(f"{path}, line 1: no column {column}")
    for number, text in table[column].items():
        try:
            _ = float(text) if text or not empty else math.nan
        except ValueError:
            raise Refusal(f"{path}, line {number}: {column} is {text!r}, not a number") from None
    return table[column].replace("", "nan").astype(float).to_numpy()


def _decimals(texts: list[str]) -> int:
    return max(len(text.partition(".")[2]) for text in texts)


def bounds(accuracy: np.ndarray, rounding: float) -> tuple[int, int]:
    """The least and the most of these accuracies that are truly at 94%, each known to within `rounding`."""
    slack = 1e-12  # of binary fractions
    return int((accuracy - rounding >= GOAL - slack).sum()), int((accuracy + rounding >= GOAL - slack).sum())


def _read_runs(path: Path, text: list[str], campaign: str | None) -> Log:
    whole = path.read_bytes().endswith(b"\n")
    table = _fields(path, text if whole else text[:-1])
    known = table["campaign"].unique()
    if campaign and campaign not in known:
        raise Refusal(f"{path}: no campaign {campaign}, only {', '.join(known)}")
    table = table[table["campaign"] == (campaign or known[-1])]
    figures = {name: _numbers(path, table, name) for name in ("validation_count", "validation_images", "seconds")}
    count, images = figures["validation_count"], figures["validation_images"]
    loss, goal = _numbers(path, table, "validation_loss"), _numbers(path, table, "goal_seconds", empty=True)
    reached = int((count >= GOAL * images - 1e-9).sum())
    last, planned = dict(table.iloc[-1]), int(table["runs"].iloc[-1])
    notes = (f"{path} holds {len(table)} of the campaign's {planned} runs",) if len(table) < planned else ()
    facts = _conditions(last)
    return Log(str(path), count / images, loss, figures["seconds"], goal, (reached, reached), facts=facts, notes=notes)


def _read_epochs(path: Path, text: list[str]) -> Log:
    table = _fields(path, text)
    hours, percent = _numbers(path, table, "hours"), _numbers(path, table, "top1Accuracy")
    # Not more digits than float64 holds: some entries print 12.839999999999998 for 12.84.
    decimals = min(_decimals([f"{float(text):.10g}" for text in table["top1Accuracy"]]), 10)
    rounding = 0.5 * 10.0 ** -(decimals + 2)
    accuracy, seconds = percent / 100, hours * 3600
    at_goal = np.flatnonzero(accuracy >= GOAL - 1e-12)
    goal = seconds[at_goal[0]] if len(at_goal) else math.nan
    last = accuracy[-1:]
    unknown, reached, curve = np.array([math.nan]), bounds(last, rounding), (seconds, accuracy)
    facts = {"images": "CIFAR-10", "clock": CLOCKS[path.name]} if path.name in CLOCKS else {}
    return Log(str(path), last, unknown, seconds[-1:], np.array([goal]), reached, rounding, facts, epochs=curve)


def _read_published_table(path: Path, text: list[str]) -> Log:
    table = _fields(path, text)
    accuracy = _numbers(path, table, "valid_acc")
    rounding = 0.5 * 10.0 ** -_decimals(list(table["valid_acc"]))
    loss, seconds = _numbers(path, table, "valid_loss"), _numbers(path, table, "seconds")
    unknown = np.full(len(accuracy), math.nan)
    return Log(str(path), accuracy, loss, seconds, unknown, bounds(accuracy, rounding), rounding)


def _read_run_log(path: Path, text: list[str]) -> Log:
    """Ours, whose `#` lines tell on what, or the published form, which does not."""
    facts, runs = {}, []
    for number, line in enumerate(text, 1):
        if line.startswith("Train acc"):
            if not (run := lines.RUN.read(line)):
                raise Refusal(f"{path}, line {number}: not a whole run line: {line[:60]!r}")
            runs.append(run)
        for form in (lines.DATA, lines.WORLD, lines.RECIPE, lines.SETTINGS):
            facts |= form.read(line) or {}
    columns = {name: np.array([float(run[name]) for run in runs]) for name in runs[0]}
    accuracy = columns["validation_accuracy"]
    rounding = 0.5 * 10.0 ** -_decimals([run["validation_accuracy"] for run in runs])
    test_images = int(facts.get("test", 0))
    if test_images and test_images * 2 * rounding <= 1:  # every count of images prints differently
        accuracy, rounding = np.rint(accuracy * test_images) / test_images, 0.0
    facts = _conditions(lines.from_pairs(facts.get("settings", "")) | facts)
    unknown, reached = np.full(len(runs), math.nan), bounds(accuracy, rounding)
    log = Log(str(path), accuracy, columns["validation_loss"], columns["seconds"], unknown, reached, rounding, facts)
    return _with_summary(log, text)


def _conditions(facts: Mapping[str, str]) -> dict[str, str]:
    """Of what a log says, what may explain a difference: FACTS, and the recipe's options (once among the settings)."""
    options = lines.from_pairs(facts.get("options", facts.get("settings", "")))
    options = {name: value for name, value in options.items() if name not in Settings.__dataclass_fields__}
    ours = {"clock": OUR_CLOCK} if "recipe" in facts or "digest" in facts else {}
    return {name: facts[name] for name in FACTS if name in facts} | options | ours


def _with_summary(log: Log, text: list[str]) -> Log:
    """What the closing lines tell more exactly than the rounded lines above them, if they are of these runs."""
    total = next(filter(None, map(lines.REACHED.read, text)), None)
    if not total:
        return replace(log, notes=(*log.notes, f"{log.name} has no summary: its campaign did not finish"))
    if int(total["total"]) != len(log.accuracy):
        note = f"{log.name} holds {len(log.accuracy)} runs, its summary speaks of {total['total']}: not used"
        return replace(log, notes=(*log.notes, note))
    log = replace(log, reached=(int(total["reached"]),) * 2)
    if figures := next(filter(None, map(lines.LOWEST.read, text)), None):
        log = replace(log, lowest=float(figures["lowest"]), median=float(figures["median"]))
    return log
