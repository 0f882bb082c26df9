"""The clock, the log on STDOUT, and progress on a terminal."""

import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from . import __version__
from .campaign import (
    CONDITIONS,
    FLOATS,
    GOAL,
    PARTS,
    Row,
    append,
    append_epochs,
    campaign_of_this_launch,
    check_unchanged,
    diverged,
    reached_goal,
    write_atomically,
    write_timing_log,
)
from .data.shards import Step
from .distributed import DistContext, warn
from .environment import code_digest, commit, device_name, driver_and_clocks, peak_memory, software, utc_now
from .metrics import Score
from .options import SYNTHETIC, RunConfig, as_pairs
from .recipe import Recipe, epoch_flop, run_flop


class Clock:
    """Add up seconds by part. Every reading waits until the devices of all processes have finished."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.laps: dict[Hashable, list[float]] = defaultdict(list)  # the durations of each part

    @contextlib.contextmanager
    def timed(self, part: Hashable) -> Iterator[None]:
        """Add the seconds of the body to a part."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.laps[part].append(time.perf_counter() - start)

    def fork(self) -> "Clock":
        """Return a clock that continues from here: each run counts what was done once for all of them."""
        clock = Clock(self._synchronize)
        clock.laps |= {part: [*laps] for part, laps in self.laps.items()}
        return clock

    @property
    def seconds(self) -> dict[Hashable, float]:
        return {part: sum(laps) for part, laps in self.laps.items()}

    @property
    def total(self) -> float:
        """The training time (method, section 6)."""
        seconds = self.seconds
        return sum(seconds.get(part, 0.0) for part in PARTS)


class RunLog:
    """Print the log and write the tables, on rank 0. Each of several teams has its runs; the first prints the head."""

    def __init__(
        self, config: RunConfig, recipe: Recipe, ctx: DistContext, images: dict, finished: list[Row], team: str
    ) -> None:
        """`images` are metadata of the data set, `finished` the rows of a resumed campaign.

        Raise ConfigError if the table cannot be written or the campaign ran on another device.
        """
        self.config, self.recipe, self.ctx = config, recipe, ctx
        first, self.teams = map(int, team.split("/"))
        self.prints_log = ctx.is_main and first == 0
        planned = config.planned[first :: self.teams]
        self.rows = {int(row["run"]): row for row in finished if int(row["run"]) in planned}
        self.runs_to_make = [run for run in planned if run not in self.rows]
        self.epochs: list[dict[str, float]] = []  # of this run, for epochs.tsv
        self.common: dict[str, object] = {}  # what all rows have in common, on rank 0
        self._train_images = images["train"]
        self._runs_tsv = Path(config.out) / "runs.tsv"
        device = device_name(ctx, self.teams)
        if finished:
            check_unchanged(finished[0], device=device)
        if ctx.is_main:
            campaign = finished[0]["campaign"] if finished else campaign_of_this_launch()
            self.common = {"campaign": campaign, **images, "torch": version("torch"), "version": __version__}
            self.common |= {"recipe": recipe.name, "options": as_pairs(asdict(recipe)), "workers": recipe.workers}
            self.common |= {"runs": config.runs, "share": config.share, "processes": ctx.world_size, "device": device}
            self.common |= {name: getattr(config, name) for name in CONDITIONS}
            self.common["data"] = config.data if config.data == SYNTHETIC else os.path.abspath(config.data)
            self.common |= {"commit": commit(), "code": code_digest()}
            append(self._runs_tsv, self.rows.values())  # fails before training if the table cannot be written
        if self.prints_log:
            self._print_head()

    def _print_head(self) -> None:
        processes = f"{self.ctx.world_size} process{'es' * (self.ctx.world_size > 1)}"
        print_line(version_line())
        print_line("# Python {python}, torch {torch}, CUDA {cuda}, cuDNN {cudnn}{nccl}".format(**software()))
        print_line(f"# {self.recipe.workers} workers on {processes}, {self.common['device']}")
        print_line(data_line(self.common))
        print_line(recipe_line(self.recipe))
        print_line(f"# settings {as_pairs(asdict(self.config))}")
        finished = f"{len(self.rows)} of {len(self.config.planned)} runs finished before"
        print_line(f"# campaign {self.common['campaign']}, {finished}")

    def set_up(self, clock: Clock, compiled: bool, graphs: bool) -> None:
        """Print the published lines about the set-up and the runs finished before, and start the progress bar.

        Raise ConfigError if the runs finished before were compiled, or replayed graphs, and now that failed.
        """
        made = {"compile": compiled, "no_graph": self.config.no_graph or (self.ctx.on_gpu and not graphs)}
        for row in [*self.rows.values()][:1]:
            check_unchanged(row, **made)
        # The bar counts work, since the steps of different stages take different times.
        a_run = run_flop(self.recipe, self._train_images)
        how = {"unit": "FLOP", "unit_scale": True, "smoothing": 0, "miniters": 1, "initial": a_run * len(self.rows)}
        how |= {"file": sys.stderr, "disable": None if self.prints_log else True}  # None: disabled without a terminal
        self._bar = tqdm(total=a_run * (len(self.rows) + len(self.runs_to_make)), **how)
        if self.ctx.is_main:
            self.common |= made | driver_and_clocks(self.ctx)  # after the warm-up: an idle GPU lowers its clocks
        if self.prints_log:
            if (config := replace(self.config, **made, no_compile=not compiled)) != self.config:
                print_line(f"# settings {as_pairs(asdict(config))}")
            if graphs:
                print_line("# a training step is one CUDA graph")
            if self.common["driver"]:
                print_line(f"# driver {self.common['driver']}, clocks {self.common['clocks']}")
            print_line(f"Uploaded data to GPUs {clock.seconds['upload']:.3f}s")
            print_line(f"Compute patch whitening statistics:     {clock.seconds['whitening']:.3f}s")
        if self.ctx.is_main:
            for run in sorted(self.rows):
                self._print_run(self.rows[run])

    def progress(self, steps: list[Step], run: int, epoch: int) -> Iterator[Step]:
        """Yield the steps and show them on the progress bar."""
        reached = f"{sum(map(reached_goal, self.rows.values()))} of {len(self.rows)} runs over 94%"
        self._bar.set_description(f"run {run + 1} epoch {epoch}, {reached}", refresh=False)
        flop = epoch_flop(self.recipe, self._train_images, epoch) // len(steps)
        for step in steps:
            yield step
            self._bar.update(flop)

    def epoch(self, clock: Clock, train: Score, validation: Score) -> None:
        losses = {"train_loss": train.loss, "validation_loss": validation.loss}
        accuracies = {"train_accuracy": train.accuracy, "validation_accuracy": validation.accuracy}
        self.epochs.append({"epoch": len(self.epochs) + 1, "seconds": clock.total, **losses, **accuracies})

    def run(self, run: int, clock: Clock, train: Score, validation: Score, network: nn.Module) -> None:
        """Write and print a finished run; save the weights of the last one."""
        epochs, self.epochs = self.epochs, []
        if not self.ctx.is_main:
            return
        row = self.common | {"run": run, "seed": self.config.seed + run}
        row |= {"train_accuracy": train.accuracy, "train_loss": train.loss}
        row |= {"validation_accuracy": validation.accuracy, "validation_loss": validation.loss}
        row |= {"validation_count": validation.correct, "validation_images": validation.images}
        row |= {part: clock.seconds[part] for part in PARTS} | {"seconds": clock.total}
        row |= {"last_validation": clock.laps["validation"][-1], "peak_memory": peak_memory(self.ctx.device)}
        at_goal = ((e["epoch"], e["seconds"]) for e in epochs if e["validation_accuracy"] >= GOAL)
        row["goal_epoch"], row["goal_seconds"] = ("", "") if diverged(row) else next(at_goal, ("", ""))
        # The row comes last: after a kill, a run without a row is repeated.
        if self.config.save and run == self.config.planned[-1]:
            weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
            with write_atomically(Path(self.config.save)) as unfinished:
                torch.save(weights, unfinished)
        if run == self.config.planned[0]:
            curve = ((epoch["seconds"], epoch["validation_accuracy"]) for epoch in epochs)
            write_timing_log(self._runs_tsv.with_name("timing_log.tsv"), curve)
        name = {"campaign": row["campaign"], "run": run}
        append_epochs(self._runs_tsv.with_name("epochs.tsv"), [name | epoch for epoch in epochs])
        self.rows[run] = row
        append(self._runs_tsv, self.rows.values())
        self._print_run(row)
        if diverged(row):
            when = f"stopped after epoch {len(epochs)} of {self.recipe.epochs}: its loss is not finite"
            warn(f"run {run} (seed {row['seed']}) {when}; lower the learning rate, or try --precision fp32")

    def summary(self) -> None:
        """Print the closing lines of the published log; for several teams the launcher does."""
        self._bar.close()
        if self.prints_log and self.teams == 1:
            print_summary(self.rows.values())

    def _print_run(self, row: Row) -> None:
        """Print a run's line, as published but with a fourth decimal, without which runs over 94% cannot be counted."""
        numbers = {name: float(row[name]) for name in FLOATS}
        form = "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
        print_line((form + "loss {validation_loss:.3f} wall time {seconds:.3f}s").format(**numbers))
        if int(row["run"]) == self.config.planned[0]:
            parts = ", ".join(f"{part} {numbers[part]:.3f}s" for part in PARTS)
            print_line(f"# wall time of the first run: {parts}")
            last, memory = numbers["last_validation"], numbers["peak_memory"] / 2**30
            with_it = f"the last validation {last:.3f}s (with it {numbers['seconds'] + last:.3f}s)"
            print_line(f"# not in it: {with_it}; peak memory {memory:.2f} GiB")


def print_line(line: str) -> None:
    """Print a line of the log, clear of the progress bar. If it cannot be written, continue without a log."""
    with tqdm.external_write_mode():
        try:
            print(line, flush=True)
        except OSError as error:  # a full disk, or a pipe whose reader has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            warn(f"the log ends here, the tables do not: STDOUT cannot be written ({error.strerror})")


def version_line() -> str:
    return f"# large_batch_cifar_10_fast {__version__}, commit {commit()}, code {code_digest()}, {utc_now()}"


def data_line(images: Mapping[str, object]) -> str:
    counts = f"{images['train']} training and {images['test']} test images"
    return f"# data {images['images']}: {counts}, SHA-256 {images['digest']}"


def recipe_line(recipe: Recipe) -> str:
    return f"# recipe {recipe.name} {as_pairs(asdict(recipe))}"


def print_summary(rows: Iterable[Row]) -> None:
    """Print the three closing lines of the published log."""
    rows = list(rows)
    seconds, accuracies = ([float(row[name]) for row in rows] for name in ("seconds", "validation_accuracy"))
    print_line(f"Maximum training time {max(seconds)!r} median {statistics.median(seconds)!r}")
    print_line(f"Lowest accuracy {min(accuracies)!r} median {round(statistics.median(accuracies), 6)!r}")
    print_line(f"{sum(map(reached_goal, rows))} runs reached 0.94 out of {len(rows)}")
