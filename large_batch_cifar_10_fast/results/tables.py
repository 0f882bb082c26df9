"""The table of a campaign's runs, runs.tsv: its columns, and how it is read."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from ..settings.settings import WHOLE, ConfigError, runs_of
from .clock import PARTS
from .fields import COUNT, DURATION, FRACTION, FROM_ONE, LOSS, RUNS, TIME

GOAL = 0.94  # the accuracy a run is to reach
CONDITIONS = ("precision", "micro_batches", "compile", "no_warmup")  # settings that may show in a result
COLUMNS = [
    *["campaign", "started", "run", "runs", "share", "seed", "recipe", "options", "workers", "processes"],
    *CONDITIONS,
    *["device", "driver", "clocks", "data", "images", "digest", "version", "commit", "code", "torch"],
    *["train_accuracy", "train_loss"],
    *["validation_accuracy", "validation_count", "validation_images", "validation_loss"],
    *PARTS,
    *["seconds", "last_validation", "goal_epoch", "goal_seconds", "peak_memory"],
]
HEAD = {name: name for name in COLUMNS}
OLDER = [name for name in COLUMNS if name != "share"]  # of tables written before there were shares
EPOCHS = (
    "campaign",
    "run",
    "epoch",
    "seconds",
    "train_loss",
    "train_accuracy",
    "validation_loss",
    "validation_accuracy",
)
CURVE = ("epoch", "hours", "top1Accuracy")  # the columns of timing_log.tsv, which are DAWNBench's
Row = dict[str, str]

NUMBERS = {
    **dict.fromkeys(("run", "seed", "validation_count", "peak_memory"), COUNT),
    "runs": RUNS,
    **dict.fromkeys(("workers", "processes", "micro_batches", "validation_images", "goal_epoch"), FROM_ONE),
    **dict.fromkeys(("train_accuracy", "validation_accuracy"), FRACTION),
    **dict.fromkeys(("train_loss", "validation_loss"), LOSS),
    **dict.fromkeys((*PARTS, "last_validation"), TIME),
    **dict.fromkeys(("seconds", "goal_seconds"), DURATION),
}
MAY_BE_EMPTY = ("goal_epoch", "goal_seconds")


def diverged(row: Mapping[str, object]) -> bool:
    return not all(math.isfinite(float(row[name])) for name in ("train_loss", "validation_loss"))


def reached_goal(row: Mapping[str, object]) -> bool:
    """Counted in images: no rounded figure decides. What diverged has reached nothing, however it guesses."""
    return not diverged(row) and int(row["validation_count"]) >= GOAL * int(row["validation_images"])


def rows_of_campaign(rows: list[Row], campaign: str = "") -> list[Row]:
    """The last one's, unless it is named."""
    return [row for row in rows if row["campaign"] == (campaign or rows[-1]["campaign"])]


def planned_by(row: Row) -> range:
    """The runs that the launches of a row's campaign and share make."""
    return runs_of(row["share"], int(row["runs"]))


def read_rows(path: Path, content: bytes | None = None, to_append: bool = False) -> list[Row]:
    """All whole rows of a runs.tsv (`content`, if it was read already); one left half-written at the end is not one.

    Raise ConfigError, naming the line, for a table of other columns, or with damaged figures.
    """
    lines = split_whole(path.read_bytes() if content is None else content)[0].decode(errors="replace").splitlines()
    head = lines[0].split("\t") if lines else COLUMNS
    if head != COLUMNS and (to_append or head != OLDER):
        raise ConfigError(f"{path} has other columns than this version writes: move it or choose another --out")
    try:
        rows = list(csv.reader(lines[1:], delimiter="\t"))
    except csv.Error as error:
        raise ConfigError(f"{path} is not a table ({error}): mend it or choose another --out") from None
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise ConfigError(
                f"{path}, line {number}: {len(row)} fields, not {len(head)}: mend it or choose another --out"
            )
    table = [{"share": WHOLE, **dict(zip(head, row, strict=True))} for row in rows]
    _check_fields(path, table)
    return table


def _check_fields(path: Path, table: list[Row]) -> None:
    """Raise ConfigError for a field that is not its kind of number, a run that is doubled or not of its share, a wrong
    seed."""
    seen, first_seed = set(), {}
    for number, row in enumerate(table, 2):
        where = f"{path}, line {number}"
        for name, kind in NUMBERS.items():
            if row[name] or name not in MAY_BE_EMPTY:
                kind.read(row[name], f"{where}: {name}")
        count, images = int(row["validation_count"]), int(row["validation_images"])
        if count > images:
            raise ConfigError(f"{where}: validation_count is {count}, of {images} validation_images")
        campaign, run, seed = row["campaign"], int(row["run"]), int(row["seed"])
        try:
            planned = planned_by(row)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if run not in planned:
            raise ConfigError(f"{where}: run {run} is none of share {row['share']} of {row['runs']} runs")
        if (campaign, run) in seen:
            raise ConfigError(f"{where}: run {run} of campaign {campaign} is there a second time: take one of them out")
        seen.add((campaign, run))
        expected = first_seed.setdefault(campaign, seed - run) + run
        if seed != expected:
            raise ConfigError(f"{where}: seed is {seed}, but {expected} by campaign {campaign}'s first row")


def split_whole(content: bytes) -> tuple[bytes, bytes]:
    """The whole lines of a table, and what was begun after them: no newline, or too few fields at the end."""
    end = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    if last and content[last:end].count(b"\t") < content[: content.find(b"\n")].count(b"\t"):
        end = last
    return content[:end], content[end:]
