"""CIFAR-10 to 94%, eight workers at a time: a living reproduction of the 2019 result."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from .loading import PACKAGE

__version__ = "0.3.0"
RENDEZVOUS = "LARGE_BATCH_RENDEZVOUS"  # environment variable: the rendezvous of the launcher's processes
INVALID = 2  # the exit status for an invalid request


class ConfigError(Exception):
    """An invalid request. Its text is one line: what is wrong, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))
        # Without our launcher, the first process of a machine prints what all of them find.
        self.reported = os.environ.get("LOCAL_RANK", "0") != "0"


def program() -> str:
    """Return the name by which a user started this program."""
    name = Path(sys.argv[0])
    if name.stem == "launch" or RENDEZVOUS in os.environ:
        return "train_cifar_parallel.sh"
    if name.suffix == ".py":
        return f"python -m {PACKAGE.name}.{name.stem}" if name.resolve().parent == PACKAGE else f"python {name}"
    return name.name


def first_line(text: object) -> str:
    """Return the first line of a text or an exception; of an empty one its type."""
    return (str(text).strip().splitlines() or [type(text).__name__])[0]


@contextlib.contextmanager
def exit_on_config_error(command: str) -> Iterator[None]:
    """Print a ConfigError as one line on STDERR, unless another process does, and exit with status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of names that the terminal cannot show
    try:
        yield
        print(end="", flush=True)
    except ConfigError as error:
        if not error.reported:
            print(f"{command}: {error}", file=sys.stderr)
        sys.exit(INVALID)
    except BrokenPipeError:  # the reader of STDOUT has ended, like head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
