"""The rows of a campaign: which of its runs are finished, which are missing, and under which conditions."""

import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ConfigError, __version__
from . import source
from .data import Images
from .devices import hardware_name
from .files import write_atomically
from .images import SYNTHETIC
from .options import Options, as_pairs
from .table import (
    COLUMNS,
    CONDITIONS,
    EPOCHS,
    PLACE,
    ConflictError,
    Row,
    Table,
    as_of_run_0,
    campaign_named,
    check_conditions,
    differences,
    environment,
    new_name,
    write_timing_log,
)
from .team import Team, show, warn


def teams_on_this_machine(team: Team) -> int:
    """Return how many teams the launcher started here."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // team.world_size)


def conditions(options: Options, name: str, hyp: Any, program: Path, images: Images, team: Team) -> dict[str, str]:
    """Return what all rows of a launch have in common, as texts: recipe, images, code, device, versions."""
    names = " and ".join(sorted(set(team.gather("device", hardware_name(team.device)))))
    teams = teams_on_this_machine(team)
    prefix = f"{teams} teams of " if teams > 1 else ""
    device = f"{prefix}{team.world_size} x {names}"
    if not team.on_gpu:
        device = f"CPU {names}, {prefix}{team.world_size} x {torch.get_num_threads()} threads"
    common: dict[str, Any] = {
        "recipe": name,
        "options": as_pairs(hyp),
        "workers": team.total_workers,
        "data": options.data if options.data == SYNTHETIC else os.path.abspath(options.data),
        "images": images.name,
        "digest": images.digest,
        "precision": options.precision,
        "micro_batches": options.micro_batches,
        "compile": options.compile,
        "no_graph": options.no_graph,
        "environment": environment(),
        "device": device,
        "processes": team.world_size,
        "version": __version__,
        "commit": source.commit(),
        "code": source.digest(program),
        "torch": version("torch"),
        "launch": new_name(),  # tells whose epochs are whose
    }
    return {name: str(value) for name, value in common.items()}


class Campaign:
    """The runs of a campaign that a launch makes, and its tables, which rank 0 reads and writes."""

    def __init__(self, options: Options, common: dict[str, str], program: Path, team: Team) -> None:
        """Find the missing runs.

        Raise ConfigError if the processes or the campaign's rows have other conditions, or a table cannot be written.
        """
        self.common = common
        self.out = Path(options.out)
        self.teams = teams_on_this_machine(team)
        shares = options.planned.step // self.teams  # a team's share is one of the launch's share
        self.of_launch = range(options.planned.start % shares, options.runs, shares)  # of all teams
        check_processes_agree(options, common, team)
        self.runs = Table(self.out / "runs.tsv", COLUMNS, 2, self.check_other)
        self.epochs = Table(self.out / "epochs.tsv", EPOCHS, 0)
        self.others: list[Row] = []  # all rows of the campaign that other launches made
        self.rows: dict[int, Row] = {}  # by run, of this launch and of those before
        if team.is_main and not options.profile:  # which makes no run
            self.read_rows(options, program)
        finished = json.loads(team.gather("finished", json.dumps([*self.rows]))[0])
        self.missing = [run for run in options.planned if run not in finished]

    def read_rows(self, options: Options, program: Path) -> None:
        """Read the planned runs that the table has; choose the campaign's name if it has none."""
        name, rows = campaign_named(self.out, options.campaign, options.resume)
        self.common["campaign"] = name
        self.others = rows
        self.common["seed"] = str(options.seed)
        self.known = [name for name in (*CONDITIONS, *PLACE, "seed") if name not in ("compile", "no_graph")]
        self.check_code(rows, program)
        check_conditions(rows, self.common, self.known)
        try:
            self.runs.append([])  # fails before training if it cannot be written
        except OSError as error:
            raise ConfigError(f"{self.out.absolute()} cannot be written ({error}): choose another --out") from error
        last = self.of_launch[-1]
        if options.save and not os.path.exists(options.save) and str(last) in {row["run"] for row in rows}:
            warn(f"--save {options.save}: run {last} is finished, and its weights are not made again")
        self.rows = {int(row["run"]): row for row in rows if int(row["run"]) in options.planned}

    def computed_with(self, compile: bool, no_graph: bool) -> None:
        """Note how steps are really computed. Raise ConfigError if the runs finished before were computed otherwise."""
        self.common |= {"compile": str(compile), "no_graph": str(no_graph)}
        check_conditions(self.others, self.common, ["compile", "no_graph"])

    def check_code(self, rows: Iterable[Row], program: Path) -> None:
        """Raise ConfigError, after the lines that were changed, if rows differ in the text of the program alone."""
        for row in map(as_of_run_0, rows):
            text = differences(self.common, row, self.known)
            if text and text == differences(self.common, row, ["code"]):
                file, lines = source.changed_since(program, self.out, row["code"])
                for line in lines:
                    show(line)
                was = f"{file} was changed since campaign {row['campaign']} began" + (", as above" if lines else "")
                raise ConfigError(f"{was}: undo that, or give another --campaign")

    def check_other(self, row: Row) -> None:
        """Raise ConflictError for a row of this campaign that a launch beside this one made under other conditions."""
        if row["campaign"] == self.common["campaign"]:
            text = differences(self.common, as_of_run_0(row), self.known)
            if text:
                raise ConflictError(f"another launch of campaign {row['campaign']} has other conditions, {text}")

    def add_epoch(self, run: int, epoch: Mapping[str, object]) -> None:
        self.epochs.append([{**self.common, "run": run, **epoch}])

    def add_run(self, run: int, row: Mapping[str, object]) -> None:
        self.rows[run] = {name: str(value) for name, value in {**self.common, **row}.items()}
        self.runs.append([self.rows[run]])

    def write_rows(self) -> None:
        """Append the rows that the table lacks: also those that a full disk did not take before."""
        self.runs.append([])

    def write_curve(self, epochs: Iterable[Mapping[str, float]]) -> None:
        curve = [(epoch["seconds"], epoch["validation_accuracy"]) for epoch in epochs]
        write_timing_log(self.out / "timing_log.tsv", curve)


def check_processes_agree(options: Options, common: Mapping[str, str], team: Team) -> None:
    """Raise ConfigError if a process was started with other conditions than the first."""
    plan = {name: str(getattr(options, name)) for name in ("seed", "runs", "share", "no_warmup")}
    first, *others = map(json.loads, team.gather("conditions", json.dumps({**common, **plan})))
    for rank, other in enumerate(others, 1):
        text = differences(other, first, (*CONDITIONS, *plan))
        if text:
            raise ConfigError(f"process {rank} differs from process 0 in {text}: give all machines the same")


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Row, for_use: Mapping[str, object]) -> None:
    """Write weights, the row of their run, and what it takes to use them."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    with write_atomically(path) as unfinished:
        torch.save({"weights": on_cpu, "about": about, **for_use}, unfinished)
