"""What a user may ask for: one frozen dataclass, whose fields are the command line's options.

Torch is not imported here, so that a request is refused before anything slow has started.
"""

import argparse
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import get_type_hints

from . import __version__

GROUP = 16  # images in a ghost group, whatever the batch (method, section 3)
REPO = Path(__file__).resolve().parent.parent

DEMO = {
    "data": "synthetic", "width": 8, "batch_size": 32, "epochs": 10, "ema_ep": 1.0,
    "lr_scaler": 1.0, "lr_scaler_end_fraction": 0.02,
}  # fmt: skip


class Refusal(Exception):  # noqa: N818 (an answer to the user, not a fault of the program)
    """A request that cannot be met. Its text is one line: what is wrong, and what to do."""


def option(default, text: str, **more):
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class Settings:
    """The published options with their names and defaults (method, section 4), then ours."""

    lr_scaler: float = option(1.5, "peak of the learning rate; weight decay grows with it")
    lr_scaler_end_fraction: float = option(0.1, "final learning rate, as a fraction of the peak")
    epochs: int = option(18, "epochs of a run")
    warmup_fraction: float = option(5.0, "the rate peaks at epochs / warmup_fraction")
    ema_ep: float = option(2.0, "epochs at the end with a constant rate")
    batch_size: int = option(256, "images a worker takes each step, a multiple of 16")
    runs: int = option(1, "runs, each with fresh weights; run i uses seed + i")
    data: str = option(str(REPO / "data"), "folder with CIFAR-10 (fetched if missing), FILE.npz, or synthetic")
    out: str = option(".", "folder for timing_log.tsv and runs.tsv")
    seed: int = option(0, "seed of the first run")
    precision: str = option("", "fp16 with CUDA, else fp32, unless given", choices=("fp16", "bf16", "fp32", "fp64"))
    width: int = option(64, "channels of the first block; the others scale with it")
    passes: int = option(1, "forward and backward passes a step is split into: more need less memory")
    compile: bool = option(False, "compile the training step (default with CUDA, and for runs of ten minutes on a CPU)")
    no_compile: bool = option(False, "do not compile")
    no_warmup: bool = option(False, "skip the untimed warm-up, so that the first run pays for it")
    save: str = option("", "file for the last run's weights and running statistics")
    resume: bool = option(False, "go on with the last unfinished campaign in --out, with its settings")
    demo: bool = option(False, "preset: " + " ".join(f"--{name} {value}" for name, value in DEMO.items()))
    workers: int = option(8, "", environment="WORKERS")

    def __post_init__(self) -> None:
        for name in ("epochs", "runs", "width", "passes", "batch_size", "workers", "lr_scaler"):
            if not getattr(self, name) > 0:
                raise Refusal(f"{self.spelled(name)} must be greater than 0")
        for name in ("lr_scaler", "lr_scaler_end_fraction", "ema_ep", "warmup_fraction"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise Refusal(f"{self.spelled(name)} must be a finite number, not below 0")
        if self.compile and self.no_compile:
            raise Refusal("--compile and --no_compile were both given: choose one")
        if not 0 <= self.seed < 2**62:
            raise Refusal(f"{self.spelled('seed')} must lie in 0 to 2**62 - 1")
        if self.batch_size % GROUP:
            raise Refusal(
                f"{self.spelled('batch_size')} is not divisible into ghost groups of {GROUP} images: "
                f"use {max(GROUP, self.batch_size // GROUP * GROUP)}"
            )
        if self.warmup_fraction < 1:
            raise Refusal(f"{self.spelled('warmup_fraction')} must be at least 1: the peak lies inside the run")
        if self.epochs / self.warmup_fraction > self.epochs - self.ema_ep:
            most = self.epochs - self.epochs / self.warmup_fraction
            raise Refusal(
                f"{self.spelled('ema_ep')} leaves no time to come down from the peak at epoch "
                f"{self.epochs / self.warmup_fraction:g} of {self.epochs}: use at most {most:g}"
            )

    def spelled(self, name: str) -> str:
        """A setting as the user wrote it: `--epochs 0`, `WORKERS=0`."""
        variable = self.__dataclass_fields__[name].metadata.get("environment")
        return f"{variable}={getattr(self, name)}" if variable else f"--{name} {getattr(self, name)}"

    def check_processes(self, processes: int) -> None:
        """Refuse a number of processes, or of passes, that would split a worker."""
        if self.workers % processes:
            fitting = [str(p) for p in range(1, self.workers + 1) if self.workers % p == 0]
            raise Refusal(
                f"WORKERS={self.workers} cannot be spread over NPROC={processes} processes: use {' or '.join(fitting)}"
            )
        if (self.workers // processes) % self.passes:
            raise Refusal(
                f"--passes {self.passes} does not divide the {self.workers // processes} workers of a process"
            )

    def check_images(self, train_count: int) -> None:
        """Refuse a training set of which a worker's shard does not fill one batch."""
        needed = self.workers * self.batch_size
        if needed > train_count:
            raise Refusal(
                f"WORKERS={self.workers} x --batch_size {self.batch_size} = {needed} images a step, more than "
                f"the training set's {train_count}: use a smaller batch, fewer workers or more images"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Refusal(f"{message}; --help lists the options")


def _parser(with_defaults: bool = True) -> _Parser:
    parser = _Parser(
        prog="train_cifar_parallel.sh",
        allow_abbrev=False,
        description="Train CIFAR-10 to 94% with large batches.",
        epilog="From the environment: WORKERS (default 8), NPROC (processes on this machine; default: as many "
        "as fit), PYTHON (interpreter), CIFAR10_URL (a mirror of your own), and for several machines NNODES, "
        "NODE_RANK, RDZV_ENDPOINT=host:port.",
    )
    kinds = get_type_hints(Settings)
    for entry in fields(Settings):
        if "environment" in entry.metadata:
            continue
        text = entry.metadata["help"].replace("%", "%%")
        default = entry.default if with_defaults else argparse.SUPPRESS
        if kinds[entry.name] is bool:
            parser.add_argument(f"--{entry.name}", action="store_true", default=default, help=text)
        else:
            shown = entry.default if entry.default != "" else "none"
            parser.add_argument(
                f"--{entry.name}", type=kinds[entry.name], default=default,
                choices=entry.metadata.get("choices"), help=f"{text} (default {shown})",
                metavar=None if "choices" in entry.metadata else kinds[entry.name].__name__.upper(),
            )  # fmt: skip
    version = f"large_batch_cifar_10_fast {__version__} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings a command line and its environment ask for; raises Refusal."""
    parser = _parser()
    if parser.parse_args(arguments).demo:
        parser.set_defaults(**DEMO)
    return Settings(**vars(parser.parse_args(arguments)), workers=count_from(environment, "WORKERS", 8))


def given(arguments: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """The names of the settings that a command line sets, one by one or by --demo, and those of its environment."""
    asked = vars(_parser(with_defaults=False).parse_args(arguments))
    return {*asked, *(DEMO if "demo" in asked else ()), *({"workers"} if environment.get("WORKERS") else ())}


def count_from(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from an environment variable; raises Refusal if it is none or not positive."""
    text = environment.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise Refusal(f"{name}={text} is not a number of at least 1")
    return int(text)
