"""CIFAR-10 to 94%, eight workers at a time: a living reproduction of the 2019 result."""

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ORIGIN_VARIABLE = "LARGE_BATCH_ORIGIN"  # environment variable: the package of which this one is a copy
ORIGIN = Path(os.environ.get(ORIGIN_VARIABLE, PACKAGE))
__version__ = "0.3.0"
# The module of each recipe.
PROGRAMS = {"apple2019": "apple2019", **dict.fromkeys(("muon", "muon95", "muon_first", "muon2024"), "muon")}
PROGRAMS |= {"page": "page", "basenet": "page", "fastai": "fastai"}
RENDEZVOUS = "LARGE_BATCH_RENDEZVOUS"  # environment variable: the rendezvous of the launcher's processes
LAUNCHER = "LARGE_BATCH_LAUNCHER"  # the process id of the launcher
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
INVALID = 2  # the exit status for an invalid request


class ConfigError(Exception):
    """An invalid request. Its text is one line: what is wrong, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))
        # Under torchrun all processes of a machine may raise this error: only the first prints it.
        self.reported = os.environ.get("LOCAL_RANK", "0") != "0"


class LostError(Exception):
    """What a run has made cannot be written. Its text is one line: what is lost, and why."""


class Interrupted(BaseException):
    """A signal that ends a command: a sentence about it, and the exit status."""


def first_line(text: object) -> str:
    """Return the first line of a text or an exception, or its type if it is empty."""
    return (str(text).strip().splitlines() or [type(text).__name__])[0]


def list_some(texts: Sequence[str], most: int) -> str:
    """Return the first texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def check_range(options: Any, least: float, most: float, *names: str) -> None:
    """Raise ConfigError if one of these options lies outside the limits."""
    for name in names:
        value = getattr(options, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name} {value} must lie in {least} to {most}")


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return ""


def git(*words: str) -> str:
    """Return what git says about the checkout of this code, not about a repository around it."""
    return output_of("git", f"--git-dir={PACKAGE.parent / '.git'}", f"--work-tree={PACKAGE.parent}", *words)


@cache
def commit() -> str:
    """Return the commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    copied = PACKAGE.parent / "commit"  # lab/snapshot.py writes it beside a copy
    if copied.exists():
        return copied.read_text()
    return git("describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def version() -> str:
    return f"{PACKAGE.name} {__version__}, commit {commit()} (Python {platform.python_version()})"
