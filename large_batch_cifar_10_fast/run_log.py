"""What a campaign says: the clock, the lines on STDOUT, and what goes into its two tables."""

import contextlib
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from . import __version__
from .campaign import changes, code_digest, refuse_other
from .distributed import Team
from .images import Images
from .settings import REPO, Settings
from .tables import GOAL, METHOD_COLUMNS, PARTS, Journal, Row, write_timing_log

Item = TypeVar("Item")


class Clock:
    """Adds up seconds by part. Every reading waits until the devices of all processes have finished."""

    def __init__(self, wait: Callable[[], None], seconds: dict[str, float] | None = None) -> None:
        self._wait = wait
        self.seconds = dict(seconds or {})

    @contextlib.contextmanager
    def counting(self, part: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def fork(self) -> "Clock":
        """A clock that goes on from here; runs share what was done once for all of them."""
        return Clock(self._wait, self.seconds)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Score:
    """How many of so many images were right, and the mean smoothed loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class RunLog:
    """Prints and writes for the whole team; on all processes but the leading one it does nothing."""

    def __init__(self, settings: Settings, team: Team, images: Images, finished: list[Row]) -> None:
        """`finished` are the rows of the campaign that is resumed, if one is. Raises Refusal."""
        self.settings, self.speaks, self.rows = settings, team.leads, {int(row["run"]): row for row in finished}
        self.epochs: list[tuple[float, float]] = []  # seconds and accuracy after each epoch of this run
        if not self.speaks:
            return
        now = datetime.now(timezone.utc)
        started = f"{now:%Y-%m-%dT%H:%M:%SZ}"
        self.facts = {
            "campaign": f"{now:%Y%m%dT%H%M%S}-{os.getpid()}", "started": started, "runs": settings.runs,
            "workers": team.total_workers, "processes": team.processes, "device": device_name(team),
            "data": os.path.abspath(settings.data) if os.path.exists(settings.data) else settings.data,
            "images": images.name, "digest": images.digest(), "version": __version__, "commit": commit(),
            "code": code_digest(), "torch": version("torch"), "no_warmup": settings.no_warmup,
        }  # fmt: skip
        if finished:
            refuse_other(finished[0], changes(finished[0], device=self.facts["device"]))
            self.facts |= {name: finished[0][name] for name in ("campaign", "started")}
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        self._journal = Journal(Path(settings.out) / "runs.tsv")
        self._journal.mend()
        for line in self._head(images, started):
            self._print(f"# {line}")

    def runs_to_make(self) -> list[int]:
        """The runs of the campaign that are not finished yet."""
        return [run for run in range(self.settings.runs) if run not in self.rows]

    def set_up(self, clock: Clock, steps_per_epoch: int) -> None:
        """The published lines about what all runs share; from here on the steps go by on a terminal."""
        steps = self.settings.epochs * steps_per_epoch
        self._bar = tqdm(
            total=self.settings.runs * steps, initial=len(self.rows) * steps, unit="step", file=sys.stderr,
            disable=None if self.speaks else True,
        )  # fmt: skip
        self._print(f"Uploaded data to GPUs {clock.seconds['upload']:.3f}s")
        self._print(f"Compute patch whitening statistics:     {clock.seconds['whitening']:.3f}s")
        for run in sorted(self.rows):
            self._print(run_line(self.rows[run]))

    def watch(self, steps: Iterable[Item], run: int, epoch: int) -> Iterator[Item]:
        """The same steps, shown going by."""
        reached = f"{sum(map(reached_goal, self.rows.values()))} of {len(self.rows)} runs over 94%"
        self._bar.set_description(f"run {run + 1} epoch {epoch}, {reached}", refresh=False)
        for step in steps:
            yield step
            self._bar.update()

    def epoch(self, clock: Clock, validation: Score) -> None:
        self.epochs.append((clock.total, validation.accuracy))

    def run(self, run: int, clock: Clock, train: Score, validation: Score) -> None:
        """A finished run: its row, its line, and for the first its epochs and the parts of its time."""
        epochs, self.epochs = self.epochs, []
        if not self.speaks:
            return
        goal = [(i, seconds) for i, (seconds, accuracy) in enumerate(epochs, 1) if accuracy >= GOAL]
        goal_epoch, goal_seconds = goal[0] if goal else ("", "")
        row = self.rows[run] = {
            **self.facts, "run": run, "seed": self.settings.seed + run,
            **{name: getattr(self.settings, name) for name in METHOD_COLUMNS},
            "train_accuracy": train.accuracy, "train_loss": train.loss,
            "validation_accuracy": validation.accuracy, "validation_count": validation.correct,
            "validation_images": validation.images, "validation_loss": validation.loss,
            **{part: clock.seconds[part] for part in PARTS}, "seconds": clock.total,
            "goal_epoch": goal_epoch, "goal_seconds": goal_seconds,
        }  # fmt: skip
        if run == 0:
            write_timing_log(Path(self.settings.out) / "timing_log.tsv", epochs)
        self._journal.append(row)
        self._print(run_line(row))
        if run == 0:
            parts = ", ".join(f"{part} {clock.seconds[part]:.3f}s" for part in PARTS)
            self._print(f"# wall time of the first run: {parts}")
        if not math.isfinite(train.loss) or not math.isfinite(validation.loss):
            warn(f"run {run} (seed {self.settings.seed + run}) diverged: its loss is not finite")

    def summary(self) -> None:
        """The three lines that close the published log, over the whole seconds of each run."""
        self._bar.close()
        if not self.speaks:
            return
        seconds = [float(row["seconds"]) for row in self.rows.values()]
        accuracies = [float(row["validation_accuracy"]) for row in self.rows.values()]
        self._print(f"Maximum training time {max(seconds)} median {statistics.median(seconds)}")
        self._print(f"Lowest accuracy {min(accuracies)} median {round(statistics.median(accuracies), 6)}")
        self._print(f"{sum(map(reached_goal, self.rows.values()))} runs reached 0.94 out of {len(self.rows)}")

    def _head(self, images: Images, now: str) -> list[str]:
        facts = self.facts
        cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        if torch.cuda.is_available():
            cuda += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        return [
            f"large_batch_cifar_10_fast {__version__}, commit {facts['commit']}, code {facts['code']}, {now}",
            f"Python {platform.python_version()}, torch {torch.__version__}{cuda}",
            f"{facts['workers']} workers on {facts['processes']} process{'es' * (facts['processes'] > 1)}, "
            f"{facts['device']}",
            f"data {facts['images']}: {len(images.train_images)} training and {len(images.test_images)} test images, "
            f"SHA-256 {facts['digest']}",
            "settings " + " ".join(f"{name}={value}" for name, value in asdict(self.settings).items()),
            f"campaign {facts['campaign']}, {len(self.rows)} of {self.settings.runs} runs made before",
        ]

    def _print(self, line: str) -> None:
        if self.speaks:
            with tqdm.external_write_mode():
                print(line, flush=True)


def reached_goal(row: Mapping[str, object]) -> bool:
    """Counted in images where the row tells them: no rounded figure decides."""
    return int(row["validation_count"]) >= GOAL * int(row["validation_images"])


def run_line(row: Mapping[str, object]) -> str:
    """A run's line of the published log, with a fourth decimal for the accuracies."""
    train, loss, validation, validation_loss, seconds = (
        float(row[name])
        for name in ("train_accuracy", "train_loss", "validation_accuracy", "validation_loss", "seconds")
    )
    return (
        f"Train acc {train:.4f} loss {loss:.3f}, validation acc {validation:.4f} loss {validation_loss:.3f} "
        f"wall time {seconds:.3f}s"
    )


def warn(text: str) -> None:
    """A line on STDERR, clear of the progress bar."""
    with tqdm.external_write_mode():
        print(f"Warning: {text}", file=sys.stderr, flush=True)


def device_name(team: Team) -> str:
    if team.device.type == "cuda":
        return f"{team.processes} x {torch.cuda.get_device_name(team.device)}"
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("model name"))
        return f"CPU {line.split(':')[1].strip()}, {team.processes} x {torch.get_num_threads()} threads"
    return f"CPU {platform.machine()}, {team.processes} x {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"
