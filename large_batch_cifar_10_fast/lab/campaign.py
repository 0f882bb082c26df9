"""The runs of a campaign: the finished ones, the ones that this launch takes, and their conditions.

Parallel launches share the runs of a campaign, but do not communicate. A process claims a run before it makes it: the
claim on run N is a record lock on byte N of the file .campaigns/NAME.json. The text of this file has the conditions of
the running launches. The rows of finished runs have their conditions.
"""

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import LAUNCH, ConfigError, __version__, commit, system_errors_in_one_line
from ..core.data import Images
from ..core.devices import hardware_name
from ..core.hyp import settings_of
from ..core.team import Team, warn
from ..files import claim, locked_byte, share, write_atomically, write_patiently
from ..images.load import SYNTHETIC
from .options import Options, as_pairs
from .snapshot import digests
from .table import (
    COLUMNS,
    CONDITIONS,
    EPOCHS,
    PLACE,
    Reader,
    Row,
    Table,
    as_of_run_0,
    check_conditions,
    differences,
    environment,
    new_name,
    write_timing_log,
)

COMPUTED = ("compile", "no_graph")  # conditions that are known after the set-up
AGREED = tuple(name for name in (*CONDITIONS, *PLACE, "seed") if name not in COMPUTED)
# Bytes of .campaigns/NAME.json after those of all runs. The writer of the conditions locks one, all launches the other.
WRITER = 1 << 40
LAUNCHES = WRITER + 1


def teams_on_this_machine(team: Team) -> int:
    """Return how many teams the launcher started here."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // team.world_size)


def conditions(
    options: Options,
    name: str,
    hyp: Any,
    program: ModuleType,
    images: Images,
    sizes: Mapping[str, str],
    team: Team,
) -> dict[str, str]:
    """Return the values that all rows of a launch share, as texts: recipe, images, code, device, versions."""
    names = " and ".join(sorted(set(team.gather("device", hardware_name(team.device)))))
    teams = teams_on_this_machine(team)
    prefix = f"{teams} teams of " if teams > 1 else ""
    device = f"{prefix}{team.world_size} x {names}"
    if not team.on_gpu:
        device = f"CPU {names}, {prefix}{team.world_size} x {torch.get_num_threads()} threads"
    common: dict[str, Any] = {
        "recipe": name,
        "options": as_pairs(settings_of(hyp)),
        "workers": team.total_workers,
        "data": options.data if options.data == SYNTHETIC else os.path.abspath(options.data),
        "images": images.name,
        **sizes,
        "digest": images.digest,
        "precision": options.precision,
        "micro_batches": options.micro_batches,
        "compile": options.compile,
        "no_graph": options.no_graph,
        "environment": environment(),
        "device": device,
        "processes": team.world_size,
        "version": __version__,
        "commit": commit(),
        **digests(program),
        "torch": version("torch"),
        "seed": options.seed,  # of run 0
        "launch": os.environ.get(LAUNCH) or new_name(),  # tells whose epochs are whose
    }
    return {name: str(value) for name, value in common.items()}


def check_processes_agree(options: Options, common: Mapping[str, str], team: Team) -> None:
    """Raise ConfigError if the conditions of a process differ from those of the first process."""
    plan = {name: str(getattr(options, name)) for name in ("seed", "runs", "no_warmup")}
    first, *others = map(json.loads, team.gather("conditions", json.dumps({**common, **plan})))
    for rank, other in enumerate(others, 1):
        text = differences(other, first, (*CONDITIONS, *plan))
        if text:
            raise ConfigError(f"process {rank} differs from process 0 in {text}: give all processes the same options")


class Campaign:
    """The files of a campaign, which rank 0 reads and writes."""

    @system_errors_in_one_line()
    def __init__(self, name: str, out: Path, runs: int) -> None:
        """Read the rows. Raise ConfigError if a table cannot be read or written."""
        self.name = name
        self.out = out
        self.runs = runs
        self.table = Table(out / "runs.tsv", COLUMNS, durable=True)
        self.epochs = Table(out / "epochs.tsv", EPOCHS, durable=False)
        self.reader = Reader(self.table.path)
        self.rows: dict[int, Row] = {}  # the finished ones, by run
        self.path = out / ".campaigns" / f"{name}.json"
        self.common: dict[str, str] = {"campaign": name}
        self.table.append()
        self.path.parent.mkdir(exist_ok=True)
        # Opened once: closing any descriptor of a file frees all record locks of the process on it.
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if claim(self.file, LAUNCHES, self.path):  # no other launch is alive: what one left here is of no use
            os.ftruncate(self.file, 0)
        share(self.file, LAUNCHES)
        self.read_rows()

    def __enter__(self) -> "Campaign":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.file)  # frees all claims

    def read_rows(self) -> None:
        """Read what was appended to the table since the last time."""
        for row in self.reader.new_rows():
            if row["campaign"] == self.name:
                self.rows[int(row["run"])] = row

    # ---- Conditions

    @system_errors_in_one_line()
    def agree(self, values: Mapping[str, str]) -> Row:
        """Add conditions that the campaign lacks. Return all its conditions. Raise ConfigError."""
        with locked_byte(self.file, WRITER):
            agreed = {"campaign": self.name, "run": "0", **values, **self.known_conditions()}
            agreed["runs"] = str(max(self.runs, int(agreed.get("runs", 0))))  # runs asked for; `status` shows them
            text = json.dumps(agreed).encode()
            os.pwrite(self.file, text, 0)
            os.ftruncate(self.file, len(text))
        return agreed

    def known_conditions(self) -> Row:
        """Return the conditions of running launches; without these, of a finished run; without both, none."""
        with contextlib.suppress(ValueError):  # nothing, or half a text of a launch that was killed
            return json.loads(os.pread(self.file, 1 << 20, 0))
        first = next(iter(self.rows.values()), None)
        return as_of_run_0(first) if first else {}

    def begin(self, common: Mapping[str, str]) -> None:
        """Agree on the conditions. Raise ConfigError if they differ from the campaign's."""
        self.common |= common
        agreed = self.agree({name: common[name] for name in (*AGREED, "commit")})
        check_conditions([agreed, *self.rows.values()], self.common, AGREED)

    def computed_with(self, compile: bool, no_graph: bool) -> None:
        """Record how steps are computed. Raise ConfigError if this differs from the campaign's earlier runs."""
        self.common |= {"compile": str(compile), "no_graph": str(no_graph)}
        agreed = self.agree({name: self.common[name] for name in (*AGREED, *COMPUTED, "commit")})
        check_conditions([agreed, *self.rows.values()], self.common, COMPUTED)

    # ---- Runs

    @property
    def missing(self) -> list[int]:
        return [run for run in range(self.runs) if run not in self.rows]

    def take_run(self) -> int | None:
        """Claim the next run that is neither finished nor claimed by another process; None if there is none."""
        for run in self.missing:
            if claim(self.file, run, self.path):
                self.read_rows()  # another process may just have finished it
                if run not in self.rows:
                    return run
        return None

    def add_epoch(self, run: int, epoch: Mapping[str, object]) -> None:
        self.epochs.append({**self.common, "run": run, **epoch})

    def add_run(self, run: int, row: Mapping[str, object]) -> None:
        """Append a finished run. If the disk is full, wait. If it stays full, raise LostError.

        Without record locks, another launch may have made the same run: then warn.
        """
        with contextlib.suppress(ConfigError):  # of a table that someone edited: first this row must be written
            self.read_rows()
        if run in self.rows:
            doubled = f"another launch has also made run {run}, because locks have no effect here"
            warn(f"{doubled}: give each launch its own --out")
            return
        self.rows[run] = {name: str(value) for name, value in {**self.common, **row}.items()}
        accuracy = float(self.rows[run]["validation_accuracy"])
        self.table.add(self.rows[run])
        what = f"run {run} of {self.table.path} (seed {row['seed']}, accuracy {accuracy:.4f})"
        write_patiently(self.table.write, what, "is lost: make room, and start again")

    def finish(self) -> None:
        """Write the epochs that a full disk did not take, and read the rows of other launches."""
        with contextlib.suppress(OSError, ConfigError):  # a warning was already printed
            self.epochs.write()
        self.read_rows()

    def write_curve(self, epochs: Sequence[Mapping[str, float]]) -> None:
        curve = [(epoch["seconds"], epoch["validation_accuracy"]) for epoch in epochs]
        write_timing_log(self.out / "timing_log.tsv", curve)


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Row, for_use: Mapping[str, object]) -> None:
    """Write weights, the row of their run, and the data `for_use`. If the disk stays full, raise LostError."""
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    content = io.BytesIO()  # if torch.save writes a file, its errors do not say why
    torch.save({"weights": on_cpu, "about": about, **for_use}, content)

    def write() -> None:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(content.getbuffer())

    write_patiently(write, str(path), f"the weights of run {about['run']} are lost: a new --campaign makes them again")
