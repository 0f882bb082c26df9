"""One command for all: cifar10-fast COMMAND, or python -m large_batch_cifar_10_fast COMMAND."""

import importlib
import io
import os
import re
import signal
import sys
from types import FrameType
from typing import NoReturn

from . import INVALID, PACKAGE, PROGRAMS, SIGNALS, ConfigError, Interrupted, describe, version

COMMANDS = {
    "train": "make the runs of a campaign (a named set of runs)",
    "experiment": "make the runs of a baseline and of variants, and compare them",
    "compare": "compare campaigns with a reference",
    "plot": "draw campaigns side by side",
    "evaluate": "test saved weights: accuracy of each class, confusions, errors",
    "predict": "say what pictures show, by saved weights",
    "export": "write saved weights as an ONNX file",
    "photos": "make a .npz file of photos, to train on",
}
HELP = f"""Example: bash train_cifar_parallel.sh --recipe muon --runs 5, or cifar10-fast train --recipe muon --runs 5

Recipes: {", ".join(PROGRAMS)}, or FILE.py: a program of your own. Options: docs/running.md#options.

Commands, each with --help:
"""
HELP += "".join(f"  {name:12}{text}\n" for name, text in COMMANDS.items())
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # may bind all processes to one core


def main() -> NoReturn:
    """Run a command and exit: with its status, 2 for an invalid request, 128 + N after signal N.

    An error of the system, and a ValueError of NumPy, pandas or Matplotlib, is one line here. `python -X dev` shows
    where it is from.
    """
    open_closed_streams()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            signal.signal(number, interrupt)  # before torch's slow import: PID 1 has no default action
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    try:
        try:
            sys.exit(run(name, sys.argv[2:]))
        finally:
            print(end="", flush=True)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(INVALID)
    except Interrupted as end:
        text, status = end.args
        print(f"{name}: {text}", file=sys.stderr)
        sys.exit(status)
    except BrokenPipeError:  # the reader of STDOUT has ended, like head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (OSError, ValueError) as error:
        if sys.flags.dev_mode:
            raise
        print(f"{name}: {describe(error)}", file=sys.stderr)
        sys.exit(INVALID)


def run(name: str, arguments: list[str]) -> int:
    """Run a command. Return its exit status."""
    if name in ("--help", "-h"):
        print(HELP)
        return 0
    if "--version" in (name, *arguments):
        print(version())
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no such command: use {', '.join(COMMANDS)}")
    prepare_environment()
    try:
        from .lab.snapshot import enter, place_of  # which imports packages

        if name == "train":
            enter(place_of(arguments), name, arguments)
        if name == "experiment" and "--report" not in arguments:
            enter(place_of(arguments, out="experiment", campaign="baseline"), name, arguments)
        command = importlib.import_module(f"{PACKAGE.name}.commands.{name}")
    except ModuleNotFoundError as error:
        if "--help" in arguments or "-h" in arguments:
            print(HELP)
            return 0
        raise ConfigError(f"{error}: bash train_cifar_parallel.sh installs what is needed") from error
    return command.main(arguments) or 0


def prepare_environment() -> None:
    """Remove variables that other launchers set, before torch is imported."""
    for name in (*BINDING, "LOCAL_RANK"):
        os.environ.pop(name, None)
    if not re.match("[1-9]", os.environ.get("OMP_NUM_THREADS", "")):  # OpenMP would take all cores, with a warning
        os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is one line


def open_closed_streams() -> None:
    """Open what a user closed, as by `2>&-`: otherwise the next file that is opened would get the log, or errors."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # for the processes that are started, too
            setattr(sys, name, os.fdopen(number, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape names that the terminal cannot show


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(f"ended by {signal.Signals(number).name}", 128 + number)


if __name__ == "__main__":
    main()
