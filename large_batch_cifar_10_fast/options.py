"""How options are declared and checked, and the options that are the same for every recipe."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPO = PACKAGE.parent
DATA = REPO / "data" if (REPO / "run_tests.sh").exists() else Path("data")  # an installed package has no repository
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
SYNTHETIC = "synthetic"  # the --data that needs no file
WHOLE = "0/1"  # the share that is all of a campaign
INVALID = 2  # the exit status for an invalid request
MOST = 100_000  # the largest number any option takes
PRECISION = "default on a GPU: the recipe's; on a CPU: bf16 if it is faster and a run takes ten minutes, else fp32"


class ConfigError(Exception):
    """An invalid request. Its text is one line: what is wrong, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def first_line(text: object) -> str:
    """Return the first line of a text or an exception; of an empty one its type."""
    return (str(text).strip().splitlines() or [type(text).__name__])[0]


@contextlib.contextmanager
def exit_on_config_error(command: str) -> Iterator[None]:
    """Print a ConfigError as one line on STDERR, from one process of a machine, and exit with status 2."""
    try:
        yield
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{command}: {error}", file=sys.stderr)
        sys.exit(INVALID)


def option(default, text: str, **more):
    """Return a dataclass field that is an option of the command line."""
    return field(default=default, metadata={"help": text, **more})


def same_option(owner: type, name: str, default):
    """Return an option of another recipe with another default."""
    return field(default=default, metadata=owner.__dataclass_fields__[name].metadata)


def has_option(owner: object, name: str) -> bool:
    """Return whether this is an option of a recipe; otherwise the recipe fixes it (ClassVar)."""
    return name in {entry.name for entry in fields(owner)}


def spelled(value: object, name: str) -> str:
    """Return an option as the user writes it: `--epochs 0`."""
    return f"--{name} {getattr(value, name)}"


def check_positive(value: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(value, name) <= MOST:
            raise ConfigError(f"{spelled(value, name)} must be greater than 0, and at most {MOST}")


def check_not_negative(value: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(value, name) <= MOST:
            raise ConfigError(f"{spelled(value, name)} must be a number of 0 to {MOST}")


def check_within(value: object, name: str, least: int, most: float, why: str) -> None:
    if not least <= getattr(value, name) <= most:
        raise ConfigError(f"{spelled(value, name)} must lie in {least} to {most}: {why}")


def as_pairs(values: Mapping[str, object]) -> str:
    """Return options as tables and logs have them: `name=value name=value`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def from_pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", text))


def runs_of(share: str, runs: int) -> range:
    """Return the runs of a share: I/N is run I and every Nth run after it. Raise ConfigError if there are none."""
    if re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", share) and runs <= MOST:
        first, shares = map(int, share.split("/"))
        if first < min(shares, runs):
            return range(first, runs, shares)
    raise ConfigError(f"share {share} has none of {runs} runs: give I/N, I from 0, less than N and the number of runs")


@dataclass(frozen=True)
class RunConfig:
    """Where and how a recipe runs: device, precision, compilation, folders, campaign."""

    runs: int = option(1, "runs, each with fresh weights; run i uses seed + i")
    share: str = option(WHOLE, "I/N: make only runs I, I+N, I+2N, ...; other launches make the other shares of N")
    seed: int = option(0, "seed of the first run")
    data: str = option(str(DATA), "folder with CIFAR-10 (downloaded if missing), FILE.npz, or synthetic")
    out: str = option(".", "folder for timing_log.tsv, runs.tsv and epochs.tsv")
    device: str = option("", "the GPUs if there are any, else the CPU", choices=("cuda", "cpu"))
    precision: str = option("", PRECISION, choices=("fp16", "bf16", "tf32", "fp32", "fp64"))
    micro_batches: int = option(1, "forward and backward passes per step; more need less memory")
    compile: bool = option(False, "compile the network (default on GPUs, and on a CPU for campaigns over ten minutes)")
    no_compile: bool = option(False, "do not compile")
    no_graph: bool = option(False, "launch each kernel; by default the GPUs of one machine replay a CUDA graph")
    no_warmup: bool = option(False, "skip the untimed warm-up; the first run is then slower")
    save: str = option("", "file for the weights and running statistics of the last run (of the share)")
    resume: bool = option(False, "continue the last campaign in --out with its options")
    demo: bool = option(False, "the default recipe, small, on synthetic images")

    def __post_init__(self) -> None:
        check_positive(self, "runs", "micro_batches")
        if not self.resume:  # which takes runs and share from the campaign
            runs_of(self.share, self.runs)
        if self.compile and self.no_compile:
            raise ConfigError("--compile and --no_compile were both given: choose one")
        for name in ("data", "out", "save"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))  # a shell leaves `--out=~/x` alone
            if not getattr(self, name).isprintable():
                raise ConfigError(f"--{name} {getattr(self, name)!a} cannot stand in a table: use printable characters")
        check_within(self, "seed", 0, 2**62 - 1, "seeds of runs are 64-bit integers")

    @property
    def planned(self) -> range:
        """The runs of this launch's share."""
        return runs_of(self.share, self.runs)


@dataclass(frozen=True)
class Launch:
    """How processes are started."""

    nproc: int = option(0, "processes on this machine (of a team); 0: as many as fit its GPUs or cores")
    nnodes: int = option(1, "machines; start the script on each")
    node_rank: int = option(0, "number of this machine, from 0, which reads and writes the tables")
    rdzv_endpoint: str = option("", "host:port of the first machine, for the rendezvous")
    teams: int = option(1, "launches on this machine that share the runs, each with its own GPUs or cores")
    restarts: int = option(0, "how often a launch that failed is started again, for the missing runs")
    timeout: int = option(3600, "seconds that processes wait for each other")

    def __post_init__(self) -> None:
        check_positive(self, "nnodes", "teams", "timeout")
        check_not_negative(self, "nproc", "restarts")
        check_within(self, "node_rank", 0, self.nnodes - 1, f"there are {self.nnodes} machines (--nnodes)")
        if self.nnodes > 1 and (self.teams > 1 or self.restarts):
            raise ConfigError("--teams and --restarts are for one machine: use --share and --resume on several")
        if self.nnodes > 1 and not re.fullmatch(".+:[0-9]{1,5}", self.rdzv_endpoint):
            raise ConfigError(f"--rdzv_endpoint {self.rdzv_endpoint} must be host:port of the first machine")
