"""Find CIFAR-10 and CIFAR-100, or download them by torchvision, which checks MD5s."""

import os
import shlex
import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import ORIGIN, ConfigError, first_line
from ..files import locked

# The checkout's data folder. If the package is installed: `data` in the current folder.
DATA = ORIGIN.parent / "data" if (ORIGIN.parent / "run_tests.sh").exists() else Path("data")
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CIFAR_100 = "CIFAR-100"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TIMEOUT = 30  # seconds without a byte after which a download fails


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
    if path == DATA:
        return path, SOURCES[0]
    for source in SOURCES:
        if str(path) == source.key and not path.exists():
            return DATA, source
        if path.name == source.archive and path.is_file():
            return path.parent, source
        if (path / source.archive).exists() or (path / source.folder).exists():
            return path, source
    if path.is_dir() and not any(path.iterdir()):
        return path, SOURCES[0]
    if path.is_dir():
        photos = f"`cifar10-fast photos {shlex.quote(str(path))} photos.npz` makes a file of photos"
        raise ConfigError(f"--data {path} has no data set, and a download needs an empty folder; {photos}")
    archives = " or ".join(source.archive for source in SOURCES)
    raise ConfigError(f"--data {path} is no data set: name FILE.npz, {archives}, or an empty folder for a download")


def read_cifar(folder: Path, source: Source) -> list[np.ndarray]:
    """Read a data set, downloaded and unpacked if it is missing or damaged. Raise ConfigError.

    One process of a machine downloads, the others wait.
    """
    from torchvision import datasets

    kind: Any = getattr(datasets, source.kind)
    variable = f"{source.kind}_URL"
    url = os.environ.get(variable) or kind.url
    mirrored: Any = type(source.kind, (kind,), {"url": url})
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    limit = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(TIMEOUT)
        for train in (True, False):
            with locked(folder):
                part = mirrored(folder, train=train, download=True)
            arrays += [np.ascontiguousarray(part.data), np.array(part.targets)]  # not left to the timed upload
    except Exception as error:  # torchvision, urllib and tarfile raise nearly anything
        hint = f"put {source.archive} there by hand, name a mirror in {variable}, or try --demo"
        raise ConfigError(f"{source.name} cannot be loaded from {folder} ({first_line(error)}): {hint}") from error
    finally:
        socket.setdefaulttimeout(limit)
    return arrays
