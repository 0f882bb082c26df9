"""One command for all: cifar10-fast COMMAND, or python -m large_batch_cifar_10_fast COMMAND."""

import importlib
import io
import os
import re
import signal
import sys
from types import FrameType
from typing import NoReturn

from . import INVALID, PACKAGE, PROGRAMS, SIGNALS, ConfigError, Interrupted, first_line, version
from .lab.process import is_started

COMMANDS = ("train", "experiment", "compare", "plot", "evaluate", "predict", "export", "photos")
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # may bind all processes to one core


def main() -> NoReturn:
    """Run a command and exit: with its status, 2 for an invalid request, 128 + N after signal N.

    An error of the system, and a ValueError of NumPy, pandas or Matplotlib, is one line here.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape names that the terminal cannot show
    try:
        status = run(name, arguments)
        print(end="", flush=True)
    except Interrupted as end:
        text, status = end.args
        print(f"{name}: {text}", file=sys.stderr)
    except BrokenPipeError:  # the reader of STDOUT has ended, like head
        status = 128 + signal.SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConfigError, ImportError, OSError, ValueError) as error:
        status = INVALID
        print(f"{name}: {first_line(error)}", file=sys.stderr)
    sys.exit(status)


def run(name: str, arguments: list[str]) -> int:
    """Run a command. Return its exit status."""
    if name in ("--help", "-h"):
        print(help_text())
        return 0
    if "--version" in (name, *arguments):
        print(version())
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no such command: use {', '.join(COMMANDS)}")
    try:
        if not is_started():
            prepare(name, arguments)
        command = importlib.import_module(f"{PACKAGE.name}.commands.{name}")
    except ModuleNotFoundError as error:
        if {"--help", "-h"} & {*arguments}:
            print(help_text())
            return 0
        raise ConfigError(f"{error}: bash train_cifar_parallel.sh installs what is needed") from error
    return command.main(arguments) or 0


def help_text() -> str:
    """Return what `--help` shows. The first line of each command's file says what it does."""
    text = "Example: bash train_cifar_parallel.sh --recipe muon --runs 5\n\n"
    text += f"Recipes: {', '.join(PROGRAMS)}, or FILE.py: a program of your own. Options: docs/running.md#options.\n\n"
    text += "Commands, each with --help:\n"
    for command in COMMANDS:
        first = (PACKAGE / f"commands/{command}.py").read_text().splitlines()[0]
        text += f"  {command:12}{first[3:]}\n"
    return text


def prepare(name: str, arguments: list[str]) -> None:
    """Prepare the process of a command for signals and for torch. Start it again from the copy of its campaign."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            signal.signal(number, interrupt)  # before torch's slow import: PID 1 has no default action
    for variable in (*BINDING, "LOCAL_RANK", "RANK"):  # that other launchers set
        os.environ.pop(variable, None)
    if not re.match("[1-9]", os.environ.get("OMP_NUM_THREADS", "")):  # OpenMP would take all cores, with a warning
        os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is one line
    from .lab.snapshot import enter, place_of

    if name == "train":
        enter(place_of(arguments), name, arguments)
    if name == "experiment" and "--report" not in arguments:
        enter(place_of(arguments, out="experiment", campaign="baseline"), name, arguments)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(f"ended by {signal.Signals(number).name}", 128 + number)


if __name__ == "__main__":
    main()
