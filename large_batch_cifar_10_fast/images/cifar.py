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
    """A data set that torchvision has: its name in logs, and what a folder with it has."""

    name: str
    archive: str
    folder: str


# By the --data that downloads them.
SOURCES = {
    "cifar10": Source(CIFAR_10, "cifar-10-python.tar.gz", "cifar-10-batches-py"),
    "cifar100": Source(CIFAR_100, "cifar-100-python.tar.gz", "cifar-100-python"),
}


def find_cifar(path: Path) -> tuple[Path, str]:
    """Return the folder of a data set, and its key in SOURCES. Raise ConfigError."""
    if path == DATA or (path.is_dir() and not any(path.iterdir())):
        return path, "cifar10"
    for key, source in SOURCES.items():
        if str(path) == key:
            return DATA, key
        if (path / source.archive).exists() or (path / source.folder).exists():
            return path, key
    photos = f"`cifar10-fast photos {shlex.quote(str(path))} photos.npz` makes a file of photos"
    raise ConfigError(f"--data {path} has no data set, and a download needs an empty folder; {photos}")


def read_cifar(folder: Path, key: str) -> list[np.ndarray]:
    """Read a data set, downloaded and unpacked if it is missing or damaged. Raise ConfigError.

    One process of a machine downloads, the others wait.
    """
    from torchvision import datasets  # which takes a second

    kind: Any = getattr(datasets, key.upper())
    variable = f"{key.upper()}_URL"
    mirrored: Any = type(key, (kind,), {"url": os.environ.get(variable) or kind.url})
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    socket.setdefaulttimeout(TIMEOUT)
    try:
        for train in (True, False):
            with locked(folder):
                part = mirrored(folder, train=train, download=True)
            arrays += [np.ascontiguousarray(part.data), np.array(part.targets)]  # not left to the timed upload
    except Exception as error:  # torchvision, urllib and tarfile raise nearly anything
        hint = f"put {kind.filename} there by hand, name a mirror in {variable}, or try --demo"
        raise ConfigError(f"{SOURCES[key].name} cannot be read from {folder} ({first_line(error)}): {hint}") from error
    finally:
        socket.setdefaulttimeout(None)
    return arrays
