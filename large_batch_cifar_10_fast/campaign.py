"""A campaign on the disk: runs.tsv, epochs.tsv and timing_log.tsv, resuming, and the merging of shares."""

import argparse
import contextlib
import csv
import fcntl
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from .clock import PARTS
from .distributed import DistContext, warn
from .environment import code_digest, utc_now
from .options import MOST, WHOLE, ConfigError, Settings, exit_on_config_error, runs_of


@dataclass(frozen=True)
class Number:
    words: str  # that say what it is
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    or_nan: bool = False

    def read(self, text: str, where: str) -> float:
        """Raises ConfigError: `where` is 'long', not a number."""
        with contextlib.suppress(ValueError, OverflowError):
            value = float(int(text) if self.whole else text)
            if self.least <= value <= self.most or (self.or_nan and math.isnan(value)):
                return value
        raise ConfigError(f"{where} is {text[:40]!r}, not {self.words}")


LONGEST = 1e9  # seconds or hours; beyond, sums and ratios could overflow
COUNT = Number("a whole number", 0, 2**63, whole=True)
FROM_ONE = Number("a whole number above 0", 1, 2**63, whole=True)
RUNS = Number(f"a whole number from 1 to {MOST}", 1, MOST, whole=True)
FRACTION = Number("a number from 0 to 1", 0, 1)
LOSS = Number("a number", or_nan=True)  # of a run that diverged
TIME = Number("a number from 0 up, and finite", 0, LONGEST)
DURATION = Number("a number above 0, and finite", 1 / LONGEST, LONGEST)


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


def append(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append a campaign's runs to runs.tsv, those that it lacks, and return when they are on the disk.

    The table is opened for each append, so that one that was renamed, deleted or truncated since is no special case.
    A half-written last line goes to runs.tsv.broken. Raise ConfigError for a table of other columns, OSError as
    the disk does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        lock(file)
        file.seek(0)
        whole, begun = split_whole(file.read())
        if begun:
            with open(f"{path}.broken", "ab") as aside:
                aside.write(begun.rstrip(b"\n") + b"\n")
            file.truncate(len(whole))
            warn(f"the last row of {path} was half-written: it is in {path}.broken now")
        try:
            there = {(row["campaign"], row["run"]) for row in read_rows(path, whole, to_append=True)}
        except ConfigError as problem:
            with open(f"{path}.broken", "ab") as aside:
                aside.write(b"".join(map(as_line, rows)))
            raise ConfigError(f"{problem}; this campaign's rows are in {path}.broken") from None
        lacking = [row for row in rows if (row["campaign"], str(row["run"])) not in there]
        write_all(file, b"".join(map(as_line, lacking if whole else [HEAD, *lacking])))
        os.fsync(file.fileno())


def append_epochs(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append the epochs of a run to epochs.tsv. A run that is made again after a kill has its epochs twice, and the
    last ones count; a half-written last line is removed."""
    with open(path, "a+b", buffering=0) as file:
        lock(file)
        file.seek(0)
        kept = file.read().rfind(b"\n") + 1
        file.truncate(kept)
        lines = ["\t".join(str(row[name]) for name in EPOCHS) for row in rows]
        write_all(file, "".join(f"{line}\n" for line in ([] if kept else ["\t".join(EPOCHS)]) + lines).encode())


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write to an unbuffered file, which may take a part at a time. Raise OSError where the disk is full."""
    while content:
        content = content[file.write(content) :]


def lock(file: BinaryIO) -> None:
    """Wait for the lock on a file. Some file systems have none: warn once, and go on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        warn_once(f"{file.name} cannot be locked ({error.strerror}): do not write it from several launches at once")


@cache
def warn_once(text: str) -> None:
    warn(text)


def as_line(row: Mapping[str, object]) -> bytes:
    line = io.StringIO()
    csv.writer(line, delimiter="\t", lineterminator="\n").writerow([row[name] for name in COLUMNS])
    return line.getvalue().encode()


def write_timing_log(path: Path, epochs: list[tuple[float, float]]) -> None:
    """DAWNBench's table of one run: (seconds, accuracy) pairs become hours and percent. Whole or not at all."""
    lines = ["\t".join(CURVE)]
    lines += [f"{i}\t{seconds / 3600!r}\t{100 * accuracy:.6g}" for i, (seconds, accuracy) in enumerate(epochs, 1)]
    with written_whole(path) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes the place of `path` when all is on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # the variable with the campaign's name, from the launcher to its processes
STARTED = "LARGE_BATCH_STARTED"  # and the time at which it started
SUPERVISED = "LARGE_BATCH_SUPERVISED"  # set by the launcher of several teams, or with --restarts, in theirs


def campaign_of_this_launch() -> str:
    """A name of its own, by which the rows of one campaign are told from others'; the launcher gives it."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def started() -> str:
    """Return when this launch's campaign started."""
    return os.environ.get(STARTED) or utc_now()


def is_restart() -> bool:
    """Return whether another launcher started this launch, and checked before that there are runs to make."""
    return SUPERVISED in os.environ


def finished_rows(settings: Settings) -> list[Row]:
    """Return the campaign's rows: with --resume the last one's in --out, after a restart this launch's own.

    Raise ConfigError if they are of other code: it may not even have their recipe's options.
    """
    if not settings.resume and not is_restart():
        return []
    rows = rows_of(settings.out, "" if settings.resume else campaign_of_this_launch())
    for row in rows[-1:]:
        check_unchanged(row, code=code_digest(), torch=version("torch"))
    return rows


def rows_from_main(settings: Settings, ctx: DistContext) -> list[Row]:
    """Return the campaign's rows as rank 0 reads them, on all processes: other machines need not have its folder."""
    mine = json.dumps(finished_rows(settings)) if ctx.is_main else ""
    return json.loads(ctx.all_gather_words("finished", mine)[0])


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """The rows of a campaign in a folder, the last one's unless it is named."""
    path = Path(out) / "runs.tsv"
    try:
        return rows_of_campaign(read_rows(path), campaign)
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder, or one that may not be read, or too long a name
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give another --out") from error


def check_unchanged(row: Mapping[str, object], **now: object) -> None:
    """Raise ConfigError if a campaign's row, of words or of what they mean, tells anything otherwise than it is now."""
    differing = {name: value for name, value in now.items() if row[name] not in (value, str(value))}
    if differing:
        said = ", ".join(f"{name} ({row[name]} then, {value} now)" for name, value in differing.items())
        raise ConfigError(f"--resume: campaign {row['campaign']} had other {said}: start without --resume")


LARGEST = 64 << 20  # bytes; a hundred thousand runs are less


def read_bounded(source: str) -> bytes:
    """Return a file's content; raise ConfigError if it cannot be read or is too large for a log."""
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error})") from error
    if len(content) > LARGEST:
        raise ConfigError(f"{source}: larger than {LARGEST >> 20} MiB, so no log or table of runs: name another file")
    return content


MERGE = """Make one runs.tsv of those of the shares of a campaign (--share I/N).

    python -m large_batch_cifar_10_fast.campaign RUNS_TSV... --out FOLDER

Of each table the last campaign is taken. compare, plot and `--resume --out FOLDER` find one campaign; the missing runs
are named. Exit status: 0, or 2 and nothing written where the tables are not of one campaign.
"""
ALIKE = ("runs", "recipe", "options", "workers", *CONDITIONS, "digest", "validation_images", "code", "torch")


def last_campaign(file: str) -> list[Row]:
    rows = read_rows(Path(file), read_bounded(file))
    if not rows:
        raise ConfigError(f"{file}: a header and nothing below it, so no run to merge")
    if others := len({row["campaign"] for row in rows}) - 1:
        print(f"Warning: {file} holds {others} other campaigns: only the last one's runs are merged", file=sys.stderr)
    return rows_of_campaign(rows)


def merged(tables: dict[str, list[Row]]) -> list[Row]:
    """The rows of all tables (by file name) in the order of their runs, under one name. Raises ConfigError."""
    origin: dict[int, str] = {}
    first_file, first = next((file, rows[0]) for file, rows in tables.items())
    for file, row in ((file, row) for file, rows in tables.items() for row in rows):
        differing = [f"{name} ({row[name]}, not {first[name]})" for name in ALIKE if row[name] != first[name]]
        if _first_seed(row) != _first_seed(first):
            differing.append(f"seed of the first run ({_first_seed(row)}, not {_first_seed(first)})")
        if differing:
            raise ConfigError(f"{file} has other {', '.join(differing)} than {first_file}: they are not one campaign")
        if (run := int(row["run"])) in origin:
            raise ConfigError(f"run {run} is in {origin[run]} and in {file}: leave out one of them")
        origin[run] = file
    rows = sorted((row for rows in tables.values() for row in rows), key=lambda row: int(row["run"]))
    return [row | {"campaign": rows[0]["campaign"], "share": WHOLE} for row in rows]


def _first_seed(row: Row) -> int:
    return int(row["seed"]) - int(row["run"])


def write_new(path: Path, rows: list[Row]) -> None:
    try:
        if path.exists():
            raise ConfigError(f"{path} is there already: choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(b"".join(map(as_line, [HEAD, *rows])))
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.campaign", description=MERGE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="RUNS_TSV", help="one of every share")
    parser.add_argument("--out", required=True, help="folder for the runs.tsv, which may not have one yet")
    options = parser.parse_args(arguments)
    with exit_on_config_error("campaign"):
        tables = {file: last_campaign(file) for file in options.files}
        if len(tables) < len(options.files):
            raise ConfigError("the same file was given twice: leave out one of them")
        rows, path = merged(tables), Path(options.out) / "runs.tsv"
        write_new(path, rows)
    print(f"{path}: {len(rows)} of campaign {rows[0]['campaign']}'s {rows[0]['runs']} runs{missing(rows, options.out)}")


def missing(rows: list[Row], out: str) -> str:
    """The runs that nobody made, in words, and how to make them."""
    made = {int(row["run"]) for row in rows}
    runs = ", ".join(str(run) for run in range(int(rows[0]["runs"])) if run not in made)
    alike = len({(row["device"], row["processes"]) for row in rows}) == 1
    how = f"train_cifar_parallel.sh --resume --out {out}" if alike else "--resume in the shares' own folders"
    return f"; not made yet: {runs} ({how} makes them)" if runs else ""


if __name__ == "__main__":
    main()
