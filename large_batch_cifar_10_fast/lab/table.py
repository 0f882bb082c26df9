"""The tables of a campaign: runs.tsv, epochs.tsv and timing_log.tsv, and the conditions that its runs share.

A campaign is a named set of runs. A launch makes the runs that runs.tsv lacks and that no other launch is making.
"""

import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from .. import ConfigError
from ..core.clock import PARTS
from ..core.team import warn
from ..files import flush_to_disk, lock, write_atomically

Row = dict[str, str]

GOAL = 0.94  # accuracy
# What may decide a result. Runs that differ in one of these are not of one campaign.
CONDITIONS = (
    *("recipe", "options", "workers", "digest", "code", "core", "torch"),
    *("precision", "compile", "no_graph", "micro_batches", "environment"),
)
PLACE = ("device", "processes")  # equal within a campaign; between campaigns they only rule out comparing times
SIZES = ("training_images", "parameters", "pflop")  # of a run: they follow from the other conditions
NUMBERS = (
    *("train_accuracy", "train_loss", "validation_accuracy", "validation_count", "validation_images"),
    *("validation_loss", *PARTS, "seconds", "cpu_seconds", "last_validation", "peak_memory"),
)
COLUMNS = (
    *(
        "campaign",
        "run",
        "seed",
        *CONDITIONS,
        *PLACE,
        "driver",
        "clocks",
        "data",
        "images",
        *SIZES,
        "version",
        "commit",
    ),
    *(*NUMBERS, "goal_epoch", "goal_seconds", "launch"),
)
EPOCHS = (
    *("campaign", "run", "epoch", "seconds"),
    *("train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "launch"),
)
CURVE = ("epoch", "hours", "top1Accuracy")  # DAWNBench's
# Environment variables that are known to change results.
DECIDING = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_USE_FAST_MATH",
    "TRITON_F32_DEFAULT",
)


def diverged(row: Mapping[str, object]) -> bool:
    return not all(math.isfinite(float(str(row[name]))) for name in ("train_loss", "validation_loss"))


def reached_goal(row: Mapping[str, object]) -> bool:
    """Return whether a run reached 94%, by its number of correct images. A diverged run did not."""
    return not diverged(row) and int(str(row["validation_count"])) >= GOAL * int(str(row["validation_images"]))


# ---- Conditions


def differences(one: Mapping[str, str], other: Mapping[str, str], names: Iterable[str]) -> str:
    """Return where two rows differ, as `precision (bf16, not fp32), epochs (9, not 8)`, or "".

    A missing value equals all values. The recipe's options are compared one by one.
    """
    found = []
    for name in names:
        mine = one.get(name)
        others = other.get(name)
        if not mine or not others or mine == others:
            continue
        by_option = differing_options(mine, others) if name == "options" else []
        found += by_option or [f"{name} ({mine}, not {others})"]  # the whole value, if no single option differs
    return ", ".join(found)


def differing_options(mine: str, others: str) -> list[str]:
    a = from_pairs(mine)
    b = from_pairs(others)
    found = [f"{name} ({a[name]}, not {b[name]})" for name in a if name in b and a[name] != b[name]]
    found += [f"{name} ({a[name]}; the other has no such option)" for name in a if name not in b]
    return found + [f"{name} (no such option; the other has {b[name]})" for name in b if name not in a]


def from_pairs(text: str) -> dict[str, str]:
    """Return options as tables and logs have them, `name=value name=value`, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def environment() -> str:
    """Return those variables of DECIDING that are set, as `NAME=value,NAME=value`, or "-"."""
    return ",".join(as_text(name) for name in DECIDING if name in os.environ) or "-"


def as_text(variable: str) -> str:
    """Return `NAME=value`, with separators of tables and logs encoded as in a URL: %2C is a comma."""
    return f"{variable}={quote(os.fsencode(os.environ[variable]), safe=':/')}"


# ---- Reading


def read(path: Path) -> list[Row]:
    """Return the rows of a runs.tsv, or none if it does not exist.

    A half-written last row is left out. Raise ConfigError, naming the line, if the table is damaged or not ours.
    """
    return Reader(path).new_rows()


class Reader:
    """A reader of a runs.tsv to which launches append. It reads each row once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0  # of what was read, in bytes
        self.lines = 0
        self.known: set[tuple[str, str]] = set()  # campaign and run of each row

    def new_rows(self) -> list[Row]:
        """Return the rows that were appended since the last call. Raise ConfigError as `read` does."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self.end:  # it was deleted or cut, and another stands in its place
                    self.end = self.lines = 0
                    self.known.clear()
                file.seek(self.end)
                content = file.read()
        except FileNotFoundError:
            return []
        lines = complete_lines(content)
        if lines and not self.lines:
            check_columns(self.path, lines[0], COLUMNS)
        first_row = 0 if self.lines else 1
        new: set[tuple[str, str]] = set()
        numbered = [(line, self.lines + place) for place, line in enumerate(lines, 1)]
        rows = [self.read_row(line, number, new) for line, number in numbered[first_row:]]
        self.known |= new  # all rows are right
        self.end += content.rfind(b"\n") + 1
        self.lines += len(lines)
        return rows

    def read_row(self, line: str, number: int, new: set[tuple[str, str]]) -> Row:
        try:
            row = dict(zip(COLUMNS, line.split("\t"), strict=True))
            for name in NUMBERS:
                float(row[name])
            for name in ("run", "seed"):
                int(row[name])
            key = row["campaign"], row["run"]
            if key in self.known or key in new:
                raise ValueError(f"run {row['run']} of campaign {row['campaign']} occurs a second time")
        except ValueError as error:
            raise ConfigError(f"{self.path}, line {number}: {error}; correct it or choose another --out") from None
        new.add(key)
        return row


def complete_lines(content: bytes) -> list[str]:
    """Return the lines of a table. A last line without a newline was cut short, and is left out."""
    return content[: content.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def check_columns(path: Path, head: str, columns: Sequence[str]) -> None:
    if head.split("\t") != [*columns]:
        raise ConfigError(f"{path} has other columns than this version writes: move it or choose another --out")


def new_name() -> str:
    """Return a name that no other launch has, not even one in another container in the same second."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def check_conditions(rows: Iterable[Row], now: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ConfigError if the conditions of a campaign's rows differ from the conditions `now`."""
    for row in rows:
        text = differences(now, as_of_run_0(row), names)
        if text:
            advice = "give the same options again, or another --campaign"
            raise ConfigError(f"campaign {row['campaign']} cannot be continued with {text}: {advice}")


def as_of_run_0(row: Row) -> Row:
    """Return a row with run 0 and its seed: what all rows of a campaign have in common."""
    return row | {"seed": str(int(row["seed"]) - int(row["run"])), "run": "0"}


# ---- Writing

LONGEST = 1 << 16  # bytes of a row, at most


class Table:
    """A table to which several launches append. It is opened for each append, so it may be moved in between."""

    def __init__(self, path: Path, columns: Sequence[str], durable: bool) -> None:
        """The rows of a `durable` table are on the disk when `append` returns."""
        self.path = path
        self.columns = columns
        self.durable = durable
        self.waiting: list[str] = []  # lines that a full disk did not take

    def append(self, *rows: Mapping[str, object]) -> None:
        """Append rows, after those that could not be written before. A half-written last line moves to PATH.broken.

        Raise ConfigError for a table with other columns, and OSError if writing fails. Then call `write` again.
        """
        self.add(*rows)
        self.write()

    def add(self, *rows: Mapping[str, object]) -> None:
        """Let rows wait for the next `write`."""
        self.waiting += ["\t".join(str(row[name]) for name in self.columns) + "\n" for row in rows]

    def write(self) -> None:
        """Append the rows that wait. Raise as `append` does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            lock(file.fileno(), self.path)
            self.check_head(file)
            self.cut_half_line(file)
            length = file.seek(0, os.SEEK_END)
            head = "" if length else "\t".join(self.columns) + "\n"
            content = (head + "".join(self.waiting)).encode()
            try:
                while content:
                    written = os.write(file.fileno(), content)  # at the end, whoever appended last
                    content = content[written:]
                if self.durable:  # without, a power failure may lose the last rows
                    flush_to_disk(file.fileno(), self.path)
            except OSError:
                os.ftruncate(file.fileno(), length)  # so that the next call writes no row twice
                raise
        self.waiting.clear()

    def check_head(self, file: BinaryIO) -> None:
        file.seek(0)
        head = file.readline()
        if head.endswith(b"\n"):
            check_columns(self.path, head.decode(errors="replace").rstrip("\n"), self.columns)

    def cut_half_line(self, file: BinaryIO) -> None:
        """Move what follows the last newline to PATH.broken."""
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - LONGEST))
        end = file.read()
        half = end[end.rfind(b"\n") + 1 :]
        if half:
            with open(f"{self.path}.broken", "ab") as aside:
                aside.write(half + b"\n")
            file.truncate(length - len(half))
            warn(f"the last row of {self.path} was half-written: it was moved to {self.path}.broken")


def write_timing_log(path: Path, epochs: Iterable[tuple[float, float]]) -> None:
    """Write DAWNBench's table of one run, in hours and percent, from (seconds, accuracy) of each epoch."""
    lines = [f"{i}\t{seconds / 3600}\t{100 * accuracy:.6g}" for i, (seconds, accuracy) in enumerate(epochs, 1)]
    with write_atomically(path) as unfinished:
        unfinished.write_text("\n".join(["\t".join(CURVE), *lines, ""]))
