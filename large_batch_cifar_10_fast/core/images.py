"""Load the images that `--data` names: CIFAR-10 or CIFAR-100 (downloaded if missing), .npz, pictures, or shapes."""

import contextlib
import hashlib
import io
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import PACKAGE, ConfigError, first_line
from .files import locked
from .pictures import find_pictures, has_pictures, read_pictures
from .shapes import draw_shapes

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of red, green and blue, on the 0..255 scale
CIFAR_10_NORMALIZATION: Normalization = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # as published

DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "run_tests.sh").exists() else Path("data")  # or it is installed
CIFAR_10 = "CIFAR-10"  # the name of its original images in logs
CIFAR_10_TRAINING = "f912919bdea3"  # the digest of its training images and labels, as in a .npz file
CIFAR_100 = "CIFAR-100"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SYNTHETIC = "synthetic"  # the --data that needs no file
TIMEOUT = 30  # seconds without a byte after which a download fails
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # of a .npz file
HARMLESS = (".", "download-", "lost+found")  # folders beside which CIFAR-10 may be downloaded begin so
OTHER_FORMS = ("cifar*", "*_batch*", "train*", "test*", "*.npz")  # of a data set, in a folder


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


@dataclass(frozen=True)
class Images:
    """A data set in host memory: images uint8 [N, 32, 32, 3] (RGB), labels int64 [N] from 0."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the classes, if the data set has them
    whole: "Images | None" = field(default=None, kw_only=True)  # the data set that `held_out` made these of

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.train_images, self.train_labels, self.test_images, self.test_labels

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @property
    def class_names(self) -> list[str]:
        """Their own; else CIFAR-10's where its normalization is used, except for the shapes; else numbers."""
        if self.names:
            return list(self.names)
        whole = self.whole or self
        known = whole.normalization == CIFAR_10_NORMALIZATION and whole.name != SYNTHETIC
        return CLASSES if known else [str(number) for number in range(self.classes)]

    @cached_property
    def normalization(self) -> Normalization:
        """CIFAR-10's constants for its images and others of its sizes, and for the shapes; else these images' own."""
        whole = self.whole or self
        sizes = len(whole.train_images), len(whole.test_images), whole.classes
        if whole.name == SYNTHETIC or sizes == (50_000, 10_000, 10):
            return CIFAR_10_NORMALIZATION
        images, count = self.train_images, self.train_images.size // 3
        mean = np.einsum("nhwc->c", images, dtype=np.float64) / count
        square = np.einsum("nhwc,nhwc->c", images, images, dtype=np.float64) / count
        std = np.sqrt(square - mean**2).round(2).clip(0.01)  # of images that are all equal, too
        return tuple(mean.round(2).tolist()), tuple(std.tolist())

    @property
    def is_original(self) -> bool:
        """Whether the training images keep their order: CIFAR's own, which is a random one, or already a random one."""
        known = self.whole is not None or self.name in (CIFAR_10, CIFAR_100, SYNTHETIC)
        return known or self.digests[0] == CIFAR_10_TRAINING

    def shuffled(self) -> "Images":
        """Return these with the training images in a random order that is always the same.

        Worker i % 8 takes image i, and whitening the first ones: sorted by class, each would see some classes only.
        """
        order = np.random.default_rng(0).permutation(len(self.train_images))
        return replace(self, train_images=self.train_images[order], train_labels=self.train_labels[order])

    def held_out(self, count: int) -> "Images":
        """Return these with the last `count` training images, in random order, as test images: to choose by, not these.

        Raise ConfigError if too few are left to train on.
        """
        ordered = self if self.is_original else self.shuffled()
        left = len(ordered.train_images) - count
        if left < 1 or set(ordered.train_labels[:left]) != set(self.train_labels):
            total = f"of {left + count} training images"
            raise ConfigError(f"--holdout {count} {total} leaves none of a class to train on: keep out fewer")
        images = np.split(ordered.train_images, [left])
        labels = np.split(ordered.train_labels, [left])
        name = f"{self.name} with the last {count} training images as test images"
        return Images(name, images[0], labels[0], images[1], labels[1], names=self.names, whole=self)

    def doubts(self) -> list[str]:
        """Return warnings of images and labels that cannot be right, each with its likely cause."""
        found = []
        tests = len(self.test_images)
        if self.train_images.max() <= 1 or self.test_images.max() <= 1:
            found.append("all pixels are 0 or 1: images are bytes from 0 to 255")
        train_hash = hash_images(self.train_images)
        test_hash = hash_images(self.test_images)
        copies = int(np.isin(test_hash, train_hash).sum())
        if copies > tests / 100:
            found.append(f"{copies} of {tests} test images are also training images")
        if np.ptp(train_hash) == 0 or (tests > 1 and np.ptp(test_hash) == 0):
            found.append("all images are equal")
        else:
            some = self.train_images[:: len(self.train_images) // 1000 + 1].reshape(-1, 3)
            channels = zip(("red", "green", "blue"), some.T, strict=True)
            empty = [name for name, values in channels if np.ptp(values) == 0]
            if empty:
                found.append(f"{' and '.join(empty)} is the same in all pixels: was a channel lost on the way?")
        return found + self.doubts_of_labels()

    def doubts_of_labels(self) -> list[str]:
        classes = self.classes
        absent = np.flatnonzero(np.bincount(self.train_labels, minlength=classes) == 0)
        untested = np.flatnonzero(np.bincount(self.test_labels, minlength=classes) == 0)
        if absent.tolist() == [0]:
            return [f"no training image has label 0, and {classes} classes are trained: labels are counted from 0"]
        if len(absent):
            gaps = f"{len(absent)} of the labels 0 to {classes - 1} have no training image, {absent[0]} among them"
            return [f"{gaps}: count labels without gaps, and leave out images without a label, which some mark by 255"]
        if len(untested) and len(self.test_labels) > 20 * classes:
            return [f"no test image has label {untested[0]}: are the test images all of a few classes?"]
        return []

    def pinned(self) -> "Images":
        """Return a copy in page-locked memory, from which uploads are faster; making it takes longer than it saves."""
        pinned = (torch.from_numpy(part).pin_memory().numpy() for part in self.arrays)
        return Images(self.name, *pinned, names=self.names, whole=self.whole)

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes if they fit."""
        return self.digests[-1]

    @cached_property
    def digests(self) -> tuple[str, str]:
        """Those of the training images and labels, and of all."""
        total = hashlib.sha256()
        found = []
        for part in self.arrays:
            total.update(np.ascontiguousarray(part, np.uint8 if part.max() < 256 else np.int64).data)
            found.append(total.hexdigest()[:12])
        return found[1], found[3]


def hash_images(images: np.ndarray) -> np.ndarray:
    """Return a number for each image (int64 [n]), which equal images share."""
    factors = np.random.default_rng(0).integers(2**62, size=384)
    return images.reshape(len(images), -1).view(np.int64) @ factors


def load_images(data: str, holdout: int = 0, cache: Path | None = None) -> Images:
    """Read `--data` into memory; download CIFAR-10 or CIFAR-100 if it is missing. Raise ConfigError.

    With `holdout` the last training images take the place of the test images. Decoded pictures are stored in `cache`.
    """
    images = read_images(data, cache)
    return images.held_out(holdout) if holdout else images


def read_images(data: str, cache: Path | None) -> Images:
    path = Path(data)
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    if is_pictures(data):
        arrays = read_pictures(find_pictures(path), cache)
        return from_arrays(f"{path.resolve().name}/", arrays)  # a name that no data set has
    try:
        folder, source = find_source(path)
    except OSError as error:  # too long a name, or a folder that may not be read
        raise ConfigError(f"--data {data} cannot be used ({error.strerror}): name another") from error
    return Images(source.name, *read_cifar(folder, source))


def is_pictures(data: str) -> bool:
    """Return whether `--data` is a folder of pictures, and of no CIFAR. Raise ConfigError if it cannot be read."""
    path = Path(data)
    if data == SYNTHETIC:
        return False
    sources = [name for source in SOURCES for name in (source.archive, source.folder)]
    try:
        return path.is_dir() and not any((path / name).exists() for name in sources) and has_pictures(path)
    except PermissionError as error:
        raise ConfigError(f"--data {error.filename} cannot be read ({error.strerror}): make it readable") from error
    except OSError:  # too long a name, say, of which `find_source` tells; or a download beside this deleted a folder
        return False


def check_outside(data: str, path: Path | str, option: str) -> None:
    """Raise ConfigError if a file or folder to be written lies in a folder of pictures."""
    folder = Path(data)
    if is_pictures(data) and Path(path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{option} {path} lies in the folder of pictures {data}: choose another")


def count_pictures(data: str) -> tuple[int, int] | None:
    """Return how many training and test pictures `--data` has; None if it is no folder of pictures."""
    if not is_pictures(data):
        return None
    pictures = find_pictures(Path(data))
    return len(pictures.train), len(pictures.test)


def find_source(path: Path) -> tuple[Path, Source]:
    """Return the folder that has a data set, or to which it is downloaded, and which it is. Raise ConfigError."""
    others = sorted({file.name for form in OTHER_FORMS for file in path.glob(form)})  # first: an archive may arrive
    for source in SOURCES:
        if str(path) == source.key and not path.exists():
            return DATA, source
        if path.name == source.archive and path.is_file():
            return path.parent, source
        if path != DATA and ((path / source.archive).exists() or (path / source.folder).exists()):
            return path, source
    if path == DATA or (path.is_dir() and not others and not has_folders(path)):
        return path, SOURCES[0]
    found = "does not exist"
    if others:
        found = f"has {', '.join(others[:3])}"
    elif path.is_dir():
        found = "has folders and no JPEG, PNG or WebP pictures in them"
    elif path.exists():
        found = "is another file"
    archives = " or ".join(source.archive for source in SOURCES)
    folders = "a folder of pictures, or an empty one for a download"
    raise ConfigError(f"--data {path} {found}: name FILE.npz, {archives}, {folders}")


def has_folders(path: Path) -> bool:
    """Return whether a folder has others, except those of a download."""
    return any(each.is_dir() and not each.name.startswith(HARMLESS) for each in path.iterdir())


def read_cifar(folder: Path, source: Source) -> list[np.ndarray]:
    """Read a data set by torchvision; MD5s are checked before anything is unpickled. Raise ConfigError.

    One process of a machine downloads and unpacks what is missing, the others wait.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity, extract_archive

    kind: Any = getattr(datasets, source.kind)
    variable = f"{source.kind}_URL"
    archive = folder / source.archive
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not all(check_integrity(folder / source.folder / name, md5) for name, md5 in files):
                if not archive.exists():
                    if has_pictures(folder):
                        raise ConfigError(
                            f"{folder} has pictures, and nothing is downloaded to it: name another folder"
                        )
                    download(os.environ.get(variable) or kind.url, archive, kind.tgz_md5)
                if not check_integrity(archive, kind.tgz_md5):
                    raise ConfigError(
                        f"{archive} is damaged (its MD5 is not {kind.tgz_md5}): delete it and start again"
                    )
                extract_archive(archive, folder)
            parts = [kind(folder, train=train) for train in (True, False)]
    except ConfigError:
        raise
    except Exception as error:  # torchvision, urllib and tarfile raise nearly anything
        hint = f"put {source.archive} there by hand, name a mirror in {variable}, or try --demo"
        raise ConfigError(f"{source.name} cannot be had in {folder} ({first_line(error)}): {hint}") from error
    arrays = []
    for part in parts:
        arrays += [np.ascontiguousarray(part.data), np.array(part.targets)]  # not left to the timed upload
    return arrays


def download(url: str, archive: Path, md5: str) -> None:
    """Download an archive by torchvision, whose progress bar is shown on terminals only.

    It gets its name when it is whole: what an interrupted download leaves is never taken for it.
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


def random_images(train: int, test: int, classes: int = 10) -> Images:
    """Return noise of the right shapes, for the warm-up."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, classes, train + test)
    return Images("noise", images[:train], labels[:train], images[train:], labels[train:])


def from_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> Images:
    """Return images of the ARRAYS, with int64 labels, and of `class_names` if there are any."""
    parts = [arrays[part] for part in ARRAYS]
    for place in (1, 3):
        parts[place] = parts[place].astype(np.int64)
    return Images(name, *parts, names=tuple(map(str, arrays.get("class_names", ()))))


def read_npz(path: Path) -> Images:
    """Read a .npz file of ARRAYS, images uint8 [N, 32, 32, 3] and labels [N], and of `class_names`, which may lack.

    Raise ConfigError.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            given = {name: archive[name] for name in (*ARRAYS, "class_names") if name in (*ARRAYS, *archive.files)}
        arrays = [given[name] for name in ARRAYS]
        for images, labels in (arrays[:2], arrays[2:]):
            if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or not len(images):
                raise ValueError(f"images are {images.dtype} {list(images.shape)}, not uint8 [N, 32, 32, 3]")
            if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
                raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}, not integers [{len(images)}]")
            last = int(arrays[1].max())
            if labels.min() < 0 or labels.max() > last:
                raise ValueError(f"labels are {labels.min()} to {labels.max()}, not 0 to {last}, training's largest")
            if not 1 <= last < 1000:
                raise ValueError(f"labels are of {last + 1} classes, not of 2 to 1000")
        names = given.get("class_names")
        if names is not None:
            if names.dtype.kind != "U" or names.shape != (last + 1,) or len(set(names.tolist())) <= last:
                raise ValueError(f"class_names are {names.dtype} {list(names.shape)}, not {last + 1} different texts")
            if not all(name.isprintable() for name in names.tolist()):
                raise ValueError("class_names have characters that cannot be printed")
        return from_arrays(path.name, given)
    except Exception as error:  # zipfile, zlib and NumPy raise nearly anything for a damaged file
        reason = f"{', '.join(ARRAYS)}: {first_line(error)}"
        raise ConfigError(f"--data {path} cannot be read as a .npz file of {reason}") from error
