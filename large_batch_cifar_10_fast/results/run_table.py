"""How the two tables of a campaign are written, runs.tsv and timing_log.tsv, so that nothing is lost."""

import contextlib
import csv
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

from ..distributed import warn
from ..settings.settings import ConfigError
from .tables import COLUMNS, CURVE, EPOCHS, HEAD, read_rows, split_whole


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
        content = b"".join(map(as_line, lacking if whole else [HEAD, *lacking]))
        while content:
            content = content[file.write(content) :]
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
        content = "".join(f"{line}\n" for line in ([] if kept else ["\t".join(EPOCHS)]) + lines).encode()
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
