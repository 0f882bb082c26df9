"""A campaign on the disk: runs.tsv, epochs.tsv and timing_log.tsv, resuming, and merging the shares of a campaign."""

import argparse
import contextlib
import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from .distributed import DistContext, warn
from .environment import code_digest
from .options import WHOLE, ConfigError, exit_on_config_error, runs_of

Row = dict[str, str]

GOAL = 0.94  # accuracy
PARTS = ("upload", "preprocessing", "whitening", "training")  # of the training time (method, section 6)
CONDITIONS = ("precision", "micro_batches", "compile", "no_graph", "no_warmup")  # of RunConfig, may show in a result
COLUMNS = [
    *("campaign", "run", "runs", "share", "seed", "recipe", "options", "workers", "processes"),
    *CONDITIONS,
    *("device", "driver", "clocks", "data", "images", "digest", "version", "commit", "code", "torch"),
    *("train_accuracy", "train_loss", "validation_accuracy", "validation_count", "validation_images"),
    *("validation_loss", *PARTS, "seconds", "last_validation", "goal_epoch", "goal_seconds", "peak_memory"),
]
EPOCHS = ["campaign", "run", "epoch", "seconds", "train_loss", "train_accuracy", "validation_loss"]
EPOCHS += ["validation_accuracy"]
CURVE = ("epoch", "hours", "top1Accuracy")  # DAWNBench's
INTEGERS = ("run", "runs", "seed", "workers", "processes", "micro_batches", "validation_count", "validation_images")
FLOATS = ("train_accuracy", "train_loss", "validation_accuracy", "validation_loss", *PARTS, "seconds")
FLOATS += ("last_validation", "peak_memory")
warn_once = cache(warn)


def diverged(row: Mapping[str, object]) -> bool:
    return not all(math.isfinite(float(row[name])) for name in ("train_loss", "validation_loss"))


def reached_goal(row: Mapping[str, object]) -> bool:
    """Return whether the run counts as reaching 94%: by its number of images, and unless it diverged."""
    return not diverged(row) and int(row["validation_count"]) >= GOAL * int(row["validation_images"])


def planned_by(row: Row) -> range:
    """Return the runs of a row's campaign and share."""
    return runs_of(row["share"], int(row["runs"]))


def first_seed(row: Row) -> int:
    """Return the seed of the campaign's run 0."""
    return int(row["seed"]) - int(row["run"])


def read_rows(path: Path, content: bytes | None = None) -> list[Row]:
    """Return the rows of a runs.tsv, or of its `content`; raise ConfigError, naming the line, if it is damaged."""
    lines = split_rows(path.read_bytes() if content is None else content)[0].decode(errors="replace").splitlines()
    if lines and lines[0].split("\t") != COLUMNS:
        raise ConfigError(f"{path} has other columns than this version writes: move it or choose another --out")
    rows, seen = [], set()
    try:
        for fields in csv.reader(lines[1:], delimiter="\t"):
            row = dict(zip(COLUMNS, fields, strict=True))
            _check_row(row, seen)
            rows.append(row)
    except (ValueError, csv.Error, ConfigError) as error:
        raise ConfigError(f"{path}, line {len(rows) + 2}: {error}; correct it or choose another --out") from None
    return rows


def _check_row(row: Row, seen: set[tuple[str, int]]) -> None:
    """Raise an error for a wrong number, and for a run that is not of its share or that was `seen` before."""
    for kind, names in ((int, INTEGERS), (float, FLOATS)):
        [kind(row[name]) for name in names]
    if (run := int(row["run"])) not in planned_by(row):
        raise ValueError(f"run {run} is none of share {row['share']} of {row['runs']} runs")
    if (row["campaign"], run) in seen:
        raise ValueError(f"run {run} of campaign {row['campaign']} occurs a second time")
    seen.add((row["campaign"], run))


def split_rows(content: bytes) -> tuple[bytes, bytes]:
    """Return the complete lines of a table, and a half-written last one, which has no newline."""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def rows_of_campaign(rows: Sequence[Row], campaign: str = "") -> list[Row]:
    """Return the rows of the named campaign, or of the last one."""
    return [row for row in rows if row["campaign"] == (campaign or rows[-1]["campaign"])]


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """Return the rows of the named campaign in a folder, or of the last one; raise ConfigError."""
    path = Path(out) / "runs.tsv"
    try:
        return rows_of_campaign(read_rows(path), campaign)
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder, or one that may not be read, or too long a name
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give another --out") from error


def append(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append to runs.tsv those rows of a campaign that it lacks, and return when they are on the disk.

    The table is opened for each append, so that it may be renamed, deleted or truncated in between. Raise ConfigError
    for a table that cannot be appended to; the rows are then in runs.tsv.broken. Raise OSError as the disk does.
    """
    with table_to_append(path) as (file, complete):
        try:
            existing = {(row["campaign"], row["run"]) for row in read_rows(path, complete)}
        except ConfigError as problem:
            set_aside(path, as_lines(COLUMNS, rows))
            raise ConfigError(f"{problem}; this campaign's rows are in {path}.broken") from None
        missing = [row for row in rows if (row["campaign"], str(row["run"])) not in existing]
        file.write(as_lines(COLUMNS, missing, head=not complete))


def append_epochs(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append the epochs of a run to epochs.tsv. If a run is repeated after a kill, its last rows count."""
    with table_to_append(path) as (file, complete):
        file.write(as_lines(EPOCHS, rows, head=not complete))


@contextlib.contextmanager
def table_to_append(path: Path) -> Iterator[tuple[BinaryIO, bytes]]:
    """Open and lock a table; yield it and its complete lines. A half-written last line goes to PATH.broken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        lock(file)
        file.seek(0)
        complete, partial = split_rows(file.read())
        if partial:
            set_aside(path, partial + b"\n")
            file.truncate(len(complete))
            warn(f"the last row of {path} was half-written: it is in {path}.broken now")
        yield file, complete
        file.flush()
        os.fsync(file.fileno())


def lock(file: BinaryIO) -> None:
    """Wait for the lock on a file. Some file systems have none: warn once, and continue."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        warn_once(f"{file.name} cannot be locked ({error.strerror}): do not write it from several launches at once")


def set_aside(path: Path, content: bytes) -> None:
    with open(f"{path}.broken", "ab") as file:
        file.write(content)


def as_lines(columns: Sequence[str], rows: Iterable[Mapping[str, object]], head: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerows([*([columns] if head else []), *([row[name] for name in columns] for row in rows)])
    return text.getvalue().encode()


def write_timing_log(path: Path, epochs: Iterable[tuple[float, float]]) -> None:
    """Write DAWNBench's table of one run, in hours and percent, from (seconds, accuracy) of each epoch."""
    fields = ((i, seconds / 3600, f"{100 * accuracy:.6g}") for i, (seconds, accuracy) in enumerate(epochs, 1))
    with write_atomically(path) as unfinished:
        unfinished.write_bytes(as_lines(CURVE, [dict(zip(CURVE, row, strict=True)) for row in fields], head=True))


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; the file replaces `path` when it is on the disk."""
    unfinished = path.with_name(f".unfinished.{os.getpid()}")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# Resuming

CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # environment variables from the launcher to its processes: the campaign's name,
TEAM = "LARGE_BATCH_TEAM"  # and, of a launcher of teams or with --restarts, which team they are, as K/T


def campaign_of_this_launch() -> str:
    """Return the campaign's name, which the launcher chose; without a launcher a new one."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def is_restart() -> bool:
    """Return whether another launcher started this launch, and checked that there are runs to make."""
    return TEAM in os.environ


def finished_rows(out: str, resume: bool) -> list[Row]:
    """Return the rows in --out: with --resume of the last campaign, after a restart this one's. Raise ConfigError."""
    if not resume and not is_restart():
        return []
    rows = rows_of(out, "" if resume else campaign_of_this_launch())
    for row in rows[-1:]:
        check_unchanged(row, code=code_digest(), torch=version("torch"))  # other code may have other options
    return rows


def rows_from_main(out: str, resume: bool, ctx: DistContext) -> list[Row]:
    """Return `finished_rows` of rank 0 on all processes: other machines need not have its folder."""
    mine = json.dumps(finished_rows(out, resume)) if ctx.is_main else ""
    return json.loads(ctx.all_gather_strings("finished", mine)[0])


def check_unchanged(row: Mapping[str, object], **now: object) -> None:
    """Raise ConfigError if a campaign's row has other values than now."""
    differing = {name: value for name, value in now.items() if row[name] not in (value, str(value))}
    if differing:
        both = ", ".join(f"{name} ({row[name]} then, {value} now)" for name, value in differing.items())
        what = f"--resume: campaign {row['campaign']} had other {both}"
        raise ConfigError(f"{what}: give the same again, or start without --resume")


# Merging

MERGE = """Merge the runs.tsv of the shares of a campaign (--share I/N) into one.

    python -m large_batch_cifar_10_fast.campaign RUNS_TSV... --out FOLDER

The last campaign of each table counts. Then compare, plot and `--resume --out FOLDER` find one campaign. An epochs.tsv
beside each table is merged, too. Exit status: 0, or 2 and nothing written if the tables are not of one campaign.
"""
ALIKE = ("runs", "recipe", "options", "workers", *CONDITIONS, "digest", "validation_images", "code", "torch")


def merged(tables: Mapping[str, list[Row]]) -> list[Row]:
    """Return the rows of all tables, by file name, in the order of their runs, as one campaign. Raise ConfigError."""
    origin: dict[int, str] = {}
    first_file, first = next((file, rows[0]) for file, rows in tables.items())
    for file, row in ((file, row) for file, rows in tables.items() for row in rows):
        differing = [f"{name} ({row[name]}, not {first[name]})" for name in ALIKE if row[name] != first[name]]
        if first_seed(row) != first_seed(first):
            differing.append(f"seed of the first run ({first_seed(row)}, not {first_seed(first)})")
        if differing:
            raise ConfigError(f"{file} has other {', '.join(differing)} than {first_file}: they are not one campaign")
        if (run := int(row["run"])) in origin:
            raise ConfigError(f"run {run} is in {origin[run]} and in {file}: leave out one of them")
        origin[run] = file
    rows = sorted((row for rows in tables.values() for row in rows), key=lambda row: int(row["run"]))
    return [row | {"campaign": rows[0]["campaign"], "share": WHOLE} for row in rows]


def epochs_beside(path: Path, campaign: str) -> list[Row]:
    """Return the epochs of a campaign from the epochs.tsv beside a runs.tsv, if there is one; raise OSError."""
    try:
        lines = split_rows(path.with_name("epochs.tsv").read_bytes())[0].decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = csv.DictReader(lines, delimiter="\t")
    return [row for row in rows if row.keys() >= set(EPOCHS) and row["campaign"] == campaign]


def merge(files: Sequence[str], out: Path) -> str:
    """Write the merged tables into a folder without one; return a line about them. Raise ConfigError."""
    try:
        tables = {file: rows_of_campaign(read_rows(Path(file))) for file in files}
        if len(tables) < len(files) or not all(tables.values()):
            raise ConfigError("a table is empty or was given twice: leave it out")
        rows, path = merged(tables), out / "runs.tsv"
        epochs = [e for file, of_file in tables.items() for e in epochs_beside(Path(file), of_file[0]["campaign"])]
        out.mkdir(parents=True, exist_ok=True)
        if path.exists() or path.with_name("epochs.tsv").exists():
            raise ConfigError(f"{out} has tables already: choose another --out")
        if epochs:
            append_epochs(path.with_name("epochs.tsv"), [e | {"campaign": rows[0]["campaign"]} for e in epochs])
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(as_lines(COLUMNS, rows, head=True))
    except (OSError, csv.Error) as error:
        raise ConfigError(f"the tables cannot be merged: {error}") from error
    text = f"{path}: {len(rows)} of campaign {rows[0]['campaign']}'s {rows[0]['runs']} runs"
    missing = sorted(set(range(int(rows[0]["runs"]))) - {int(row["run"]) for row in rows})
    how = f"train_cifar_parallel.sh --resume --out {out} makes them on the same device"
    return text + (f"; missing: {', '.join(map(str, missing))} ({how})" if missing else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.campaign", description=MERGE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="RUNS_TSV", help="one of every share")
    parser.add_argument("--out", required=True, help="folder for the merged tables, which must not have any yet")
    options = parser.parse_args(arguments)
    with exit_on_config_error("campaign"):
        print(merge(options.files, Path(options.out)))


if __name__ == "__main__":
    main()
