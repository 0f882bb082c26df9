"""Train in this process. Each program's last line calls `main`, and a launch starts it for each GPU or core."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from .. import INVALID, LAUNCHER, PACKAGE, PROGRAMS, RENDEZVOUS, SIGNALS, ConfigError, LostError, describe, first_line
from .snapshot import LOADED, LOADING, environment_of


def main() -> None:
    """Train the program in this process's main file: as `train` with one process, or under torchrun here."""
    if LOADING:
        raise ConfigError("the program calls main() when it is loaded: put it under `if __name__ == '__main__':`")
    file = Path(str(sys.modules["__main__"].__file__)).absolute()
    is_ours = file.resolve().parent == PACKAGE and file.stem in PROGRAMS
    recipe = file.stem if is_ours else str(file)
    if "RANK" not in os.environ:
        words = [sys.executable, "-m", PACKAGE.name, "train", "--recipe", recipe, "--nproc", "1", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | environment_of(PACKAGE.parent))
    LOADED.extend([file.parent, file.resolve().parent])  # its modules are loaded again
    train([*sys.argv[1:], f"--recipe={recipe}"])


def train(arguments: list[str]) -> None:
    """Train the recipe of a command line, and end the process."""
    with exit_process():
        from .conduct import run_program  # which imports torch
        from .program import load_program, recipe_of

        run_program(load_program(recipe_of(arguments)), arguments)


@contextlib.contextmanager
def exit_process() -> Iterator[None]:
    """Run the body, print an error, and end the process. Each process names its own error, whatever its rank.

    Children of a launcher end with os._exit: PyTorch's static destructors aborted 5 of 90 launches.
    """
    status = 0
    try:
        yield
    except (ConfigError, OSError) as error:
        status = INVALID
        if launched := os.environ.get(RENDEZVOUS):  # our launcher prints it
            Path(launched.removeprefix("file://")).with_name(f"error.{os.getpid()}").write_text(describe(error))
        elif getattr(error, "reported", False):
            time.sleep(3)  # until another process has printed it: torchrun ends all when one ends
        else:
            print(f"{Path(sys.argv[0]).name}: {describe(error)}", file=sys.stderr)
    except (Exception, SystemExit) as error:
        status = 1
        if re.search("connection|remote process|recvvalue", str(error), re.IGNORECASE):
            time.sleep(3)  # a lost process caused this error: the launcher ends this one meanwhile
        if not isinstance(error, LostError | SystemExit):
            traceback.print_exc()
        print(f"process {os.environ.get('RANK', 0)} failed ({first_line(repr(error))})", file=sys.stderr)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed
        stream.flush()
    if "LOCAL_RANK" in os.environ:
        os._exit(status)
    sys.exit(status)


def follow_launcher() -> None:
    """Leave Ctrl-C to the launcher, and end when it ends. It has started this process with blocked signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[LAUNCHER]):  # it ended before the request
        os._exit(1)


if __name__ == "__main__":
    if LAUNCHER in os.environ:
        follow_launcher()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names that the log cannot show
    train(sys.argv[1:])
