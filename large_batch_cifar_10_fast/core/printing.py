"""What is printed: the log on STDOUT; warnings and progress on STDERR, clear of the progress bar. No torch."""

import os
import sys
from functools import cache

from tqdm import tqdm


def warn(text: str) -> None:
    show(f"Warning: {text}")


def show(text: str) -> None:
    """Print a line on STDERR, clear of the progress bar. Of several processes that train, only rank 0 prints.

    Text and line end are one write: with PYTHONUNBUFFERED they would be two, and lines of several processes would mix.
    """
    if sys.stderr and os.environ.get("RANK", "0") == "0":  # STDERR is None if it was closed
        with tqdm.external_write_mode():
            print(f"{text}\n", end="", file=sys.stderr, flush=True)


def print_line(line: str) -> None:
    """Print a line of the log, like `show`. If it cannot be written, continue without a log."""
    with tqdm.external_write_mode():
        try:
            print(f"{line}\n", end="", flush=True)
        except OSError as error:  # a full disk, or a pipe whose reader has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            warn(f"STDOUT cannot be written ({error.strerror}): the log ends here, the tables continue")


warn_once = cache(warn)
