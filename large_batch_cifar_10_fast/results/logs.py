"""Reading what campaigns left behind: run logs (ours and the published form), runs.tsv, DAWNBench's tables.

Rounded figures stay what they are: how far each may be off is kept beside it, and a count that rounding hides
is given as bounds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..settings.settings import REPO, Refusal, Settings
from . import lines
from .fields import DURATION, FRACTION, LOSS, PERCENT, TIME, Number
from .tables import COLUMNS, CONDITIONS, GOAL, OLDER, diverged, reached_goal, read_rows

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
LARGEST = 64 << 20  # bytes of a file; a hundred thousand runs are less
HEAD, RUN = (line.template.partition("{")[0].strip() for line in (lines.HEAD, lines.RUN))  # how these lines begin


@dataclass(frozen=True)
class Log:
    """A campaign as its log tells it, one entry a run; NaN where the log does not tell.

    `loss` is validation's, NaN where a run diverged, and empty where no loss is told.
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

    @property
    def diverged(self) -> int:
        return int((~np.isfinite(self.loss)).sum())


def read_log(source: str, campaign: str | None = None) -> Log:
    """Read a file by what is in it, or the word `published`. Raises Refusal."""
    if source == "published":
        log = read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv"))
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text().splitlines()
        return replace(_with_summary(log, summary), name="published", facts=PUBLISHED_FACTS)
    path, content = Path(source), read_bounded(source)
    try:
        text = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise Refusal(f"{source}: cannot be read ({error})") from error
    head = text[0].split("\t") if text else []
    if campaign and head not in (COLUMNS, OLDER):
        raise Refusal(f"{source}: --campaign is for a runs.tsv, which this is not")
    if head in (COLUMNS, OLDER):
        return _read_runs(path, content, campaign)
    if head[:1] in (["epoch"], ["epochs"]):
        return _read_epochs(path, text)
    if head == ["run", "train_acc", "train_loss", "valid_acc", "valid_loss", "seconds"]:
        return _read_published_table(path, text)
    if any(line.startswith(RUN) for line in text):
        return _read_run_log(path, text)
    raise Refusal(f"{source}, line 1: neither a run log with finished runs, nor runs.tsv, nor a DAWNBench table")


def read_bounded(source: str) -> bytes:
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise Refusal(f"{source}: cannot be read ({error})") from error
    if len(content) > LARGEST:
        raise Refusal(f"{source}: larger than {LARGEST >> 20} MiB, so no log or table of runs: name another file")
    return content


def _columns(path: Path, text: list[str], kinds: Mapping[str, Number]) -> dict[str, list[str]]:
    """Of a tab-separated table the columns asked for, as text that was seen to be their kinds of numbers."""
    head = text[0].split("\t")
    for name in kinds:
        if head.count(name) != 1:
            raise Refusal(f"{path}, line 1: {'more than one' if name in head else 'no'} column {name}")
    columns = {name: [] for name in kinds}
    for number, row in ((number, line.split("\t")) for number, line in enumerate(text[1:], 2) if line.strip()):
        if len(row) != len(head):
            raise Refusal(f"{path}, line {number}: {len(row)} fields where the header has {len(head)}")
        for name, written in zip(head, row, strict=True):
            if name in kinds:
                kinds[name].read(written, f"{path}, line {number}: {name}")
                columns[name].append(written)
    if not all(columns.values()):
        raise Refusal(f"{path}, line 1: a header and nothing below it")
    return columns


def _numbers(texts: Iterable[str]) -> np.ndarray:
    return np.array([float(text) for text in texts])


def _decimals(texts: list[str]) -> int:
    return max(len(text.partition(".")[2]) for text in texts)


def bounds(accuracy: np.ndarray, rounding: float) -> tuple[int, int]:
    """The least and the most of these accuracies that are truly at 94%, each known to within `rounding`."""
    slack = 1e-12  # of binary fractions
    return int((accuracy - rounding >= GOAL - slack).sum()), int((accuracy + rounding >= GOAL - slack).sum())


def _read_runs(path: Path, content: bytes, campaign: str | None) -> Log:
    rows = read_rows(path, content)
    if not rows:
        raise Refusal(f"{path}, line 1: a header and nothing below it")
    known = dict.fromkeys(row["campaign"] for row in rows)
    if campaign and campaign not in known:
        raise Refusal(f"{path}: no campaign {campaign}, only {', '.join(known)}")
    rows = [row for row in rows if row["campaign"] == (campaign or rows[-1]["campaign"])]
    count, images, seconds = (
        _numbers(row[name] for row in rows) for name in ("validation_count", "validation_images", "seconds")
    )
    loss = _losses(rows)
    goal = np.where(np.isfinite(loss), _numbers(row["goal_seconds"] or "nan" for row in rows), math.nan)
    reached, planned = sum(map(reached_goal, rows)), int(rows[-1]["runs"])
    notes = (f"{path} holds {len(rows)} of the campaign's {planned} runs",) if len(rows) < planned else ()
    machines = {name: " and ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "processes")}
    facts = _conditions(rows[-1] | machines)
    return Log(str(path), count / images, loss, seconds, goal, (reached, reached), facts=facts, notes=notes)


def _losses(rows: Iterable[Mapping[str, str]]) -> np.ndarray:
    """Of validation; NaN where a run diverged."""
    return np.array([math.nan if diverged(row) else float(row["validation_loss"]) for row in rows])


def _read_epochs(path: Path, text: list[str]) -> Log:
    columns = _columns(path, text, {"hours": TIME, "top1Accuracy": PERCENT})
    seconds, accuracy = 3600 * _numbers(columns["hours"]), _numbers(columns["top1Accuracy"]) / 100
    if not seconds[-1] > 0:
        raise Refusal(f"{path}: hours of the last epoch is {columns['hours'][-1]!r}, not a number above 0")
    # Not more digits than float64 holds: some entries print 12.839999999999998 for 12.84.
    decimals = min(_decimals([f"{float(text):.10g}" for text in columns["top1Accuracy"]]), 10)
    rounding = 0.5 * 10.0 ** -(decimals + 2)
    at_goal = np.flatnonzero((accuracy >= GOAL - 1e-12) & (seconds > 0))
    goal = seconds[at_goal[0]] if len(at_goal) else math.nan
    last = accuracy[-1:]
    untold, reached, curve = np.array([]), bounds(last, rounding), (seconds, accuracy)
    facts = {"images": "CIFAR-10", "clock": CLOCKS[path.name]} if path.name in CLOCKS else {}
    return Log(str(path), last, untold, seconds[-1:], np.array([goal]), reached, rounding, facts, epochs=curve)


def _read_published_table(path: Path, text: list[str]) -> Log:
    kinds = {"train_loss": LOSS, "valid_acc": FRACTION, "valid_loss": LOSS, "seconds": DURATION}
    columns = _columns(path, text, kinds)
    accuracy, seconds = _numbers(columns["valid_acc"]), _numbers(columns["seconds"])
    rounding = 0.5 * 10.0 ** -_decimals(columns["valid_acc"])
    pairs = zip(columns["train_loss"], columns["valid_loss"], strict=True)
    loss = _losses({"train_loss": train, "validation_loss": validation} for train, validation in pairs)
    reached, unknown = bounds(accuracy[np.isfinite(loss)], rounding), np.full(len(accuracy), math.nan)
    return Log(str(path), accuracy, loss, seconds, unknown, reached, rounding)


def _read_run_log(path: Path, text: list[str]) -> Log:
    """Ours, whose `#` lines tell on what, or the published form, which does not.

    Each launch begins with a head, and one that resumes a campaign tells all its runs again: the last launch counts.
    """
    heads = [i for i, line in enumerate(text) if line.startswith(HEAD)]
    launches = [range(*ends) for ends in pairwise([0, *heads, len(text)])]
    launches = [launch for launch in launches if any(text[i].startswith(RUN) for i in launch)]
    told = [_head_of(text[i] for i in launch) for launch in launches]
    facts, runs = told[-1], []
    for i in launches[-1]:
        if text[i].startswith(RUN):
            where = f"{path}, line {i + 1}"
            if not (run := lines.RUN.read(text[i])):
                raise Refusal(f"{where}: not a whole run line: {text[i][:60]!r}")
            FRACTION.read(run["train_accuracy"], f"{where}: train acc")
            FRACTION.read(run["validation_accuracy"], f"{where}: validation acc")
            DURATION.read(run["seconds"], f"{where}: wall time")
            runs.append(run)
    accuracy, seconds = (_numbers(run[name] for run in runs) for name in ("validation_accuracy", "seconds"))
    rounding = 0.5 * 10.0 ** -_decimals([run["validation_accuracy"] for run in runs])
    test_images = int(facts.get("test", 0))
    if test_images and test_images * 2 * rounding <= 1:  # every count of images prints differently
        accuracy, rounding = np.rint(accuracy * test_images) / test_images, 0.0
    notes = _other_campaigns(path, told)
    facts = _conditions(lines.from_pairs(facts.get("settings", "")) | facts)
    loss, unknown = _losses(runs), np.full(len(runs), math.nan)
    reached = bounds(accuracy[np.isfinite(loss)], rounding)
    log = Log(str(path), accuracy, loss, seconds, unknown, reached, rounding, facts, notes)
    return _with_summary(log, [text[i] for i in launches[-1]])


def _head_of(launch: Iterable[str]) -> dict[str, str]:
    facts = {}
    for line in launch:
        if line.startswith("#"):
            for form in (lines.DATA, lines.WORLD, lines.RECIPE, lines.SETTINGS, lines.CAMPAIGN):
                facts |= form.read(line) or {}
    return facts


def _other_campaigns(path: Path, told: list[dict[str, str]]) -> tuple[str, ...]:
    """A note on the campaigns in a log besides the last; a launch that gives no name is one of its own."""
    names = [facts.get("campaign", str(i)) for i, facts in enumerate(told)]
    others = len(set(names)) - 1
    unlike = [name for name in ("images", "digest", "recipe") if len({facts.get(name) for facts in told}) > 1]
    said = f", not all of the same {' and '.join(unlike)}" if unlike else ""
    return (f"{path} holds {others} other campaigns{said}: only the last one's runs are read",) if others else ()


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
    reached, (least, most) = int(total["reached"]), log.reached
    if not least <= reached <= most:
        note = f"{log.name}: by its runs {least} to {most} reached 94%, its summary speaks of {reached}: not used"
        return replace(log, notes=(*log.notes, note))
    log = replace(log, reached=(reached, reached))
    if figures := next(filter(None, map(lines.LOWEST.read, text)), None):
        log = replace(log, lowest=float(figures["lowest"]), median=float(figures["median"]))
    return log
