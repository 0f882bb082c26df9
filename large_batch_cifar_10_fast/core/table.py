"""The tables of a campaign: runs.tsv, epochs.tsv and timing_log.tsv, and the conditions that its runs share.

A campaign is its name. A launch makes those of its runs that its campaign lacks in runs.tsv.
"""

import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from .. import ConfigError
from .files import flush_to_disk, lock, write_atomically
from .team import warn

Row = dict[str, str]

GOAL = 0.94  # accuracy
PARTS = ("upload", "preprocessing", "whitening", "training")  # of the training time (method, section 6)
# What may decide a result. Runs that differ in one of these are not of one campaign.
CONDITIONS = (
    *("recipe", "options", "workers", "digest", "code", "torch"),
    *("precision", "compile", "no_graph", "micro_batches", "environment"),
)
PLACE = ("device", "processes")  # alike within a table; between tables they only rule out a comparison of times
NUMBERS = (
    *("train_accuracy", "train_loss", "validation_accuracy", "validation_count", "validation_images"),
    *("validation_loss", *PARTS, "seconds", "cpu_seconds", "last_validation", "peak_memory"),
)
COLUMNS = (
    *("campaign", "run", "seed", *CONDITIONS, *PLACE, "driver", "clocks", "data", "images", "version", "commit"),
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
FAMILIES = r"(ATEN|CUBLAS\w*|CUDNN|DNNL|MKL|NCCL|ONEDNN|PYTORCH|TORCH(_?(COMPILE|DYNAMO|INDUCTOR))?|TRITON)_"


class ConflictError(ConfigError):
    """Another launch has written the same run, or runs of the same campaign under other conditions."""


def diverged(row: Mapping[str, object]) -> bool:
    return not all(math.isfinite(float(str(row[name]))) for name in ("train_loss", "validation_loss"))


def reached_goal(row: Mapping[str, object]) -> bool:
    """Return whether the run counts as reaching 94%: by its number of images, and unless it diverged."""
    return not diverged(row) and int(str(row["validation_count"])) >= GOAL * int(str(row["validation_images"]))


# ---- Conditions


def differences(one: Mapping[str, str], other: Mapping[str, str], names: Iterable[str]) -> str:
    """Return where two rows differ, as `precision (bf16, not fp32), epochs (9, not 8)`, or "".

    A value that is missing equals any. The recipe's options are compared one by one.
    """
    found = []
    for name in names:
        mine = one.get(name)
        others = other.get(name)
        if not mine or not others or mine == others:
            continue
        by_option = differing_options(mine, others) if name == "options" else []
        found += by_option or [f"{name} ({mine}, not {others})"]  # all of it, if no option tells
    return ", ".join(found)


def differing_options(mine: str, others: str) -> list[str]:
    a = from_pairs(mine)
    b = from_pairs(others)
    return [f"{key} ({a.get(key)}, not {b.get(key)})" for key in a | b if a.get(key) != b.get(key)]


def from_pairs(text: str) -> dict[str, str]:
    """Return options as tables and logs have them, `name=value name=value`, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def environment() -> str:
    """Return those variables of DECIDING that are set, as `NAME=value,NAME=value`, or "-"."""
    return ",".join(as_text(name) for name in DECIDING if name in os.environ) or "-"


def other_environment() -> str:
    """Return the other variables of their families but folders and logs, as `NAME=value NAME=value`, for the log."""
    names = [name for name in sorted(os.environ) if re.match(FAMILIES, name) and name not in DECIDING]
    return " ".join(as_text(name) for name in names if not re.search("LOG|DIR", name))


def as_text(variable: str) -> str:
    """Return `NAME=value`; what would end a value in a table or a log is encoded as in a URL: %2C is a comma."""
    return f"{variable}={quote(os.fsencode(os.environ[variable]), safe=':/')}"


# ---- Reading


def read(path: Path) -> list[Row]:
    """Return the rows of a runs.tsv, or none if it does not exist.

    A half-written last row is left out. Raise ConfigError, naming the line, if the table is damaged or not ours.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder, or one that may not be read, or too long a name
        raise ConfigError(f"{path} cannot be read ({error.strerror}): choose another --out") from error
    head, *lines = complete_lines(content) or ["\t".join(COLUMNS)]
    check_columns(path, head, COLUMNS)
    rows: dict[tuple[str, ...], Row] = {}
    for number, line in enumerate(lines, 2):
        try:
            row = dict(zip(COLUMNS, line.split("\t"), strict=True))
            for name in NUMBERS:
                float(row[name])
            row |= {name: whole_number(row[name]) for name in ("run", "seed")}
            if (key := (row["campaign"], row["run"])) in rows:
                raise ValueError(f"run {row['run']} of campaign {row['campaign']} occurs a second time")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; correct it or choose another --out") from None
        rows[key] = row
    return list(rows.values())


def whole_number(text: str) -> str:
    """Return a whole number as we write it; pandas may have made `0.0` of `0`. Raise ValueError."""
    if not re.fullmatch(r"\d+(\.0+)?", text):
        raise ValueError(f"{text[:40]!r} is no run or seed")
    return text.partition(".")[0]


def complete_lines(content: bytes) -> list[str]:
    """Return the lines of a table that end in a newline: a last one without was cut short."""
    return content[: content.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def check_columns(path: Path, head: str, columns: Sequence[str]) -> None:
    if head.split("\t") != [*columns]:
        raise ConfigError(f"{path} has other columns than this version writes: move it or choose another --out")


def new_name() -> str:
    """Return a name that no other launch has, also of another container in the same second."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def campaign_named(out: Path, name: str, resume: bool) -> tuple[str, list[Row]]:
    """Return name and rows of the campaign with this name, of the last one with `resume`, or of a new one.

    A new one is named by date, time and chance, and has no rows. Raise ConfigError.
    """
    if not (name or resume):
        return new_name(), []
    rows = read(out / "runs.tsv")
    if not (name or rows):
        raise ConfigError(f"--resume: there is no campaign in {out}: start one without --resume")
    name = name or rows[-1]["campaign"]
    return name, [row for row in rows if row["campaign"] == name]


def check_conditions(rows: Iterable[Row], now: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ConfigError if a campaign's rows were made under other conditions than a run would be now."""
    for row in rows:
        text = differences(now, as_of_run_0(row), names)
        if text:
            advice = "give the same options again, or another --campaign"
            raise ConfigError(f"campaign {row['campaign']} cannot be continued with {text}: {advice}")


def as_of_run_0(row: Row) -> Row:
    """Return a row with the seed of its campaign's first run."""
    return row | {"seed": str(int(whole_number(row["seed"])) - int(whole_number(row["run"])))}


# ---- Writing

TAIL = 1 << 16  # bytes: more than the longest row


class Table:
    """A table to which several launches append. Of what others wrote, it reads each row once.

    The table is opened for each append, so it may be renamed, deleted or truncated in between: then all rows that were
    appended are written again. A half-written last line moves to PATH.broken.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], keys: int, check: Callable[[Row], None] = lambda row: None
    ) -> None:
        """The first `keys` columns name a row. Without keys all rows are new, and none is read.

        `check` raises ConflictError for a row of another launch beside which ours must not stand.
        """
        self.path = path
        self.columns = columns
        self.keys = keys
        self.check = check
        self.appended: dict[tuple[str, ...], str] = {}  # our lines, by key
        self.waiting: dict[tuple[str, ...], str] = {}  # those that the table may lack
        self.there: dict[tuple[str, ...], int] = {}  # hashes of all lines that are there, by key
        self.end = 0  # of what was read, in bytes
        self.last = b""  # the line before it

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append those of these rows, and of earlier ones, that the table lacks.

        With keys, return when they are on the disk.
        Raise ConfigError for a table with other columns, and OSError as the disk does. Raise ConflictError if the table
        has one of these rows with another content, or `check` does; then they are written to PATH.conflict.
        """
        for row in rows:
            texts = [str(row[name]) for name in self.columns]
            self.waiting[tuple(texts[: self.keys or None])] = "\t".join(texts) + "\n"
        if self.keys:
            self.appended |= self.waiting
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            lock(file.fileno(), self.path)
            try:
                self.catch_up(file)
                new = self.find_new()
            except ConflictError as conflict:
                self.set_aside(conflict)
            text = "".join(new.values()).encode()
            if not file.tell():
                text = ("\t".join(self.columns) + "\n").encode() + text
            file.write(text)
            file.flush()
            if self.keys:  # without, a power failure may lose the last rows
                flush_to_disk(file.fileno(), self.path)
            self.remember(text, file.tell())
        self.waiting.clear()

    def catch_up(self, file: BinaryIO) -> None:
        """Read what others appended since the last time, and leave the file at its end."""
        file.seek(0)
        head = file.readline()
        if head.endswith(b"\n"):
            check_columns(self.path, head.decode(errors="replace").rstrip("\n"), self.columns)
        length = file.seek(0, os.SEEK_END)
        start = max(0, length - TAIL)
        if self.keys:
            file.seek(self.end - len(self.last))
            if file.read(len(self.last)) != self.last:  # it was renamed, deleted or truncated
                self.there.clear()
                self.waiting |= self.appended
                self.end = 0
            start = self.end
        file.seek(start)
        content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        partial = content[len(complete) :]
        if partial:
            with open(f"{self.path}.broken", "ab") as aside:
                aside.write(partial + b"\n")
            file.truncate(length - len(partial))
            warn(f"the last row of {self.path} was half-written: it is in {self.path}.broken now")
        if self.keys:
            self.remember(complete, start + len(complete))
            for line in complete_lines(complete)[0 if start else 1 :]:
                texts = line.split("\t")
                if len(texts) == len(self.columns):
                    self.check(dict(zip(self.columns, texts, strict=True)))
        file.seek(0, os.SEEK_END)

    def remember(self, content: bytes, end: int) -> None:
        """Note the lines of the table that end at `end`."""
        if not content or not self.keys:
            return
        for line in complete_lines(content):
            self.there[tuple(line.split("\t")[: self.keys])] = hash(line + "\n")
        self.end = end
        self.last = content[content.rfind(b"\n", 0, -1) + 1 :]

    def find_new(self) -> dict[tuple[str, ...], str]:
        """Return our lines that the table lacks. Raise ConflictError if it has one with another content."""
        if not self.keys:
            return self.waiting
        for key, line in self.waiting.items():
            if self.there.get(key, hash(line)) != hash(line):
                raise ConflictError(f"{self.path} has another row of {' '.join(key)}, by another launch")
        return {key: line for key, line in self.waiting.items() if key not in self.there}

    def set_aside(self, conflict: ConflictError) -> None:
        """Write our lines that the table lacks to PATH.conflict, and raise a ConflictError that says so."""
        aside = Path(f"{self.path}.conflict")
        with open(aside, "ab") as file:
            if not file.tell():
                file.write(("\t".join(self.columns) + "\n").encode())
            file.write("".join(self.waiting.values()).encode())
        self.waiting.clear()
        raise ConflictError(f"{conflict}: this launch's is in {aside}; give each its own --campaign or --share")


def write_timing_log(path: Path, epochs: Iterable[tuple[float, float]]) -> None:
    """Write DAWNBench's table of one run, in hours and percent, from (seconds, accuracy) of each epoch."""
    lines = [f"{i}\t{seconds / 3600}\t{100 * accuracy:.6g}" for i, (seconds, accuracy) in enumerate(epochs, 1)]
    with write_atomically(path) as unfinished:
        unfinished.write_text("\n".join(["\t".join(CURVE), *lines, ""]))
