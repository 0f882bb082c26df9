"""Print the log of a launch to STDOUT, in the published format, and its progress to STDERR."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from tqdm import tqdm

from .. import __version__, list_some
from ..core.data import Images
from ..core.devices import software
from ..core.machine import Machine
from ..core.printing import print_line, show, warn
from ..core.score import Epoch
from ..images.load import count_copies
from .store import Campaign
from .table import NUMBERS, diverged, reached_goal

SILENCE = 10  # seconds after an epoch's line, in which no other epoch is printed


class Progress:
    """The progress of a launch on STDERR: a bar on a terminal, otherwise now and then a line for an epoch."""

    def __init__(self, is_shown: bool, epochs: int, runs: int, finished: int) -> None:
        """`epochs` are those of a run."""
        self.epochs = epochs
        self.shown = time.monotonic()  # when an epoch was shown
        disable = None if is_shown else True  # None: without a terminal
        self.bar = tqdm(total=epochs * runs, initial=epochs * finished, unit="epochs", smoothing=0, disable=disable)

    def show(self, run: int, epoch: Epoch, seconds: float) -> None:
        """Show an epoch that was trained in so many seconds."""
        text = f"run {run}, epoch {epoch.number} of {self.epochs}: loss {epoch.validation.loss:.3f}"
        text += f", accuracy {epoch.validation.accuracy:.4f}, {epoch.train.images / seconds:.0f} images/s"
        self.bar.set_description(text, refresh=False)
        self.bar.update()
        if self.bar.disable and time.monotonic() - self.shown > SILENCE:
            self.shown = time.monotonic()
            show(f"{text}, {epoch.seconds:.0f} s of training so far")


def print_head(images: Images, campaign: Campaign) -> None:
    """Print the conditions of all runs, a line each."""
    means, stds = images.normalization
    common = campaign.common
    about = {
        "large_batch_cifar_10_fast": f"{__version__}, commit {common['commit']}",
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "software": software(),
        **common,
        "classes": f"{images.classes} ({list_some(images.class_names, 10)})",
        "normalization": f"mean {means} std {stds}",
        "test_images": len(images.test_images),
        "shuffled_training_images": images.is_shuffled,  # in the same order each time
        "finished_runs": len(campaign.requested),
    }
    for name, value in about.items():
        print_line(f"# {name} {value}")
    copies = count_copies(images)
    if copies > len(images.test_images) / 100:
        warn(f"{images.name}: {copies} of {len(images.test_images)} test images are training images")


def print_set_up(machine: Machine, campaign: Campaign) -> None:
    """Print the published lines about the set-up, and the runs that were finished before."""
    print_line(f"# compile {machine.is_compiled}, graphs {machine.captured is not None}")
    print_line(f"Uploaded data to GPUs {machine.clock.seconds['upload']:.3f}s")
    print_line(f"Compute patch whitening statistics:     {machine.clock.seconds['whitening']:.3f}s")
    for row in campaign.requested:
        print_run(row)


def print_run(row: Mapping[str, str]) -> None:
    """Print a run's line, as published but with a fourth decimal, without which runs over 94% cannot be counted."""
    number = {name: float(row.get(name) or "nan") for name in NUMBERS}
    form = "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
    print_line((form + "loss {validation_loss:.3f} wall time {seconds:.3f}s").format(**number))


def print_summary(rows: Sequence[Mapping[str, str]]) -> None:
    """Print the three closing lines of the published log. A run that diverged has no time."""
    if not rows:
        return
    seconds = [float(row["seconds"]) for row in rows if not diverged(row)] or [math.nan]
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    print_line(f"Maximum training time {max(seconds)!r} median {statistics.median(seconds)!r}")
    print_line(f"Lowest accuracy {min(accuracies)!r} median {round(statistics.median(accuracies), 6)!r}")
    print_line(f"{sum(map(reached_goal, rows))} runs reached 0.94 out of {len(rows)}")
