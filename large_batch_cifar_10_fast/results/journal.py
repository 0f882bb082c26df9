"""How the two tables of a campaign are written, runs.tsv and timing_log.tsv, so that nothing is lost."""

import contextlib
import csv
import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..settings.settings import Refusal
from .tables import COLUMNS, CURVE, HEAD, Row, read_rows, split_whole


class Journal:
    """runs.tsv open for one campaign: locked against a second one, mended, appended to row by row."""

    def __init__(self, path: Path, finished: Sequence[Row] = ()) -> None:
        """`finished` are the rows that the campaign has already. Raises Refusal where the table is locked."""
        self.path, self._size = path, 0
        self._rows = {str(row["run"]): dict(row) for row in finished}  # all that is known of the campaign
        self._aside: set[str] = set()  # runs whose rows are in runs.tsv.broken
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "a+b")  # noqa: SIM115 (held open, and so locked, for the campaign)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Refusal(f"another campaign is writing {self.path}: wait for it or choose another --out") from None

    def mend(self) -> bool:
        """Write the header of a new table; whether a half-written last row had to be moved to runs.tsv.broken."""
        self._file.seek(0)
        whole, begun = split_whole(self._file.read())
        if begun:
            self._put_aside(begun.rstrip(b"\n") + b"\n")
            self._file.truncate(len(whole))
        self._size = len(whole)
        if not whole:
            self._write(HEAD)
        return bool(begun)

    def _put_aside(self, content: bytes) -> None:
        with open(f"{self.path}.broken", "ab") as aside:
            aside.write(content)

    def append(self, row: dict[str, object]) -> bool:
        """Add a run, and return when it is on the disk: whether the table was as it had been left.

        If it was not (an editor saves by renaming, and a file without a name takes rows without a word), the file
        that now has the name gets all rows of the campaign that it lacks. Raises Refusal if it is no such table, or
        another campaign's by now: they are put aside.
        """
        self._rows[str(row["run"])] = row
        if self._is_as_left():
            self._write(row)
            return True
        with contextlib.suppress(OSError):  # a full disk did not take its last row
            self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open()
            table = read_rows(self.path, to_append=True)
        except (Refusal, OSError) as problem:
            for run in self._rows.keys() - self._aside:
                self._put_aside(as_line(self._rows[run]))
                self._aside.add(run)
            raise Refusal(f"{problem}; this campaign's rows are in {self.path}.broken") from None
        self.mend()
        there = {other["run"] for other in table if other["campaign"] == row["campaign"]}
        for run, lost in self._rows.items():
            if run not in there:
                self._write(lost)
        return False

    def _is_as_left(self) -> bool:
        with contextlib.suppress(ValueError, FileNotFoundError):  # closed, as what was put aside left it, or deleted
            left, now = os.fstat(self._file.fileno()), os.stat(self.path)
            return os.path.samestat(now, left) and now.st_size == self._size
        return False

    def close(self) -> None:
        self._file.close()

    def _write(self, row: Mapping[str, object]) -> None:
        self._file.write(as_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._size = os.path.getsize(self.path)


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
