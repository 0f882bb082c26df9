"""What a campaign says: the clock, the lines on STDOUT, and what goes into its two tables."""

import contextlib
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from . import __version__
from .distributed import Team
from .images import Images
from .settings import REPO, Settings
from .tables import METHOD_COLUMNS, PARTS, append_row, write_timing_log

GOAL = 0.94
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

    def __init__(self, settings: Settings, team: Team, images: Images) -> None:
        self.settings, self.speaks = settings, team.leads
        self.seconds: list[float] = []
        self.accuracies: list[float] = []
        self.epochs: list[tuple[float, float]] = []  # seconds and accuracy after each epoch of this run
        if not self.speaks:
            return
        now = datetime.now(timezone.utc)
        self.facts = {
            "campaign": f"{now:%Y%m%dT%H%M%S}-{os.getpid()}", "started": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "workers": team.total_workers, "processes": team.processes, "device": device_name(team),
            "data": images.name, "digest": images.digest(), "version": __version__, "commit": commit(),
            "torch": torch.__version__, "warmup": int(not settings.no_warmup),
        }  # fmt: skip
        for line in self._head(images):
            self._print(f"# {line}")
        Path(settings.out).mkdir(parents=True, exist_ok=True)

    def set_up(self, clock: Clock, steps_per_epoch: int) -> None:
        """The published lines about what all runs share; from here on the steps go by on a terminal."""
        total = self.settings.runs * self.settings.epochs * steps_per_epoch
        self._bar = tqdm(total=total, unit="step", disable=None if self.speaks else True, file=sys.stderr)
        self._print(f"Uploaded data to GPUs {clock.seconds['upload']:.3f}s")
        self._print(f"Compute patch whitening statistics:     {clock.seconds['whitening']:.3f}s")

    def watch(self, steps: Iterable[Item], run: int, epoch: int) -> Iterator[Item]:
        """The same steps, shown going by."""
        self._bar.set_description(f"run {run + 1} epoch {epoch}", refresh=False)
        for step in steps:
            yield step
            self._bar.update()

    def epoch(self, clock: Clock, validation: Score) -> None:
        self.epochs.append((clock.total, validation.accuracy))

    def run(self, run: int, clock: Clock, train: Score, validation: Score) -> None:
        """A finished run: its line, its row, and after the first its epochs and the parts of its time."""
        epochs, self.epochs = self.epochs, []
        self.seconds.append(clock.total)
        self.accuracies.append(validation.accuracy)
        if not self.speaks:
            return
        goal = [(i, seconds) for i, (seconds, accuracy) in enumerate(epochs, 1) if accuracy >= GOAL]
        goal_epoch, goal_seconds = goal[0] if goal else ("", "")
        append_row(Path(self.settings.out) / "runs.tsv", {
            **self.facts, "run": run, "seed": self.settings.seed + run,
            **{name: getattr(self.settings, name) for name in METHOD_COLUMNS},
            "train_accuracy": train.accuracy, "train_loss": train.loss,
            "validation_accuracy": validation.accuracy, "validation_count": validation.correct,
            "validation_images": validation.images, "validation_loss": validation.loss,
            **{part: clock.seconds[part] for part in PARTS}, "seconds": clock.total,
            "goal_epoch": goal_epoch, "goal_seconds": goal_seconds,
        })  # fmt: skip
        if run == 0:
            write_timing_log(Path(self.settings.out) / "timing_log.tsv", epochs)
        self._print(
            f"Train acc {train.accuracy:.4f} loss {train.loss:.3f}, validation acc {validation.accuracy:.4f} "
            f"loss {validation.loss:.3f} wall time {clock.total:.3f}s"
        )
        if run == 0:
            parts = ", ".join(f"{part} {clock.seconds[part]:.3f}s" for part in PARTS)
            self._print(f"# wall time of the first run: {parts}")
        if not math.isfinite(train.loss) or not math.isfinite(validation.loss):
            warn(f"run {run} (seed {self.settings.seed + run}) diverged: its loss is not finite")

    def summary(self) -> None:
        """The three lines that close the published log, over the whole seconds of each run."""
        if not self.speaks:
            return
        self._bar.close()
        reached = sum(accuracy >= GOAL for accuracy in self.accuracies)
        self._print(f"Maximum training time {max(self.seconds)} median {statistics.median(self.seconds)}")
        self._print(f"Lowest accuracy {min(self.accuracies)} median {round(statistics.median(self.accuracies), 6)}")
        self._print(f"{reached} runs reached 0.94 out of {len(self.accuracies)}")

    def _head(self, images: Images) -> list[str]:
        facts = self.facts
        cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        if torch.cuda.is_available():
            cuda += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        return [
            f"large_batch_cifar_10_fast {__version__}, commit {facts['commit']}, {facts['started']}",
            f"Python {platform.python_version()}, torch {torch.__version__}{cuda}",
            f"{facts['workers']} workers on {facts['processes']} process{'es' * (facts['processes'] > 1)}, "
            f"{facts['device']}",
            f"data {facts['data']}: {len(images.train_images)} training and {len(images.test_images)} test images, "
            f"SHA-256 {facts['digest']}",
            "settings " + " ".join(f"{name}={value}" for name, value in asdict(self.settings).items()),
        ]

    def _print(self, line: str) -> None:
        if self.speaks:
            with tqdm.external_write_mode():
                print(line, flush=True)


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
