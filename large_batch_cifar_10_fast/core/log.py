"""What a program reports to: seconds, epochs, runs. Lines go to STDOUT, rows to the tables, progress to a terminal."""

import contextlib
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from .. import ConfigError, __version__, first_line
from .campaign import Campaign, save_weights
from .clock import Clock
from .devices import driver_and_clocks, matrix_rate, peak_memory, software
from .files import warn_once
from .images import CIFAR_10_NORMALIZATION, Images
from .options import Options, as_pairs
from .profile import profiled
from .table import GOAL, NUMBERS, PARTS, ConflictError, diverged, other_environment, reached_goal
from .team import Team, print_line, show, warn

T = TypeVar("T")

LONG = 600  # estimated seconds of a run from which on a CPU compiles, and the log says how long it takes
LONG_EPOCH = 10  # seconds from which on an epoch is a line on STDERR


class Score(NamedTuple):
    """The number of correct images among `images`, and their mean loss."""

    correct: int
    images: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


@torch.no_grad()
def sums_of(logits: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Return the number of correct images, the number of images, and the sum of their losses, [3]."""
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack([correct, torch.full_like(correct, len(labels)), losses.sum()])


def read_score(sums: Tensor, team: Team) -> Score:
    """Return the score from all processes' sums [3]: correct images, images, losses. Waits for the device."""
    total = sums.to(torch.float64, copy=True)
    team.sum_up([total])
    correct, images, loss = total.tolist()
    return Score(int(correct), int(images), loss / images)


class Log:
    """The log of a launch, on rank 0. Of several teams on a machine, all print their runs, and the first the head."""

    def __init__(
        self,
        options: Options,
        team: Team,
        campaign: Campaign,
        flop: float,
        expected: float,
        for_use: Mapping[str, object],
    ) -> None:
        """`flop` are a run's floating-point operations, `expected` about its seconds (0: unknown); `for_use` is saved
        with weights."""
        self.options = options
        self.team = team
        self.campaign = campaign
        self.flop = flop
        self.expected = expected
        self.for_use = for_use
        self.clock = Clock(team.synchronize)  # of the set-up, then of a run
        self.showed_speed = False

    def ready(self, images_by_epoch: Sequence[int], compiled: bool, graphs: bool) -> None:
        """Print the published lines about the set-up and the runs finished before, and start the progress bar.

        Raise ConfigError if the runs finished before were compiled, or replayed graphs, and now that failed.
        """
        self.images_by_epoch = images_by_epoch
        no_graph = self.options.no_graph or (self.team.on_gpu and not graphs)
        self.campaign.computed_with(compile=compiled, no_graph=no_graph)
        images = sum(images_by_epoch)
        done = images * len(self.campaign.rows)
        total = done + images * len(self.campaign.missing)
        how: dict[str, Any] = {"unit": "images", "unit_scale": True, "smoothing": 0, "miniters": 1, "file": sys.stderr}
        how["disable"] = None if self.team.is_first else True  # None: disabled without a terminal
        self.bar = tqdm(total=total, initial=done, **how)
        if self.team.is_main:
            self.campaign.common |= driver_and_clocks(self.team.device)  # after the warm-up: an idle GPU slows down
        if self.team.is_first:
            self.matrix_rate = matrix_rate(self.options.precision, self.team.device)  # after the warm-up, too
            self.print_set_up(compiled, graphs)

    def missing_runs(self) -> Iterator[int]:
        """Yield the seed of each run to make. Its time includes the set-up."""
        set_up = self.clock
        for run in self.campaign.missing:
            self.clock = set_up.fork()
            self.run = run
            self.epochs: list[dict[str, float]] = []
            yield self.options.seed + run

    def progress(self, steps: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield the steps of an epoch, counted from 1, and show them on the progress bar; or profile some of them."""
        if self.options.profile:
            yield from profiled(steps[: self.options.profile], self.campaign.out / "trace.json", self.team)
        epoch = len(self.epochs) + 1
        self.bar.set_description(f"run {self.run + 1} epoch {epoch}", refresh=False)
        for number, step in enumerate(steps, 1):
            yield number, step
            self.bar.update(self.images_by_epoch[epoch - 1] / len(steps))

    def epoch(self, train: Score, validation: Score) -> bool:
        """Write and show an epoch. Return whether its losses are finite: other weights never recover."""
        number = len(self.epochs) + 1
        row = {
            "epoch": number,
            "seconds": self.clock.total,
            "train_loss": train.loss,
            "validation_loss": validation.loss,
        }
        row |= {"train_accuracy": train.accuracy, "validation_accuracy": validation.accuracy}
        self.epochs.append(row)
        self.validation = validation
        self.bar.set_postfix(loss=f"{validation.loss:.3f}", accuracy=f"{validation.accuracy:.4f}", refresh=False)
        if self.team.is_main:
            with warned("epochs.tsv"):
                self.campaign.add_epoch(self.run, row)
            self.show_epoch(number, validation)
        return math.isfinite(train.loss + validation.loss)

    def show_epoch(self, number: int, validation: Score) -> None:
        """Without a terminal, show an epoch that took ten seconds as a line. Warn if steps are far too slow."""
        seconds = self.clock.laps["training"][-1]
        if self.bar.disable and seconds + self.clock.laps["validation"][-1] >= LONG_EPOCH:
            text = f"run {self.run}, epoch {number} of {len(self.images_by_epoch)}: loss {validation.loss:.3f}, "
            text += f"accuracy {validation.accuracy:.4f}, {self.images_by_epoch[number - 1] / seconds:.0f} images/s, "
            show(f"{text}{self.clock.total:.0f} s of training so far")
        if LONG_EPOCH < 5 * self.expected / len(self.images_by_epoch) < seconds:
            warn_once(
                "steps take over five times as long as such cores need: do other programs use them? "
                "With OMP_NUM_THREADS=1 threads do not wait for each other"
            )

    def finish(self, weights: Mapping[str, Tensor]) -> None:
        """Write and print a finished run: first its row, then its curve, and the weights of the last one."""
        if not self.team.is_main:
            return
        seconds = self.clock.seconds
        row: dict[str, Any] = {"run": self.run, "seed": self.options.seed + self.run, **self.epochs[-1]}
        row |= {"validation_count": self.validation.correct, "validation_images": self.validation.images}
        row |= {part: seconds[part] for part in PARTS} | {"cpu_seconds": self.clock.cpu_seconds}
        row |= {"last_validation": self.clock.laps["validation"][-1], "peak_memory": peak_memory(self.team.device)}
        row |= {"goal_epoch": "", "goal_seconds": ""}
        at_goal = [epoch for epoch in self.epochs if epoch["validation_accuracy"] >= GOAL]
        if at_goal and not diverged(row):
            row |= {"goal_epoch": at_goal[0]["epoch"], "goal_seconds": at_goal[0]["seconds"]}
        with warned("runs.tsv"):  # the next append tries again
            self.campaign.add_run(self.run, row)
        finished = self.campaign.rows[self.run]
        if self.campaign.teams > 1:
            print_line(f"# run {self.run}, seed {finished['seed']}")
        self.print_run(finished)
        if self.team.is_first and not self.showed_speed and not diverged(finished):
            self.showed_speed = True  # one run is as fast as another
            self.print_speed(seconds["training"])
        if self.run == self.campaign.of_launch[0]:
            with warned("timing_log.tsv"):
                self.campaign.write_curve(self.epochs)
        if self.run == self.campaign.of_launch[-1] and self.options.save:
            with warned(self.options.save):
                save_weights(Path(self.options.save), weights, finished, self.for_use)
        if diverged(finished):
            when = f"stopped after epoch {len(self.epochs)} of {len(self.images_by_epoch)}: its loss is not finite"
            more_exact = "" if self.options.precision in ("fp32", "fp64") else ", or try --precision fp32"
            warn(f"run {self.run} (seed {finished['seed']}) {when}; lower the learning rate{more_exact}")

    def summary(self) -> None:
        """Print the closing lines of the published log. Write the rows that the table still lacks, or raise OSError."""
        if not self.team.is_main or self.options.profile:
            return
        if self.campaign.missing:
            self.bar.close()
            self.campaign.write_rows()
        if self.campaign.teams == 1:
            print_summary(self.campaign.rows.values())

    # ---- Lines

    def print_head(self, images: Images) -> None:
        common = self.campaign.common
        processes = "1 process" if self.team.world_size == 1 else f"{self.team.world_size} processes"
        code = f"commit {common['commit']}, code {common['code']}, {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        print_line(f"# large_batch_cifar_10_fast {__version__}, {code}")
        print_line(f"# {software()}")
        print_line(f"# {common['workers']} workers on {processes}, {common['device']}")
        counts = f"{len(images.train_images)} training and {len(images.test_images)} test images"
        print_line(f"# data {images.name}: {counts}, SHA-256 {images.digest}")
        if images.normalization != CIFAR_10_NORMALIZATION:
            own = "normalized by the training images' own mean {} and std {}".format(*images.normalization)
            print_line(f"# {images.classes} classes, {own}")
        if not images.is_original:
            print_line("# training images in a random order that is always the same, whatever their own")
        for doubt in images.doubts():
            warn(f"--data {self.options.data}: {doubt}")
        print_line(f"# recipe {common['recipe']} {common['options']}")
        print_line(f"# settings {as_pairs(self.options)}")
        others = other_environment()
        if others:
            print_line(f"# environment, not a condition: {others}")
        if not self.options.profile:
            finished = f"{len(self.campaign.rows)} of {len(self.options.planned)} runs finished before"
            print_line(f"# campaign {common['campaign']}, {finished}")
        if self.expected > LONG and self.campaign.missing and not self.options.demo:
            hours = self.expected * len(self.campaign.missing) / 3600
            quicker = "" if common["recipe"].startswith("muon") else "--recipe muon takes minutes, "
            warn(f"without a GPU this takes about {hours:.1f} hours; {quicker}--demo shows a small run in two minutes")

    def print_set_up(self, compiled: bool, graphs: bool) -> None:
        common = self.campaign.common
        chosen = f"precision={common['precision']} compile={compiled} graphs={graphs}"
        print_line(f"# computation {chosen} environment={common['environment']}")
        if common["driver"]:
            print_line(f"# driver {common['driver']}, clocks {common['clocks']}")
        print_line(f"Uploaded data to GPUs {self.clock.seconds['upload']:.3f}s")
        print_line(f"Compute patch whitening statistics:     {self.clock.seconds['whitening']:.3f}s")
        for run in sorted(self.campaign.rows):
            self.print_run(self.campaign.rows[run])

    def print_run(self, row: Mapping[str, str]) -> None:
        """Print a run's line, as published but with a fourth decimal, without which runs over 94% cannot be counted."""
        number = {name: float(row[name]) for name in NUMBERS}
        form = "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
        print_line((form + "loss {validation_loss:.3f} wall time {seconds:.3f}s").format(**number))
        if int(row["run"]) == self.campaign.of_launch[0]:
            print_line("# wall time of the first run: " + ", ".join(f"{part} {number[part]:.3f}s" for part in PARTS))
            last, memory = number["last_validation"], number["peak_memory"] / 2**30
            with_it = f"the last validation {last:.3f}s (with it {number['seconds'] + last:.3f}s)"
            print_line(f"# not in it: {with_it}; peak memory {memory:.2f} GiB")

    def print_speed(self, seconds: float) -> None:
        """Print the rates of a run's training steps."""
        text = f"{sum(self.images_by_epoch) / seconds:.0f} images/s"
        rate = self.flop / seconds
        if math.isfinite(rate):
            share = rate / self.team.world_size / self.matrix_rate
            text += f", {rate / 1e12:.3g} TFLOP/s, {share:.0%} of the matrix rate"
        print_line(f"# speed of run {self.run}: {text}")


@contextlib.contextmanager
def warned(name: str) -> Iterator[None]:
    """Warn once if the body cannot write a file. The runs go on, unless another launch makes the same ones."""
    try:
        yield
    except ConflictError:
        raise
    except (OSError, RuntimeError, ConfigError) as error:  # torch.save raises RuntimeError
        warn_once(f"{name} is not written ({first_line(error)})")


def print_summary(rows: Iterable[Mapping[str, str]]) -> None:
    """Print the three closing lines of the published log. A run that diverged has no time."""
    rows = list(rows)
    seconds = [float(row["seconds"]) for row in rows if not diverged(row)] or [math.nan]
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    print_line(f"Maximum training time {max(seconds)!r} median {statistics.median(seconds)!r}")
    print_line(f"Lowest accuracy {min(accuracies)!r} median {round(statistics.median(accuracies), 6)!r}")
    print_line(f"{sum(map(reached_goal, rows))} runs reached 0.94 out of {len(rows)}")
