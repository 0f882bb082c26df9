"""The tables of a campaign: runs.tsv, epochs.tsv and timing_log.tsv, and the conditions that its runs share.

A campaign is its name. A launch makes those of its runs that its campaign lacks in runs.tsv.
"""

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from urllib.parse import quote

from .. import ConfigError
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
    *(*NUMBERS, "goal_epoch", "goal_seconds"),
)
EPOCHS = (
    *("campaign", "run", "epoch", "seconds"),
    *("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"),
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

warn_once = cache(warn)


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
        a, b = one.get(name), other.get(name)
        if a and b and a != b:
            mine, others = (from_pairs(text) if name == "options" else {name: text} for text in (a, b))
            keys = [key for key in mine | others if mine.get(key) != others.get(key)]
            found += [f"{key} ({mine.get(key)}, not {others.get(key)})" for key in keys]
    return ", ".join(found)


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
            for name in ("run", "seed", *NUMBERS):
                float(row[name])
            if (key := (row["campaign"], row["run"])) in rows:
                raise ValueError(f"run {row['run']} of campaign {row['campaign']} occurs a second time")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; correct it or choose another --out") from None
        rows[key] = row
    return list(rows.values())


def complete_lines(content: bytes) -> list[str]:
    """Return the lines of a table that end in a newline: a last one without was cut short."""
    return content[: content.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def check_columns(path: Path, head: str, columns: Sequence[str]) -> None:
    if head.split("\t") != [*columns]:
        raise ConfigError(f"{path} has other columns than this version writes: move it or choose another --out")


def campaign_named(out: Path, name: str, resume: bool) -> tuple[str, list[Row]]:
    """Return name and rows of the campaign with this name, of the last one with `resume`, or of a new one.

    A new one is named by date, time and process, and has no rows. Raise ConfigError.
    """
    if not (name or resume):
        return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}", []
    rows = read(out / "runs.tsv")
    if not (name or rows):
        raise ConfigError(f"--resume: there is no campaign in {out}: start one without --resume")
    name = name or rows[-1]["campaign"]
    return name, [row for row in rows if row["campaign"] == name]


def check_conditions(rows: Iterable[Row], now: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ConfigError if a campaign's rows were made under other conditions than a run would be now."""
    for row in rows:
        base = row | {"seed": str(int(row["seed"]) - int(row["run"]))}  # of run 0
        if text := differences(now, base, names):
            advice = "give the same options again, or another --campaign"
            raise ConfigError(f"campaign {row['campaign']} cannot be continued with {text}: {advice}")


# ---- Writing


def append(path: Path, columns: Sequence[str], keys: int, rows: Iterable[Mapping[str, object]]) -> None:
    """Append those rows whose first `keys` columns the table lacks, and return when they are on the disk.

    The table is opened for each append, so it may be renamed, deleted or truncated in between. A half-written last line
    moves to PATH.broken. Raise ConfigError for a table with other columns, and OSError as the disk does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        lock(file.fileno(), path)
        file.seek(0)
        lines = complete_lines(content := file.read())
        if partial := content[content.rfind(b"\n") + 1 :]:
            with open(f"{path}.broken", "ab") as aside:
                aside.write(partial + b"\n")
            file.truncate(len(content) - len(partial))
            warn(f"the last row of {path} was half-written: it is in {path}.broken now")
        if lines:
            check_columns(path, lines[0], columns)
        existing = {tuple(line.split("\t")[:keys]) for line in lines}
        texts = [tuple(str(row[name]) for name in columns) for row in rows]
        new = [*([] if lines else [columns]), *(text for text in texts if text[:keys] not in existing)]
        file.write("".join("\t".join(text) + "\n" for text in new).encode())
        file.flush()
        os.fsync(file.fileno())


def lock(descriptor: int, path: Path) -> None:
    """Wait for the lock on an open file. Some file systems have none: warn once, and continue."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        warn_once(f"{path} cannot be locked ({error.strerror}): do not write it from several launches at once")


def write_timing_log(path: Path, epochs: Iterable[tuple[float, float]]) -> None:
    """Write DAWNBench's table of one run, in hours and percent, from (seconds, accuracy) of each epoch."""
    lines = [f"{i}\t{seconds / 3600}\t{100 * accuracy:.6g}" for i, (seconds, accuracy) in enumerate(epochs, 1)]
    with write_atomically(path) as unfinished:
        unfinished.write_text("\n".join(["\t".join(CURVE), *lines, ""]))


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
