"""The tables a campaign leaves behind, runs.tsv and timing_log.tsv: how they are read, mended and written."""

import contextlib
import csv
import fcntl
import io
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ..settings.settings import Refusal, Settings, restarts, runs_of
from .clock import PARTS
from .fields import COUNT, DURATION, FRACTION, FROM_ONE, LOSS, TIME

CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # the variable by which the launcher tells its processes the campaign's name
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
WHOLE = "0/1"  # the share that is all of a campaign
OLDER = [name for name in COLUMNS if name != "share"]  # of tables written before there were shares
Row = dict[str, str]

NUMBERS = {
    **dict.fromkeys(("run", "seed", "validation_count", "peak_memory"), COUNT),
    **dict.fromkeys(("runs", "workers", "processes", "micro_batches", "validation_images", "goal_epoch"), FROM_ONE),
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


def campaign_of_this_launch() -> str:
    """A name of its own, by which the rows of one campaign are told from others'; the launcher gives it."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def finished_rows(settings: Settings) -> list[Row]:
    """The rows of the campaign to go on with: with --resume the last in --out, after a restart this launch's own."""
    if settings.resume:
        return rows_of(settings.out)
    return rows_of(settings.out, campaign_of_this_launch()) if restarts(os.environ)[0] else []


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """The rows of a campaign in a folder, the last one's unless it is named."""
    path = Path(out) / "runs.tsv"
    rows = read_rows(path) if path.exists() else []
    return [row for row in rows if row["campaign"] == (campaign or rows[-1]["campaign"])]


def planned_by(row: Row) -> range:
    """The runs that the launches of a row's campaign and share make."""
    return runs_of(row["share"], int(row["runs"]))


def changes(row: Row, **now: object) -> list[str]:
    """What a row tells otherwise than it is now, in words."""
    return [f"{name} ({row[name]} then, {value} now)" for name, value in now.items() if row[name] != str(value)]


def refuse_other(row: Row, differing: list[str]) -> None:
    """Raise Refusal if anything differs from the campaign that a row belongs to."""
    if differing:
        raise Refusal(f"--resume: campaign {row['campaign']} had other {', '.join(differing)}: start without --resume")


def read_rows(path: Path, content: bytes | None = None, to_append: bool = False) -> list[Row]:
    """All whole rows of a runs.tsv (`content`, if it was read already); one left half-written at the end is not one.

    Raises Refusal, naming the line, for a table of other columns, or whose figures were spoilt since it was written.
    """
    lines = _split_whole(path.read_bytes() if content is None else content)[0].decode(errors="replace").splitlines()
    head = lines[0].split("\t") if lines else COLUMNS
    if head != COLUMNS and (to_append or head != OLDER):
        raise Refusal(f"{path} has other columns than this version writes: move it or choose another --out")
    try:
        rows = list(csv.reader(lines[1:], delimiter="\t"))
    except csv.Error as error:
        raise Refusal(f"{path} is not a table ({error}): mend it or choose another --out") from None
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise Refusal(f"{path}, line {number}: {len(row)} fields, not {len(head)}: mend it or choose another --out")
    table = [{"share": WHOLE, **dict(zip(head, row, strict=True))} for row in rows]
    _refuse_spoilt(path, table)
    return table


def _refuse_spoilt(path: Path, table: list[Row]) -> None:
    """Raise Refusal for a field that is not its kind of number, a run told twice or not of its share, a wrong seed."""
    seen, first_seed = set(), {}
    for number, row in enumerate(table, 2):
        where = f"{path}, line {number}"
        for name, kind in NUMBERS.items():
            if row[name] or name not in MAY_BE_EMPTY:
                kind.read(row[name], f"{where}: {name}")
        count, images = int(row["validation_count"]), int(row["validation_images"])
        if count > images:
            raise Refusal(f"{where}: validation_count is {count}, of {images} validation_images")
        campaign, run, seed = row["campaign"], int(row["run"]), int(row["seed"])
        try:
            planned = planned_by(row)
        except Refusal as refusal:
            raise Refusal(f"{where}: {refusal}") from None
        if run not in planned:
            raise Refusal(f"{where}: run {run} is none of share {row['share']} of {row['runs']} runs")
        if (campaign, run) in seen:
            raise Refusal(f"{where}: run {run} of campaign {campaign} is there a second time: take one of them out")
        seen.add((campaign, run))
        expected = first_seed.setdefault(campaign, seed - run) + run
        if seed != expected:
            raise Refusal(f"{where}: seed is {seed}, but {expected} by campaign {campaign}'s first row")


def _split_whole(content: bytes) -> tuple[bytes, bytes]:
    """The whole lines of a table, and what was begun after them: no newline, or too few fields at the end."""
    end = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    if last and content[last:end].count(b"\t") < content[: content.find(b"\n")].count(b"\t"):
        end = last
    return content[:end], content[end:]


class Journal:
    """runs.tsv open for one campaign: locked against a second one, mended, appended to row by row."""

    def __init__(self, path: Path, shared: bool = False, is_first: bool = True) -> None:
        """`shared` by several teams' processes, of which the first holds the lock."""
        self.path, self._shared, self._is_first, self._size = path, shared, is_first, 0
        self._rows: list[dict[str, object]] = []  # of this launch
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "a+b")  # noqa: SIM115 (held open, and so locked, for the campaign)
        if not self._is_first:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Refusal(f"another campaign is writing {self.path}: wait for it or choose another --out") from None

    def mend(self) -> None:
        """Move a half-written last row to runs.tsv.broken, and write the header of a new table."""
        self._file.seek(0)
        whole, begun = _split_whole(self._file.read())
        if begun:
            self._put_aside(begun.rstrip(b"\n") + b"\n")
            self._file.truncate(len(whole))
        self._size = len(whole)
        if not whole:
            self._write(COLUMNS)

    def _put_aside(self, content: bytes) -> None:
        with open(f"{self.path}.broken", "ab") as aside:
            aside.write(content)

    def append(self, row: dict[str, object]) -> bool:
        """Add a run, and return when it is on the disk: whether the table was as it had been left.

        If it was not (an editor saves by renaming, and a file without a name takes rows without a word), the file
        that now has the name gets all rows of this launch that it lacks. Raises Refusal if it is no such table.
        """
        self._rows.append(row)
        if self._is_as_left():
            self._write([row[name] for name in COLUMNS])
            return True
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        try:
            there = {(row["campaign"], row["run"]) for row in read_rows(self.path, to_append=True)}
        except Refusal as refusal:
            for lost in self._rows:
                self._put_aside(as_line([lost[name] for name in COLUMNS]))
            raise Refusal(f"{refusal}; this campaign's rows are in {self.path}.broken") from None
        self.mend()
        for lost in self._rows:
            if (lost["campaign"], str(lost["run"])) not in there:
                self._write([lost[name] for name in COLUMNS])
        return False

    def _is_as_left(self) -> bool:
        try:
            now, left = os.stat(self.path), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return False
        grown = self._shared and now.st_size > self._size
        return os.path.samestat(now, left) and (grown or now.st_size == self._size)

    def close(self) -> None:
        self._file.close()

    def _write(self, values: list[object]) -> None:
        self._file.write(as_line(values))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._size = os.path.getsize(self.path)


def as_line(values: list[object]) -> bytes:
    line = io.StringIO()
    csv.writer(line, delimiter="\t", lineterminator="\n").writerow(values)
    return line.getvalue().encode()


def write_timing_log(path: Path, epochs: list[tuple[float, float]]) -> None:
    """DAWNBench's table of one run: (seconds, accuracy) pairs become hours and percent. Whole or not at all."""
    lines = ["epoch\thours\ttop1Accuracy"]
    lines += [f"{i}\t{seconds / 3600!r}\t{100 * accuracy:.6g}" for i, (seconds, accuracy) in enumerate(epochs, 1)]
    with written_whole(path) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes the place of `path` when all is on the disk."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
