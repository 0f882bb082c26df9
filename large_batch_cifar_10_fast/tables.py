"""The tables a campaign leaves behind, runs.tsv and timing_log.tsv: how they are checked and written.

Torch is not imported here, so that a folder that cannot be written is refused before anything has started.
"""

import contextlib
import csv
import os
from collections.abc import Iterator
from pathlib import Path

from .settings import Refusal, Settings

PARTS = ("upload", "preprocessing", "whitening", "training")  # of the time that counts (method, section 6)
NOT_METHOD = ("out", "save", "runs", "data", "demo", "workers", "seed", "no_warmup")  # said elsewhere or no matter
METHOD_COLUMNS = [name for name in Settings.__dataclass_fields__ if name not in NOT_METHOD]
COLUMNS = [
    "campaign", "started", "run", "seed", "workers", "processes", "device", "data", "digest", "version", "commit",
    "torch", "warmup", *METHOD_COLUMNS, "train_accuracy", "train_loss", "validation_accuracy", "validation_count",
    "validation_images", "validation_loss", *PARTS, "seconds", "goal_epoch", "goal_seconds",
]  # fmt: skip


def check_out(settings: Settings) -> None:
    """Refuse an `--out` or `--save` that could not be written, or a runs.tsv of other columns."""
    out, save = Path(settings.out), Path(settings.save)
    for option, folder in (("--out", out), *([("--save", save.parent)] if settings.save else [])):
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise Refusal(f"{option} {folder} cannot be written: {existing} is no folder that you may write to")
    if settings.save and save.is_dir():
        raise Refusal(f"--save {save} is a folder: name a file")
    for name in ("runs.tsv", "timing_log.tsv"):
        path = out / name
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise Refusal(f"{path} cannot be written: move it or choose another --out")
    runs = out / "runs.tsv"
    if runs.exists() and runs.stat().st_size:
        with open(runs, newline="") as file:
            if next(csv.reader(file, delimiter="\t"), None) != COLUMNS:
                raise Refusal(f"{runs} has other columns than this version writes: move it or choose another --out")


def append_row(path: Path, row: dict[str, object]) -> None:
    """Append a run to runs.tsv, with the header if it is new, and see it to the disk."""
    with open(path, "a+", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


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
