"""What a campaign says: the lines on STDOUT, the progress on a terminal, and what goes into its two tables."""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from .. import __version__
from ..data.shards import Batch, Epoch
from ..settings.settings import SYNTHETIC, Refusal, Settings, most_restarts, restarts
from ..training.networks import work, work_of_epoch
from ..training.recipe import Recipe
from ..training.tally import Score
from ..training.teams import answer_teams, say_alive, say_finished, tell_first
from ..training.world import World, warn
from . import lines
from .clock import PARTS, Clock
from .journal import Journal, write_timing_log, written_whole
from .provenance import code_digest, commit, device_name, driver_and_clocks, peak_memory, software, utc_now
from .resuming import campaign_of_this_launch, refuse_other
from .tables import CONDITIONS, GOAL, Row, diverged, reached_goal

SIGNS = 0.5  # seconds at least between two signs of life


class RunLog:
    """Prints and writes, in the first process, which is told the rows of other teams by their main ones."""

    def __init__(
        self, settings: Settings, recipe: Recipe, world: World, images: Callable[[], dict], finished: list[Row]
    ) -> None:
        """`images` gives facts of the data set, `finished` are the rows of a resumed campaign. Raises Refusal."""
        self.settings, self.recipe, self.world = settings, recipe, world
        self.rows = {int(row["run"]): row for row in finished}
        self.runs_to_make = [run for run in settings.planned if run not in self.rows]  # of all teams
        self.facts: dict[str, object] = {}  # what all rows have alike; the main process's alone
        self.epochs: list[tuple[float, float]] = []  # seconds and accuracy after each epoch of this run
        self._alive = time.monotonic()  # when this process last gave a sign of life
        self._problem: Exception | None = None  # with what other teams told
        device = device_name(world)
        if finished:
            refuse_other(finished[0], device=device)
        if world.is_main:
            self._take_down(images, finished, device)
        name = {key: self.facts[key] for key in ("campaign", "started", "data")} if world.is_first else {}
        words = world.all_gather_words("campaign", json.dumps(name))
        if world.is_main:
            self.facts |= json.loads(words[0])

    def _take_down(self, images: Callable[[], dict], finished: list[Row], device: str) -> None:
        settings, recipe, world = self.settings, self.recipe, self.world
        known = finished[0] if finished else {"campaign": campaign_of_this_launch(), "started": utc_now()}
        self.facts = {name: known[name] for name in ("campaign", "started")}
        self.facts |= {"recipe": recipe.name, "options": lines.as_pairs(asdict(recipe)), "workers": recipe.workers}
        self.facts |= {"runs": settings.runs, "share": settings.share, "processes": world.world_size, "device": device}
        self.facts |= images()
        self.facts |= {name: getattr(settings, name) for name in CONDITIONS}
        self.facts["data"] = settings.data if settings.data == SYNTHETIC else os.path.abspath(settings.data)
        self.facts |= {"version": __version__, "commit": commit(), "code": code_digest(), "torch": version("torch")}
        self.restart = restarts(os.environ)
        if not world.is_first:
            return
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        self._journal, self._entering = Journal(Path(settings.out) / "runs.tsv", finished), threading.Lock()
        if self._journal.mend():
            warn(f"the last row of {self._journal.path} was half-written: it is in {self._journal.path}.broken now")
        if self.restart:  # the log goes on
            made = {"made": len(self.rows), "runs": len(settings.planned)}
            self._print(lines.RESTART, restart=self.restart, most=most_restarts(os.environ), **made)
        else:
            self._head()

    def _head(self) -> None:
        facts = self.facts | {"plural": "es" * (self.world.world_size > 1), "made": len(self.rows)}
        facts |= {"settings": lines.as_pairs(asdict(self.settings)), "runs": len(self.settings.planned)}
        self._print(lines.HEAD, **facts)
        self._print(lines.SOFTWARE, **software())
        for line in (lines.WORLD, lines.DATA, lines.RECIPE, lines.SETTINGS, lines.CAMPAIGN):
            self._print(line, **facts)

    def set_up(self, clock: Clock, train_images: int, compiled: bool) -> None:
        """The published lines about what all runs share; from here on a run's work, in FLOP, goes by on a terminal.
        What could not be compiled is told, in rows and log, as not compiled, and --resume goes on with it so. Raises
        Refusal where the runs made before were compiled, and now that failed."""
        for row in [*self.rows.values()][:1]:
            refuse_other(row, compile=compiled)
        hidden = None if self.world.is_first else True  # None: where there is no terminal
        self._train_images, a_run = train_images, work(self.recipe, train_images)
        parts = {"total": a_run * len(self.settings.planned), "initial": a_run * len(self.rows)}
        # Time left goes by work, as steps of different stages take different times, and by the mean of all so far.
        how = {"unit": "FLOP", "unit_scale": True, "smoothing": 0, "miniters": 1}
        self._bar = tqdm(**parts, **how, file=sys.stderr, disable=hidden)
        self.facts["compile"] = compiled
        if self.world.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.world.device)  # what was tried before is no run's
        if self.world.is_main:
            self.facts |= driver_and_clocks(self.world)  # now: before the warm-up a GPU is at rest, and its clocks, too
        if not self.world.is_first:
            return
        if not self.restart:  # or the log goes on
            self._print_set_up(clock, compiled)
        if self.world.teams > 1:
            self._others = threading.Thread(target=self._answer_teams, daemon=True)
            self._others.start()

    def _print_set_up(self, clock: Clock, compiled: bool) -> None:
        if compiled != self.settings.compile:
            self.settings = replace(self.settings, compile=False, no_compile=True)
            self._print(lines.SETTINGS, settings=lines.as_pairs(asdict(self.settings)))
        if self.facts["driver"]:
            self._print(lines.GPU, **self.facts)
        self._print(lines.UPLOAD, **clock.seconds)
        self._print(lines.WHITENING, **clock.seconds)
        for run in sorted(self.rows):
            self._print_run(self.rows[run])

    def progress(self, steps: Epoch, run: int, epoch: int) -> Iterator[list[Batch]]:
        """The same steps, shown going by."""
        rows = [*self.rows.values()]
        reached = f"{sum(map(reached_goal, rows))} of {len(rows)} runs over 94%"
        self._bar.set_description(f"run {run + 1} epoch {epoch}, {reached}", refresh=False)
        flop = work_of_epoch(self.recipe, self._train_images, epoch) // len(steps)
        for step in steps:
            yield step
            self._bar.update(flop)
            if time.monotonic() - self._alive > SIGNS:
                self._alive = time.monotonic()
                say_alive(self.world)

    def epoch(self, clock: Clock, validation: Score) -> None:
        self.epochs.append((clock.total, validation.accuracy))

    def run(self, run: int, clock: Clock, train: Score, validation: Score, network: nn.Module) -> None:
        """A finished run: its row, and the last's weights. The main process returns when the row is on the disk."""
        epochs, self.epochs = self.epochs, []
        if not self.world.is_main:
            return
        row = self.facts | {"run": run, "seed": self.settings.seed + run}
        row |= {"train_accuracy": train.accuracy, "train_loss": train.loss}
        row |= {"validation_accuracy": validation.accuracy, "validation_loss": validation.loss}
        row |= {"validation_count": validation.correct, "validation_images": validation.images}
        row |= {part: clock.seconds[part] for part in PARTS}
        row |= {"seconds": clock.total, "last_validation": clock.last["validation"]}
        at_goal = ((i, seconds) for i, (seconds, accuracy) in enumerate(epochs, 1) if accuracy >= GOAL)
        row["goal_epoch"], row["goal_seconds"] = ("", "") if diverged(row) else next(at_goal, ("", ""))
        row["peak_memory"] = peak_memory(self.world.device)
        if self.settings.save and run == self.settings.planned[-1]:  # before its row: what has a row is not made again
            self._save(network)
        if self.world.is_first:
            self._enter(row, epochs)
        elif answer := tell_first(self.world, json.dumps([row, epochs])):
            kind, _, problem = answer.partition(": ")
            raise (Refusal if kind == Refusal.__name__ else OSError)(problem)

    def _answer_teams(self) -> None:
        try:
            answer_teams(self.world, self._enter_told)
        except Exception as problem:
            self._problem = problem

    def _enter_told(self, word: str) -> str:
        """Another team's row. Returns what went wrong: that team ends of it, and this one when it has finished."""
        try:
            self._enter(*json.loads(word))
            self._bar.update(self._bar.total // len(self.settings.planned))
        except Exception as problem:
            self._problem = problem
            return f"{type(problem).__name__}: {problem}"
        return ""

    def _enter(self, row: dict[str, object], epochs: list[tuple[float, float]]) -> None:
        """A run into the table, and then into the log; of the first its epochs."""
        with self._entering:
            if row["run"] == self.settings.planned[0]:
                write_timing_log(Path(self.settings.out) / "timing_log.tsv", epochs)
            if not self._journal.append(row):
                warn(f"somebody changed {self._journal.path} in the meantime: it has this campaign's rows again")
            self.rows[row["run"]] = row
            self._print_run(row)
            if diverged(row):
                when = f"stopped after epoch {len(epochs)} of {self.recipe.epochs}: its loss is not finite"
                warn(f"run {row['run']} (seed {row['seed']}) {when}; lower the learning rate, or try --precision fp32")

    def summary(self) -> None:
        """The three lines that close the published log, over the whole seconds of each run."""
        say_finished(self.world)
        if not self.world.is_first:
            return
        if self.world.teams > 1:
            self._others.join()
        self._bar.close()
        if self._problem:
            raise self._problem
        seconds = [float(row["seconds"]) for row in self.rows.values()]
        accuracies = [float(row["validation_accuracy"]) for row in self.rows.values()]
        self._print(lines.SLOWEST, maximum=max(seconds), median=statistics.median(seconds))
        self._print(lines.LOWEST, lowest=min(accuracies), median=round(statistics.median(accuracies), 6))
        self._print(lines.REACHED, reached=sum(map(reached_goal, self.rows.values())), total=len(self.rows))

    def _save(self, network: nn.Module) -> None:
        """Weights and statistics; read them with torch.load(FILE, weights_only=True)."""
        with written_whole(Path(self.settings.save)) as unfinished:
            torch.save({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, unfinished)

    def _print_run(self, row: Row) -> None:
        """Its line; after the first run's the parts of its time, and the time by the other clock, with validation."""
        names = ("train_accuracy", "train_loss", "validation_accuracy", "validation_loss", "seconds")
        figures = {name: float(row[name]) for name in (*names, *PARTS, "last_validation", "peak_memory")}
        self._print(lines.RUN, **figures)
        if int(row["run"]) == self.settings.planned[0]:
            self._print(lines.TIMES, **figures)
            with_validation = figures["seconds"] + figures["last_validation"]
            self._print(lines.ASIDE, **figures, with_validation=with_validation, gib=figures["peak_memory"] / 2**30)

    def _print(self, line: lines.Line, **values: object) -> None:
        with tqdm.external_write_mode():
            print(line.write(**values), flush=True)
