"""Find CIFAR-10 and CIFAR-100, or download them by torchvision. Check their MD5s and unpack them."""

import contextlib
import io
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import PACKAGE, ConfigError, first_line
from ..files import locked

# The checkout's data folder. If the package is installed: `data` in the current folder.
DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "run_tests.sh").exists() else Path("data")
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CIFAR_100 = "CIFAR-100"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TIMEOUT = 30  # seconds without a byte after which a download fails
HARMLESS = (".", "download-", "lost+found")  # a folder for a download may contain names that begin with these


class Source(NamedTuple):
    """A data set that torchvision has: its name in logs, the --data that downloads it, class, archive and folder."""

    name: str
    key: str
    kind: str
    archive: str
    folder: str


SOURCES = (
    Source(CIFAR_10, "cifar10", "CIFAR10", "cifar-10-python.tar.gz", "cifar-10-batches-py"),
    Source(CIFAR_100, "cifar100", "CIFAR100", "cifar-100-python.tar.gz", "cifar-100-python"),
)


def find_source(path: Path) -> tuple[Path, Source]:
    """Return the folder for a data set, and its source. Raise ConfigError."""
    try:
        return find(path)
    except OSError as error:  # too long a name, or a folder that may not be read
        raise ConfigError(f"--data {path} cannot be used ({error.strerror}): name another") from error


def find(path: Path) -> tuple[Path, Source]:
    others: list[str] = []
    if path.is_dir():  # before the checks below: another process may download meanwhile
        others = sorted(each.name for each in path.iterdir() if not each.name.startswith(HARMLESS))
    for source in SOURCES:
        if str(path) == source.key and not path.exists():
            return DATA, source
        if path.name == source.archive and path.is_file():
            return path.parent, source
        if path != DATA and ((path / source.archive).exists() or (path / source.folder).exists()):
            return path, source
    if path == DATA or (path.is_dir() and not others):
        return path, SOURCES[0]
    if path.is_dir():
        photos = f"`cifar10-fast photos {shlex.quote(str(path))} photos.npz` makes a file of photos"
        raise ConfigError(f"--data {path} has {', '.join(others[:3])}, but a download needs an empty folder; {photos}")
    found = "is not a data set" if path.exists() else "does not exist"
    archives = " or ".join(source.archive for source in SOURCES)
    raise ConfigError(f"--data {path} {found}: name FILE.npz, {archives}, or an empty folder for a download")


def read_cifar(folder: Path, source: Source) -> list[np.ndarray]:
    """Read a data set by torchvision, downloaded if it is missing. Raise ConfigError."""
    from torchvision import datasets

    fetch(folder, source)
    arrays = []
    for train in (True, False):
        part = getattr(datasets, source.kind)(folder, train=train)
        arrays += [np.ascontiguousarray(part.data), np.array(part.targets)]  # not left to the timed upload
    return arrays


def fetch(folder: Path, source: Source) -> None:
    """Download and unpack the missing files of a data set, and check their MD5s. Raise ConfigError.

    One process of a machine does this, the others wait. After a failure, a new folder is removed.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity, extract_archive

    kind: Any = getattr(datasets, source.kind)
    variable = f"{source.kind}_URL"
    archive = folder / source.archive
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not all(check_integrity(folder / source.folder / name, md5) for name, md5 in files):
                if not archive.exists():
                    download(os.environ.get(variable) or kind.url, archive, kind.tgz_md5)
                if not check_integrity(archive, kind.tgz_md5):
                    damaged = f"{archive} is damaged (its MD5 is not {kind.tgz_md5})"
                    raise ConfigError(f"{damaged}: delete it and start again")
                extract_archive(archive, folder)
    except ConfigError:
        raise
    except Exception as error:  # torchvision, urllib and tarfile raise nearly anything
        hint = f"put {source.archive} there by hand, name a mirror in {variable}, or try --demo"
        raise ConfigError(f"{source.name} cannot be loaded from {folder} ({first_line(error)}): {hint}") from error
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def download(url: str, archive: Path, md5: str) -> None:
    """Download an archive by torchvision. Show its progress bar on terminals only.

    The file gets its name when it is complete, so an interrupted download is never used.
    """
    from torchvision.datasets.utils import download_url

    limit = socket.getdefaulttimeout()
    bar = sys.stderr if sys.stderr and sys.stderr.isatty() else io.StringIO()
    with tempfile.TemporaryDirectory(prefix="download-", dir=archive.parent) as temporary:
        print(f"Downloading {archive.name} (170 MB) from {url} to {archive.parent}", file=sys.stderr)
        socket.setdefaulttimeout(TIMEOUT)
        try:
            with contextlib.redirect_stderr(bar):
                download_url(url, temporary, archive.name, md5)
        finally:
            socket.setdefaulttimeout(limit)
        os.replace(Path(temporary) / archive.name, archive)
