"""Find CIFAR-10 and CIFAR-100, or download them by torchvision, which checks MD5s."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np

from .. import ORIGIN, ConfigError, first_line
from ..files import locked

# The checkout's data folder. If the package is installed: `data` in the current folder.
DATA = ORIGIN.parent / "data" if (ORIGIN.parent / "run_tests.sh").exists() else Path("data")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def find_cifar(path: Path) -> tuple[Path, Any]:
    """Return the folder of a data set, and torchvision's class for it. Raise ConfigError."""
    from torchvision import datasets  # which takes a second

    if path == DATA or (path.is_dir() and not any(path.iterdir())):
        return path, datasets.CIFAR10
    for kind in (datasets.CIFAR10, datasets.CIFAR100):
        if str(path) == kind.__name__.lower():
            return DATA, kind
        if (path / kind.filename).exists() or (path / kind.base_folder).exists():
            return path, kind
    raise ConfigError(f"--data {path} has no data set; downloads need an empty folder; `photos` reads photos")


def read_cifar(path: Path) -> tuple[str, list[np.ndarray], list[str]]:
    """Read a data set of torchvision, downloaded and unpacked if it is missing or damaged. Raise ConfigError.

    Return its name in logs, its arrays and the names of its classes. One process of a machine downloads, others wait.
    """
    folder, kind = find_cifar(path)
    variable = f"{kind.__name__}_URL"
    kind.url = os.environ.get(variable) or kind.url
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    socket.setdefaulttimeout(30)  # seconds without a byte
    try:
        for train in (True, False):
            with locked(folder):
                part = kind(folder, train=train, download=True)
            arrays += [np.ascontiguousarray(part.data), np.array(part.targets)]  # not left to the timed upload
    except Exception as error:  # torchvision, urllib and tarfile raise nearly anything
        hint = f"put {kind.filename} there, name a mirror in {variable}, or try --demo"
        raise ConfigError(f"{kind.__name__} cannot be read from {folder} ({first_line(error)}): {hint}") from error
    finally:
        socket.setdefaulttimeout(None)
    return f"CIFAR-{len(part.classes)}", arrays, part.classes
