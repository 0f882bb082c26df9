"""Train in this process. Each program's last line calls `main`, and `train` starts it for each GPU or core."""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from .. import INVALID, PACKAGE, PROGRAMS, RENDEZVOUS, ConfigError, LostError, first_line
from .program import load_program, recipe_of, run_program
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
    with exit_process():
        LOADED.extend([file.parent, file.resolve().parent])  # its modules are loaded again
        run_program(load_program(recipe), sys.argv[1:])


@contextlib.contextmanager
def exit_process() -> Iterator[None]:
    """Run the body, print an error, and end the process. Each process names its own error, whatever its rank.

    Children of a launcher end with os._exit: PyTorch's static destructors aborted 5 of 90 launches.
    """
    status = 0
    try:
        yield
    except ConfigError as error:
        status = INVALID
        if launched := os.environ.get(RENDEZVOUS):  # our launcher prints it
            Path(launched.removeprefix("file://")).with_name(f"error.{os.getpid()}").write_text(str(error))
        elif error.reported:
            time.sleep(3)  # until another process has printed it: torchrun ends all when one ends
        else:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    except LostError as error:
        print(f"process {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        status = 1
    except Exception as error:
        if re.search("connection|remote process|recvvalue", str(error), re.IGNORECASE):
            time.sleep(3)  # a lost process caused this error: the launcher ends this one meanwhile
        traceback.print_exc()
        print(f"process {os.environ.get('RANK', 0)} failed ({first_line(repr(error))})", file=sys.stderr)
        status = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed
        stream.flush()
    if "LOCAL_RANK" in os.environ:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    with exit_process():
        run_program(load_program(recipe_of(sys.argv[1:])), sys.argv[1:])
