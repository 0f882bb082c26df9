"""Find CIFAR-10 and CIFAR-100, or download them by torchvision, which checks MD5s."""

import os
import shlex
import socket
from pathlib import Path
from typing import Any

import numpy as np

from .. import ORIGIN, ConfigError, first_line
from ..files import locked

# The checkout's data folder. If the package is installed: `data` in the current folder.
DATA = ORIGIN.parent / "data" if (ORIGIN.parent / "run_tests.sh").exists() else Path("data")
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CIFAR_100 = "CIFAR-100"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TIMEOUT = 30  # seconds without a byte after which a download fails


NAMES = {"cifar10": CIFAR_10, "cifar100": CIFAR_100}  # by the --data that downloads them


def kind_of(key: str) -> Any:
    """Return torchvision's class of a data set."""
    from torchvision import datasets  # which takes a second

    return getattr(datasets, key.upper())


def find_cifar(path: Path) -> tuple[Path, str]:
    """Return the folder of a data set, and its key in NAMES. Raise ConfigError."""
    if path == DATA or (path.is_dir() and not any(path.iterdir())):
        return path, "cifar10"
    for key in NAMES:
        kind = kind_of(key)
        if str(path) == key:
            return DATA, key
        if (path / kind.filename).exists() or (path / kind.base_folder).exists():
            return path, key
    photos = f"`cifar10-fast photos {shlex.quote(str(path))} photos.npz` makes a file of photos"
    known = f"use {', '.join(NAMES)}, an archive's folder, an empty folder, or FILE.npz"
    raise ConfigError(f"--data {path} has no data set: {known}; {photos}")


def read_cifar(folder: Path, key: str) -> list[np.ndarray]:
    """Read a data set, downloaded and unpacked if it is missing or damaged. Raise ConfigError.

    One process of a machine downloads, the others wait.
    """
    kind = kind_of(key)
    variable = f"{key.upper()}_URL"
    mirrored: Any = type(kind.__name__, (kind,), {"url": os.environ.get(variable) or kind.url})
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
        raise ConfigError(f"{NAMES[key]} cannot be loaded from {folder} ({first_line(error)}): {hint}") from error
    return arrays
