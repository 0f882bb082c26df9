"""Use locks, fsync and temporary folders, which some file systems lack. Write files whole, or not at all."""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from . import LostError, describe
from .core.printing import warn, warn_once

T = TypeVar("T")

# Bytes of a campaign's file `claims` after those of all runs. The writer of the conditions locks one, all launches the
# other.
WRITER = 1 << 40
LAUNCHES = WRITER + 1
OPEN: set[Path] = set()  # folders of campaigns that this process trains

NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def lock(descriptor: int, path: Path) -> None:
    """Wait for the lock on an open file or folder. Some file systems have none: warn once, and continue."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        warn_once(f"{path} cannot be locked ({error.strerror}): do not write it from several launches at once")


def claim(descriptor: int, byte: int, path: Path) -> bool:
    """Lock a byte of an open file, unless another process has a lock on it; return whether this one has it now.

    The system frees a record lock when its process ends, however it ends, or closes the file. NFS has them. Where a
    file system has none, warn once and return True.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warn_once(f"{path} cannot be locked ({error.strerror}): launches beside each other need an --out of their own")
    return True


@contextlib.contextmanager
def locked_byte(descriptor: int, byte: int) -> Iterator[None]:
    """Run the body while no other process does so with this byte, where the file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def share(descriptor: int, byte: int) -> None:
    """Take a shared lock on a byte of an open file: others may share it, but not `claim` it."""
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_SH, 1, byte)


def is_running(folder: Path) -> bool:
    """Return whether a launch of the campaign in a folder is running. Raise OSError if this cannot be seen."""
    if folder.resolve() in OPEN:
        return True  # closing the file here would free this process's own locks
    claims = folder / "claims"
    with claims.open("rb+") as file:
        return not claim(file.fileno(), LAUNCHES, claims)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Run the body while no other process of this machine does so with this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def flush_to_disk(descriptor: int, path: Path) -> None:
    """Wait until what was written is on the disk. If the file system cannot do that, warn once, and continue."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC:  # a full disk, say
            raise
        warn_once(f"{path} is written, but a power failure may lose it ({error.strerror}): use another file system")


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; the file replaces `path` when it is on the disk."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    unfinished = path.with_name(f".unfinished.{secrets.token_hex(4)}")  # containers have equal PIDs
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            flush_to_disk(file.fileno(), path)
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def publish(path: Path, content: bytes) -> bool:
    """Write a file whole and to the disk, unless it exists. Return whether it was written."""
    unfinished = path.with_name(f".unfinished.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            flush_to_disk(file.fileno(), path)
        try:
            os.link(unfinished, path)  # which replaces nothing
        except OSError:  # it exists, or the file system has no links
            if path.exists():
                return False
            os.replace(unfinished, path)
        return True
    finally:
        unfinished.unlink(missing_ok=True)


PAUSE = 60  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_patiently(write: Callable[[], T], what: str) -> T:
    """Write what a run has made; return what `write` does. On a full disk wait and try again, with a line a minute.

    Raise LostError if it cannot be written at all.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL:
                raise LostError(f"{describe(error)}: {what} is not written") from error
            warn(f"{error.strerror}: {what} is not written; make room, the next try is in {PAUSE} seconds")
        time.sleep(PAUSE)
