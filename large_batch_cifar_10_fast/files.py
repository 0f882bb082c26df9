"""Use locks and temporary names. Write files whole, or not at all."""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from . import LostError, first_line
from .core.printing import warn

T = TypeVar("T")

LAUNCHES = 1 << 40  # the byte of a campaign's file `claims`, after those of all runs, that all its launches lock

PAUSE = 60  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Run the body while no other process does so with this folder, or this file, which is made if it is missing.

    Some file systems have no locks: there, continue without.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def claim(descriptor: int, byte: int) -> bool:
    """Lock a byte of an open file, unless another process has a lock on it; return whether this one has it now.

    The system frees a record lock when its process ends, however it ends, or closes the file. NFS has them. Where a
    file system has none, return True.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def share(descriptor: int, byte: int) -> None:
    """Take a shared lock on a byte of an open file: others may share it, but not `claim` it."""
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_SH, 1, byte)


def is_running(folder: Path) -> bool:
    """Return whether another process has a launch of the campaign in a folder. Raise OSError if this cannot be seen."""
    claims = folder / "claims"
    with claims.open("rb+") as file:
        return not claim(file.fileno(), LAUNCHES)


def flush_to_disk(path: Path) -> None:
    """Wait until a file is on the disk, if the file system can do that."""
    with path.open("rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno in (*FULL, errno.EIO):
                raise


@contextlib.contextmanager
def write_atomically(path: Path, publish: Callable[[Path, Path], None] = os.replace) -> Iterator[Path]:
    """Yield a name beside `path` to write to. When that file is on the disk, it becomes `path` by `publish`."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    unfinished = path.with_name(f".unfinished.{secrets.token_hex(4)}")  # containers have equal PIDs
    try:
        yield unfinished
        flush_to_disk(unfinished)
        publish(unfinished, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Give a file another name. Raise FileExistsError if there is one of that name."""
    try:
        os.link(source, target)
    except OSError:  # it exists, or the file system has no links
        if target.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(target)) from None
        os.replace(source, target)


def write_patiently(write: Callable[[], T], what: str) -> T:
    """Write what a run has made; return what `write` does. On a full disk wait and try again, with a line a minute.

    Raise LostError if it cannot be written at all.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL:
                raise LostError(f"{first_line(error)}: {what} is not written") from error
            warn(f"{error.strerror}: {what} is not written; make room, the next try is in {PAUSE} seconds")
        time.sleep(PAUSE)
