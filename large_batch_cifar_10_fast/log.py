"""The log on STDOUT and progress on a terminal."""

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from . import __version__
from .campaign import (
    CONDITIONS,
    GOAL,
    Row,
    append,
    append_epochs,
    campaign_of_this_launch,
    check_unchanged,
    diverged,
    reached_goal,
    started,
    write_timing_log,
    written_whole,
)
from .clock import PARTS, Clock
from .data.shards import Batch, Epoch
from .distributed import DistContext, warn
from .environment import code_digest, commit, device_name, driver_and_clocks, peak_memory, software
from .metrics import Score
from .networks import work, work_of_epoch
from .options import SYNTHETIC, WHOLE, Settings, as_pairs
from .recipe import Recipe


class RunLog:
    """Prints and writes, in rank 0; of several teams each its own runs, and the first the rest of the log."""

    def __init__(
        self,
        settings: Settings,
        recipe: Recipe,
        ctx: DistContext,
        images: Callable[[], dict],
        finished: list[Row],
        team: str = WHOLE,
    ) -> None:
        """`images` gives facts of the data set, `finished` are the rows of a resumed campaign. Raises ConfigError."""
        self.settings, self.recipe, self.ctx = settings, recipe, ctx
        first, self.teams = map(int, team.split("/"))
        self.speaks = ctx.is_main and first == 0  # for all teams
        planned = settings.planned[first :: self.teams]
        self.rows = {int(row["run"]): row for row in finished if int(row["run"]) in planned}
        self.runs_to_make = [run for run in planned if run not in self.rows]
        self.facts: dict[str, object] = {}  # what all rows have alike; rank 0's alone
        self.epochs: list[dict[str, float]] = []  # of this run, the rows of epochs.tsv
        device = device_name(ctx, self.teams)
        if finished:
            check_unchanged(finished[0], device=device)
        if ctx.is_main:
            self._take_down(images, finished, device)

    def _take_down(self, images: Callable[[], dict], finished: list[Row], device: str) -> None:
        settings, recipe, ctx = self.settings, self.recipe, self.ctx
        known = finished[0] if finished else {"campaign": campaign_of_this_launch(), "started": started()}
        self.facts = {name: known[name] for name in ("campaign", "started")}
        self.facts |= {"recipe": recipe.name, "options": as_pairs(asdict(recipe)), "workers": recipe.workers}
        self.facts |= {"runs": settings.runs, "share": settings.share, "processes": ctx.world_size, "device": device}
        self.facts |= images()
        self.facts |= {name: getattr(settings, name) for name in CONDITIONS}
        self.facts["data"] = settings.data if settings.data == SYNTHETIC else os.path.abspath(settings.data)
        self.facts |= {"version": __version__, "commit": commit(), "code": code_digest(), "torch": version("torch")}
        self._table = Path(settings.out) / "runs.tsv"
        append(self._table, self.rows.values())  # a table that cannot be written is found before the training
        if self.speaks:
            self._head()

    def _head(self) -> None:
        facts, planned, processes = self.facts, len(self.settings.planned), self.ctx.world_size
        say(version_line(facts["started"]))
        say("# Python {python}, torch {torch}, CUDA {cuda}, cuDNN {cudnn}{nccl}".format(**software()))
        plural = "es" if processes > 1 else ""
        say(f"# {self.recipe.workers} workers on {processes} process{plural}, {facts['device']}")
        say(data_line(facts))
        say(recipe_line(self.recipe))
        say(f"# settings {as_pairs(asdict(self.settings))}")
        say(f"# campaign {facts['campaign']}, {len(self.rows)} of {planned} runs made before")

    def set_up(self, clock: Clock, train_images: int, compiled: bool) -> None:
        """The published lines about what all runs share; from here on a run's work, in FLOP, goes by on a terminal.
        What could not be compiled is told, in rows and log, as not compiled, and --resume goes on with it so. Raises
        ConfigError where the runs made before were compiled, and now that failed."""
        for row in [*self.rows.values()][:1]:
            check_unchanged(row, compile=compiled)
        hidden = None if self.speaks else True  # None: where there is no terminal
        self._train_images, a_run = train_images, work(self.recipe, train_images)
        parts = {"total": a_run * (len(self.rows) + len(self.runs_to_make)), "initial": a_run * len(self.rows)}
        # Time left goes by work, as steps of different stages take different times, and by the mean of all so far.
        how = {"unit": "FLOP", "unit_scale": True, "smoothing": 0, "miniters": 1}
        self._bar = tqdm(**parts, **how, file=sys.stderr, disable=hidden)
        self.facts["compile"] = compiled
        if self.ctx.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.ctx.device)  # what was tried before is no run's
        if self.ctx.is_main:
            self.facts |= driver_and_clocks(self.ctx)  # now: before the warm-up a GPU is at rest, and its clocks, too
        if self.speaks:
            self._print_set_up(clock, compiled)
        if self.ctx.is_main:
            for run in sorted(self.rows):
                self._print_run(self.rows[run])

    def _print_set_up(self, clock: Clock, compiled: bool) -> None:
        if compiled != self.settings.compile:
            self.settings = replace(self.settings, compile=False, no_compile=True)
            say(f"# settings {as_pairs(asdict(self.settings))}")
        if self.facts["driver"]:
            say(f"# driver {self.facts['driver']}, clocks {self.facts['clocks']}")
        say(f"Uploaded data to GPUs {clock.seconds['upload']:.3f}s")
        say(f"Compute patch whitening statistics:     {clock.seconds['whitening']:.3f}s")

    def progress(self, steps: Epoch, run: int, epoch: int) -> Iterator[list[Batch]]:
        """The same steps, shown going by."""
        rows = [*self.rows.values()]
        reached = f"{sum(map(reached_goal, rows))} of {len(rows)} runs over 94%"
        self._bar.set_description(f"run {run + 1} epoch {epoch}, {reached}", refresh=False)
        flop = work_of_epoch(self.recipe, self._train_images, epoch) // len(steps)
        for step in steps:
            yield step
            self._bar.update(flop)

    def epoch(self, clock: Clock, train: Score, validation: Score) -> None:
        losses = {"train_loss": train.loss, "validation_loss": validation.loss}
        accuracies = {"train_accuracy": train.accuracy, "validation_accuracy": validation.accuracy}
        self.epochs.append({"epoch": len(self.epochs) + 1, "seconds": clock.total, **losses, **accuracies})

    def run(self, run: int, clock: Clock, train: Score, validation: Score, network: nn.Module) -> None:
        """A finished run: its row, and the last's weights. The main process returns when the row is on the disk."""
        epochs, self.epochs = self.epochs, []
        if not self.ctx.is_main:
            return
        row = self.facts | {"run": run, "seed": self.settings.seed + run}
        row |= {"train_accuracy": train.accuracy, "train_loss": train.loss}
        row |= {"validation_accuracy": validation.accuracy, "validation_loss": validation.loss}
        row |= {"validation_count": validation.correct, "validation_images": validation.images}
        row |= {part: clock.seconds[part] for part in PARTS}
        row |= {"seconds": clock.total, "last_validation": clock.last["validation"]}
        at_goal = ((e["epoch"], e["seconds"]) for e in epochs if e["validation_accuracy"] >= GOAL)
        row["goal_epoch"], row["goal_seconds"] = ("", "") if diverged(row) else next(at_goal, ("", ""))
        row["peak_memory"] = peak_memory(self.ctx.device)
        if self.settings.save and run == self.settings.planned[-1]:  # before its row: what has a row is not made again
            self._save(network)
        if run == self.settings.planned[0]:
            curve = [(epoch["seconds"], epoch["validation_accuracy"]) for epoch in epochs]
            write_timing_log(self._table.with_name("timing_log.tsv"), curve)
        name = {"campaign": row["campaign"], "run": run}
        append_epochs(self._table.with_name("epochs.tsv"), [name | epoch for epoch in epochs])
        self.rows[run] = row
        append(self._table, self.rows.values())
        self._print_run(row)
        if diverged(row):
            when = f"stopped after epoch {len(epochs)} of {self.recipe.epochs}: its loss is not finite"
            warn(f"run {run} (seed {row['seed']}) {when}; lower the learning rate, or try --precision fp32")

    def summary(self) -> None:
        """Print the lines that close the published log; of several teams the launcher does, when all have ended."""
        self._bar.close()
        if self.speaks and self.teams == 1:
            print_summary(self.rows.values())

    def _save(self, network: nn.Module) -> None:
        """Weights and statistics; read them with torch.load(FILE, weights_only=True)."""
        with written_whole(Path(self.settings.save)) as unfinished:
            torch.save({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, unfinished)

    def _print_run(self, row: Row) -> None:
        """Print a run's line; after the first run's the parts of its time, and its time with validation.

        As published, with a fourth decimal for accuracies: with three, runs over 94% cannot be counted.
        """
        say(
            "Train acc {:.4f} loss {:.3f}, validation acc {:.4f} loss {:.3f} wall time {:.3f}s".format(
                *(float(row[f"{part}_{name}"]) for part in ("train", "validation") for name in ("accuracy", "loss")),
                seconds := float(row["seconds"]),
            )
        )
        if int(row["run"]) == self.settings.planned[0]:
            say("# wall time of the first run: " + ", ".join(f"{part} {float(row[part]):.3f}s" for part in PARTS))
            last, memory = float(row["last_validation"]), float(row["peak_memory"]) / 2**30
            with_it = f"the last validation {last:.3f}s (with it {seconds + last:.3f}s)"
            say(f"# not in it: {with_it}; peak memory {memory:.2f} GiB")


def say(line: str) -> None:
    """Print a line of the log, clear of the progress bar."""
    with tqdm.external_write_mode():
        print(line, flush=True)


def version_line(started: str) -> str:
    return f"# large_batch_cifar_10_fast {__version__}, commit {commit()}, code {code_digest()}, {started}"


def data_line(images: Mapping[str, object]) -> str:
    counts = f"{images['train']} training and {images['test']} test images"
    return f"# data {images['images']}: {counts}, SHA-256 {images['digest']}"


def recipe_line(recipe: Recipe) -> str:
    return f"# recipe {recipe.name} {as_pairs(asdict(recipe))}"


def print_summary(rows: Iterable[Row]) -> None:
    """Print the three lines that close the published log, over the whole seconds of each run."""
    rows = list(rows)
    seconds, accuracies = ([float(row[name]) for row in rows] for name in ("seconds", "validation_accuracy"))
    say(f"Maximum training time {max(seconds)!r} median {statistics.median(seconds)!r}")
    say(f"Lowest accuracy {min(accuracies)!r} median {round(statistics.median(accuracies), 6)!r}")
    say(f"{sum(map(reached_goal, rows))} runs reached 0.94 out of {len(rows)}")
