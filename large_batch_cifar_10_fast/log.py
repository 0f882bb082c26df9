"""The clock, the log on STDOUT, the rows of the tables, and progress on a terminal."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from . import ConfigError, __version__, runs
from .config import LONG, Options, as_pairs, estimate_seconds
from .core.clock import Clock
from .core.log import print_line, print_summary, warned
from .data.cifar10 import SYNTHETIC, Images
from .devices import driver_and_clocks, hardware_name, peak_memory, software
from .distributed import DistContext, show, warn
from .evaluate import Score
from .recipe import CIFAR_10_NORMALIZATION, Recipe, images_of_an_epoch
from .runs import COLUMNS, CONDITIONS, EPOCHS, PARTS, PLACE, Row, append

__all__ = ["Clock", "RunLog", "print_line", "print_summary"]
T = TypeVar("T")

LONG_EPOCH = 10  # seconds from which on an epoch is a line on STDERR


class RunLog:
    """The log of a launch: prints lines and writes tables, on rank 0. `missing` are the runs to make.

    Of several teams on a machine, all print their runs, the first prints the head, and the launcher the summary.
    """

    def __init__(self, options: Options, recipe: Recipe, ctx: DistContext, images: Images) -> None:
        """Find the missing runs of the campaign, and print the head of the log.

        Raise ConfigError if the processes or the campaign's rows have other conditions, or a table cannot be written.
        """
        self.options, self.ctx, self.out, count = options, ctx, Path(options.out), len(images.train_images)
        self.teams = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // ctx.world_size)
        shares = options.planned.step // self.teams  # a team's share is one of the launch's share
        self.of_launch = range(options.planned.start % shares, options.runs, shares)  # of all teams
        self.prints_head = ctx.is_main and os.environ.get("LOCAL_RANK", "0") == "0"
        epochs = range(1, recipe.epochs + 1)
        self.images_of_epochs = [recipe.workers * images_of_an_epoch(recipe, count, epoch) for epoch in epochs]
        self.epochs: list[dict[str, float]] = []  # of this run
        self.common = {name: str(value) for name, value in self._common(recipe, images).items()}  # to all rows
        plan = {name: str(getattr(options, name)) for name in ("seed", "runs", "share", "no_warmup")}
        first_process, *others = map(json.loads, ctx.all_gather_strings("conditions", json.dumps(self.common | plan)))
        for rank, other in enumerate(others, 1):
            if text := runs.differences(other, first_process, (*CONDITIONS, *plan)):
                raise ConfigError(f"process {rank} differs from process 0 in {text}: give all machines the same")
        self.for_use = {"classes": images.class_names, "normalization": recipe.normalization, "size": (32, 32, 3)}
        self.for_use |= {"options": asdict(recipe)}  # type: ignore[call-overload]  # all are saved with weights
        self.of_campaign: list[Row] = []  # all its rows, of other launches, too
        self.rows = self._finished_rows() if ctx.is_main else {}  # by run
        finished = json.loads(ctx.all_gather_strings("finished", json.dumps([*self.rows]))[0])
        self.missing = [run for run in options.planned if run not in finished]
        if ctx.is_main and self.missing:
            with warned("source.zip"):
                runs.store_source(self.out, recipe, self.common["code"])
        self.expected = 0.0 if ctx.on_gpu else estimate_seconds(recipe, count, ctx.world_size, options.precision)
        if self.prints_head:
            self._print_head(recipe, images)

    def _common(self, recipe: Recipe, images: Images) -> dict[str, object]:
        """Return what the rows of this launch have in common."""
        options, ctx = self.options, self.ctx
        names = " and ".join(sorted(set(ctx.all_gather_strings("device", hardware_name(ctx.device)))))
        teams = f"{self.teams} teams of " if self.teams > 1 else ""
        device = f"{teams}{ctx.world_size} x {names}"
        if not ctx.on_gpu:
            device = f"CPU {names}, {teams}{ctx.world_size} x {torch.get_num_threads()} threads"
        how = {name: getattr(options, name) for name in ("precision", "micro_batches", "compile", "no_graph")}
        how |= {"environment": runs.environment(), "device": device, "processes": ctx.world_size}
        what = {"recipe": recipe.name, "options": as_pairs(recipe), "workers": recipe.workers}
        data = options.data if options.data == SYNTHETIC else os.path.abspath(options.data)
        what |= {"data": data, "images": images.name, "digest": images.digest}
        code = {"version": __version__, "commit": runs.commit(), "code": runs.code_digest(recipe)}
        return what | how | code | {"torch": version("torch")}

    def _finished_rows(self) -> dict[int, Row]:
        """Return the planned runs that the campaign's table has; choose the campaign's name if it has none."""
        campaign, rows = runs.campaign_named(self.out, self.options.campaign, self.options.resume)
        self.common["campaign"], self.of_campaign = campaign, rows
        known = [name for name in (*CONDITIONS, *PLACE, "seed") if name not in ("compile", "no_graph")]
        runs.check_conditions(rows, self.common | {"seed": str(self.options.seed)}, known)
        try:
            append(self.out / "runs.tsv", COLUMNS, 2, [])  # fails before training if it cannot be written
        except OSError as error:
            raise ConfigError(f"{self.out.absolute()} cannot be written ({error}): choose another --out") from error
        last = self.of_launch[-1]
        if self.options.save and not os.path.exists(self.options.save) and str(last) in {row["run"] for row in rows}:
            warn(f"--save {self.options.save}: run {last} is finished, and its weights are not made again")
        return {int(row["run"]): row for row in rows if int(row["run"]) in self.options.planned}

    def _print_head(self, recipe: Recipe, images: Images) -> None:
        common, processes = self.common, "1 process" if self.ctx.world_size == 1 else f"{self.ctx.world_size} processes"
        time_now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        code = f"commit {common['commit']}, code {common['code']}, {time_now}"
        print_line(f"# large_batch_cifar_10_fast {__version__}, {code}")
        print_line(f"# {software()}")
        print_line(f"# {recipe.workers} workers on {processes}, {common['device']}")
        counts = f"{len(images.train_images)} training and {len(images.test_images)} test images"
        print_line(f"# data {images.name}: {counts}, SHA-256 {images.digest}")
        if recipe.normalization != CIFAR_10_NORMALIZATION:
            own = "normalized by the training images' own mean {} and std {}".format(*recipe.normalization)
            print_line(f"# {recipe.classes} classes, {own}")
        for doubt in images.doubts():
            warn(f"--data {self.options.data}: {doubt}")
        print_line(f"# recipe {recipe.name} {common['options']}")
        print_line(f"# settings {as_pairs(self.options)}")
        finished = f"{len(self.rows)} of {len(self.options.planned)} runs finished before"
        print_line(f"# campaign {common['campaign']}, {finished}")
        if self.expected > LONG and self.missing and not self.options.demo:
            hours = self.expected * len(self.missing) / 3600
            quicker = "" if recipe.name.startswith("muon") else "--recipe muon takes minutes, "
            warn(f"without a GPU this takes about {hours:.1f} hours; {quicker}--demo shows a small run in two minutes")

    def set_up(self, clock: Clock, compiled: bool, graphs: bool) -> None:
        """Print the published lines about the set-up and the runs finished before, and start the progress bar.

        Raise ConfigError if the runs finished before were compiled, or replayed graphs, and now that failed.
        """
        no_graph = self.options.no_graph or (self.ctx.on_gpu and not graphs)
        self.common |= {"compile": str(compiled), "no_graph": str(no_graph)}
        runs.check_conditions(self.of_campaign, self.common, ["compile", "no_graph"])
        done, missing = (sum(self.images_of_epochs) * len(made) for made in (self.rows, self.missing))
        how: dict[str, Any] = {"unit": "images", "unit_scale": True, "smoothing": 0, "miniters": 1, "file": sys.stderr}
        how["disable"] = None if self.prints_head else True  # None: disabled without a terminal
        self._bar = tqdm(total=done + missing, initial=done, **how)
        if self.ctx.is_main:
            self.common |= driver_and_clocks(self.ctx.device)  # after the warm-up: an idle GPU lowers its clocks
        if self.prints_head:
            chosen = f"precision={self.common['precision']} compile={compiled} graphs={graphs}"
            print_line(f"# computation {chosen} environment={self.common['environment']}")
            if self.common["driver"]:
                print_line(f"# driver {self.common['driver']}, clocks {self.common['clocks']}")
            print_line(f"Uploaded data to GPUs {clock.seconds['upload']:.3f}s")
            print_line(f"Compute patch whitening statistics:     {clock.seconds['whitening']:.3f}s")
            for run in sorted(self.rows):
                self._print_run(self.rows[run])

    def progress(self, steps: Sequence[T], run: int, epoch: int) -> Iterator[T]:
        """Yield the steps of an epoch and show them on the progress bar."""
        self.now = run, epoch
        self._bar.set_description(f"run {run + 1} epoch {epoch}", refresh=False)
        for step in steps:
            yield step
            self._bar.update(self.images_of_epochs[epoch - 1] / len(steps))

    def epoch(self, clock: Clock, train: Score, validation: Score) -> None:
        """Write and show an epoch: on the progress bar, or without a terminal as a line if it took ten seconds."""
        losses = {"train_loss": train.loss, "validation_loss": validation.loss}
        accuracies = {"train_accuracy": train.accuracy, "validation_accuracy": validation.accuracy}
        run, epoch = self.now
        self.epochs.append({"epoch": epoch, "seconds": clock.total, **losses, **accuracies})
        shown = {"loss": f"{validation.loss:.3f}", "accuracy": f"{validation.accuracy:.4f}"}
        self._bar.set_postfix(shown, refresh=False)
        if not self.ctx.is_main:
            return
        with warned("epochs.tsv"):  # all columns are keys: a run that is made again after a kill has new rows
            row = {"campaign": self.common["campaign"], "run": run, **self.epochs[-1]}
            append(self.out / "epochs.tsv", EPOCHS, len(EPOCHS), [row])
        seconds = clock.laps["training"][-1]
        if self._bar.disable and seconds + clock.laps["validation"][-1] >= LONG_EPOCH:
            speed = f"{self.images_of_epochs[epoch - 1] / seconds:.0f} images/s"
            text = f"run {run}, epoch {epoch} of {len(self.images_of_epochs)}: loss {shown['loss']}, "
            show(f"{text}accuracy {shown['accuracy']}, {speed}, {clock.total:.0f} s of training so far")
        if LONG_EPOCH < 5 * self.expected / len(self.images_of_epochs) < seconds:
            runs.warn_once(
                "steps take over five times as long as such cores need: do other programs use them? "
                "With OMP_NUM_THREADS=1 threads do not wait for each other"
            )

    def run(self, run: int, clock: Clock, train: Score, validation: Score, network: nn.Module) -> None:
        """Write and print a finished run: first its row, then its curve, and the weights of the last one."""
        epochs, self.epochs = self.epochs, []
        if not self.ctx.is_main:
            return
        row: dict[str, Any] = self.common | {"run": run, "seed": self.options.seed + run, **epochs[-1]}
        row |= {"validation_count": validation.correct, "validation_images": validation.images}
        row |= {part: clock.seconds[part] for part in PARTS} | {"cpu_seconds": clock.cpu_seconds}
        row |= {"last_validation": clock.laps["validation"][-1], "peak_memory": peak_memory(self.ctx.device)}
        at_goal = [e for e in epochs if e["validation_accuracy"] >= runs.GOAL and not runs.diverged(row)]
        row |= {f"goal_{name}": at_goal[0][name] if at_goal else "" for name in ("epoch", "seconds")}
        self.rows[run] = {name: str(value) for name, value in row.items()}
        with warned("runs.tsv"):  # the next append tries again
            append(self.out / "runs.tsv", COLUMNS, 2, self.rows.values())
        if self.teams > 1:
            print_line(f"# run {run}, seed {row['seed']}")
        self._print_run(self.rows[run])
        if run == self.of_launch[0]:
            with warned("timing_log.tsv"):
                curve = [(epoch["seconds"], epoch["validation_accuracy"]) for epoch in epochs]
                runs.write_timing_log(self.out / "timing_log.tsv", curve)
        if run == self.of_launch[-1] and self.options.save:
            with warned(self.options.save):
                (path := Path(self.options.save)).absolute().parent.mkdir(parents=True, exist_ok=True)
                weights = {name: part.cpu().contiguous() for name, part in network.state_dict().items()}
                with runs.write_atomically(path) as unfinished:
                    torch.save({"weights": weights, "about": self.rows[run], **self.for_use}, unfinished)
        if runs.diverged(row):
            when = f"stopped after epoch {len(epochs)} of {len(self.images_of_epochs)}: its loss is not finite"
            warn(f"run {run} (seed {row['seed']}) {when}; lower the learning rate, or try --precision fp32")

    def summary(self) -> None:
        """Print the closing lines of the published log. Write the rows that the table still lacks, or raise OSError."""
        if self.ctx.is_main and self.missing:
            self._bar.close()
            append(self.out / "runs.tsv", COLUMNS, 2, self.rows.values())
        if self.ctx.is_main and self.teams == 1:
            print_summary(self.rows.values())

    def _print_run(self, row: Row) -> None:
        """Print a run's line, as published but with a fourth decimal, without which runs over 94% cannot be counted."""
        number = {name: float(row[name]) for name in runs.NUMBERS}
        form = "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
        print_line((form + "loss {validation_loss:.3f} wall time {seconds:.3f}s").format(**number))
        if int(row["run"]) == self.of_launch[0]:
            print_line("# wall time of the first run: " + ", ".join(f"{part} {number[part]:.3f}s" for part in PARTS))
            last, memory = number["last_validation"], number["peak_memory"] / 2**30
            with_it = f"the last validation {last:.3f}s (with it {number['seconds'] + last:.3f}s)"
            print_line(f"# not in it: {with_it}; peak memory {memory:.2f} GiB")
