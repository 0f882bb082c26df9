"""Print the log of a launch to STDOUT and its progress to STDERR. Write each epoch and run to the tables."""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from .. import ConfigError, __version__, first_line, list_some
from ..core.clock import PARTS
from ..core.data import Images
from ..core.devices import driver_and_clocks, peak_memory, software
from ..core.machine import Machine
from ..core.printing import print_line, show, warn, warn_once
from ..core.score import Epoch
from ..core.team import Team
from ..images.load import count_copies
from .campaign import save_weights, teams_on_this_machine
from .options import Options, as_pairs
from .store import Campaign
from .table import GOAL, NUMBERS, Row, diverged, reached_goal

T = TypeVar("T")

SILENCE = 10  # seconds after an epoch's line, in which no other epoch is printed


class Recorder:
    """The output of a launch, on rank 0.

    With several teams on a machine, each team prints its runs. The first team also prints the head of the log.
    """

    def __init__(self, options: Options, team: Team, common: dict[str, str], campaign: Campaign | None) -> None:
        """`common` are the conditions of all rows. There is a campaign on rank 0."""
        self.options = options
        self.team = team
        self.common = common
        self.campaign = campaign
        self.run = 0
        self.epochs: list[dict[str, float]] = []
        self.bar = tqdm(disable=True)
        self.shown = time.monotonic()  # when an epoch was shown
        self.has_saved = False

    def ready(self, machine: Machine, epochs: int) -> None:
        """Print the published lines about the set-up and the runs finished before, and start the progress bar.

        `epochs` are those of a run.
        Raise ConfigError if earlier runs were compiled or used graphs, and this launch does not.
        """
        self.machine = machine
        self.run_epochs = epochs
        if self.campaign:
            no_graph = self.team.on_gpu and not machine.has_graphs
            self.campaign.agree({"compile": str(machine.is_compiled), "no_graph": str(no_graph)})
        if self.team.is_main:
            self.common |= driver_and_clocks(self.team.device)  # after the warm-up: an idle GPU slows down
        if self.team.is_first:
            self.print_set_up()
        how: dict[str, Any] = {"unit": "epochs", "smoothing": 0, "miniters": 0, "file": sys.stderr}
        how["bar_format"] = "{desc}{percentage:3.0f}%|{bar}| {n:.1f}/{total} epochs [{elapsed}<{remaining}{postfix}]"
        how["disable"] = None if self.team.is_first and self.campaign else True  # None: disabled without a terminal
        done = len(self.requested_rows())
        self.bar = tqdm(total=epochs * self.options.runs, initial=epochs * done, **how)

    def watch(self, steps: Sequence[T]) -> Iterator[T]:
        """Yield the steps of an epoch, and show them on the progress bar."""
        self.bar.set_description(f"run {self.run + 1} epoch {len(self.epochs) + 1}", refresh=False)
        for step in steps:
            yield step
            self.bar.update(1 / len(steps))

    def begin(self, run: int) -> None:
        self.run = run
        self.epochs = []

    def epoch(self, epoch: Epoch) -> None:
        """Write and show an epoch."""
        row = {
            "epoch": epoch.number,
            "seconds": epoch.seconds,
            "train_loss": epoch.train.loss,
            "validation_loss": epoch.validation.loss,
            "train_accuracy": epoch.train.accuracy,
            "validation_accuracy": epoch.validation.accuracy,
        }
        self.epochs.append(row)
        rate = epoch.train.images / self.machine.clock.last("training")
        shown = {"images/s": f"{rate:.0f}", "loss": f"{epoch.validation.loss:.3f}"}
        self.bar.n = round(self.bar.n)  # its steps do not add up to 1 exactly
        self.bar.set_postfix(**shown, accuracy=f"{epoch.validation.accuracy:.4f}", refresh=False)
        if self.campaign:
            with warned("the epochs so far"):
                self.campaign.add_epochs(self.run, self.epochs)
            self.show_epoch(epoch, rate)

    def show_epoch(self, epoch: Epoch, rate: float) -> None:
        """Without a terminal, print an epoch, but at most one in SILENCE seconds."""
        if self.bar.disable and time.monotonic() - self.shown > SILENCE:
            self.shown = time.monotonic()
            text = f"run {self.run}, epoch {epoch.number} of {self.run_epochs}: loss {epoch.validation.loss:.3f}, "
            text += f"accuracy {epoch.validation.accuracy:.4f}, {rate:.0f} images/s, "
            show(f"{text}{epoch.seconds:.0f} s of training so far")

    def finish(self, last: Epoch, for_use: Mapping[str, object]) -> None:
        """Write and print a finished run: its row, the curve of run 0, and the weights of the last run.

        `for_use` is saved with the weights.
        """
        if not self.campaign:
            return
        clock = self.machine.clock
        seconds = clock.seconds
        row: dict[str, Any] = {"run": self.run, "seed": self.options.seed + self.run, **self.epochs[-1]}
        row |= {"validation_count": last.validation.correct, "validation_images": last.validation.images}
        row |= {part: seconds[part] for part in PARTS} | {"cpu_seconds": clock.cpu_seconds}
        row |= {"last_validation": clock.last("validation"), "peak_memory": peak_memory(self.team.device)}
        row |= {"goal_epoch": "", "goal_seconds": ""}
        at_goal = [epoch for epoch in self.epochs if epoch["validation_accuracy"] >= GOAL]
        if at_goal and not last.diverged:
            row |= {"goal_epoch": at_goal[0]["epoch"], "goal_seconds": at_goal[0]["seconds"]}
        self.campaign.add_run(self.run, row, self.epochs)
        with warned("runs.tsv"):
            self.campaign.write_tables()
        finished = self.campaign.rows[self.run]
        if teams_on_this_machine(self.team) > 1:
            print_line(f"# run {self.run}, seed {finished['seed']}")
        self.print_run(finished)
        if self.run == self.options.runs - 1 and self.options.save:
            save_weights(Path(self.options.save), last.network.state_dict(), finished, for_use)
            self.has_saved = True
        if last.diverged:
            when = f"stopped after epoch {len(self.epochs)} of {self.run_epochs}: its loss is not finite"
            more_exact = "" if self.options.precision in ("fp32", "fp64") else ", or try --precision fp32"
            warn(f"run {self.run} (seed {finished['seed']}) {when}; lower the learning rate{more_exact}")

    def summary(self) -> None:
        """Print the closing lines of the published log."""
        self.bar.close()
        if not self.campaign:
            return
        with warned("runs.tsv"):
            self.campaign.write_tables(at_once=True)
        if teams_on_this_machine(self.team) > 1:  # the launcher prints it
            return
        if self.campaign.missing:
            others = len(self.campaign.missing)
            print_line(f"# {others} of {self.options.runs} runs are being made by other launches")
        last = self.options.runs - 1
        if self.options.save and last in self.campaign.rows and not self.has_saved:
            warn(f"--save {self.options.save} is not written: run {last} was made before, or by another launch")
        if rows := self.requested_rows():
            print_summary(rows)

    # ---- Lines

    def print_head(self, images: Images) -> None:
        """Print the conditions of all runs, a line each."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        print_line(f"# large_batch_cifar_10_fast {__version__}, commit {self.common['commit']}, {now}")
        print_line(f"# {software()}")
        classes = list_some(images.class_names, 10)
        means, stds = images.normalization
        about = {"classes": f"{images.classes} ({classes})", "normalization": f"mean {means} std {stds}"}
        about |= {"test_images": str(len(images.test_images)), "settings": as_pairs(asdict(self.options))}
        for name, value in (self.common | about).items():
            print_line(f"# {name} {value}")
        if self.campaign:
            print_line(f"# {len(self.requested_rows())} of {self.options.runs} runs are finished")
        if images.is_shuffled:
            print_line("# training images are shuffled, in the same order each time")
        copies = count_copies(images)
        if copies > len(images.test_images) / 100:
            warn(f"--data {self.options.data}: {copies} of {len(images.test_images)} test images are training images")

    def requested_rows(self) -> list[Row]:
        """Return the rows of the finished runs among the first --runs."""
        rows = self.campaign.rows if self.campaign else {}
        return [rows[run] for run in sorted(rows) if run < self.options.runs]

    def print_set_up(self) -> None:
        machine = self.machine
        print_line(f"# compile {machine.is_compiled}, graphs {machine.has_graphs}")
        if self.common["driver"]:
            print_line(f"# driver {self.common['driver']}, clocks {self.common['clocks']}")
        print_line(f"Uploaded data to GPUs {machine.clock.seconds['upload']:.3f}s")
        print_line(f"Compute patch whitening statistics:     {machine.clock.seconds['whitening']:.3f}s")
        for row in self.requested_rows():
            self.print_run(row)

    def print_run(self, row: Mapping[str, str]) -> None:
        """Print a run's line, as published but with a fourth decimal, without which runs over 94% cannot be counted."""
        number = {name: float(row[name] or "nan") for name in NUMBERS}
        form = "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
        print_line((form + "loss {validation_loss:.3f} wall time {seconds:.3f}s").format(**number))
        if row["run"] == "0":
            print_line("# wall time of the first run: " + ", ".join(f"{part} {number[part]:.3f}s" for part in PARTS))
            last = number["last_validation"]
            memory = number["peak_memory"] / 2**30
            with_it = f"the last validation {last:.3f}s (with it {number['seconds'] + last:.3f}s)"
            print_line(f"# not in it: {with_it}; peak memory {memory:.2f} GiB")


@contextlib.contextmanager
def warned(name: str) -> Iterator[None]:
    """Warn once if the body cannot write a file. Training continues."""
    try:
        yield
    except (OSError, ConfigError) as error:
        warn_once(f"{name} is not written ({first_line(error)})")


def print_summary(rows: Iterable[Mapping[str, str]]) -> None:
    """Print the three closing lines of the published log. A run that diverged has no time."""
    rows = list(rows)
    seconds = [float(row["seconds"]) for row in rows if not diverged(row)] or [math.nan]
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    print_line(f"Maximum training time {max(seconds)!r} median {statistics.median(seconds)!r}")
    print_line(f"Lowest accuracy {min(accuracies)!r} median {round(statistics.median(accuracies), 6)!r}")
    print_line(f"{sum(map(reached_goal, rows))} runs reached 0.94 out of {len(rows)}")
