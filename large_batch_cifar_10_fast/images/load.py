"""Load the images that `--data` names: CIFAR-10 or CIFAR-100 (downloaded if missing), a .npz file, or drawn shapes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .. import ConfigError, first_line
from ..core.data import CIFAR_10_NORMALIZATION, Images, Normalization
from .cifar import CLASSES, read_cifar
from .shapes import CLASSES as SHAPES
from .shapes import draw_shapes

CIFAR_10_TRAINING = "f912919bdea3"  # the digest of its training images and labels, as in a .npz file
SYNTHETIC = "synthetic"  # the --data that needs no file
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # the names in a .npz file


def load_images(data: str, holdout: int = 0) -> Images:
    """Read `--data` into memory; download CIFAR-10 or CIFAR-100 if it is missing. Raise ConfigError.

    With `holdout` the last training images replace the test images.
    """
    path = Path(data)
    if data == SYNTHETIC:
        return make_images(SYNTHETIC, draw_shapes(), SHAPES, holdout)
    if path.suffix.lower() == ".npz":
        return make_images(path.name, *read_npz(path), holdout)
    return make_images(*read_cifar(path), holdout)


def make_images(name: str, arrays: Sequence[np.ndarray], class_names: Sequence[str] = (), holdout: int = 0) -> Images:
    """Return a data set of the ARRAYS, in the order for training. Raise ConfigError.

    CIFAR's images and the shapes have a random order already. Other images are shuffled, always in the same order:
    image i goes to worker i % workers, and whitening takes the first images, so they must not be sorted by class.
    """
    train_images, train_labels, test_images, test_labels = arrays
    classes = int(train_labels.max()) + 1
    is_cifar_sized = (len(train_images), len(test_images), classes) == (50_000, 10_000, 10)
    is_random = name in ("CIFAR-10", "CIFAR-100", SYNTHETIC) or digest_of(arrays[:2]) == CIFAR_10_TRAINING
    # CIFAR-10, other sets of its sizes, and the shapes are normalized by CIFAR-10's constants.
    constants = CIFAR_10_NORMALIZATION if is_cifar_sized or name == SYNTHETIC else None
    if not class_names:
        class_names = CLASSES if is_cifar_sized else [str(number) for number in range(classes)]
    if not is_random:
        order = np.random.default_rng(0).permutation(len(train_images))
        train_images = train_images[order]
        train_labels = train_labels[order]
    if holdout:
        count = len(train_labels) - holdout
        if count < 1 or set(train_labels[:count]) != set(train_labels):
            raise ConfigError(f"--holdout {holdout} leaves no image of a class for training: use fewer")
        train_images, test_images = np.split(train_images, [count])
        train_labels, test_labels = np.split(train_labels, [count])
        name = f"{name} with the last {holdout} training images as test images"
    parts = (train_images, train_labels, test_images, test_labels)
    digest = digest_of(parts if holdout else arrays)  # of your own images: before they are shuffled
    return Images(name, *parts, list(class_names), constants or normalization_of(train_images), digest, not is_random)


def normalization_of(images: np.ndarray) -> Normalization:
    """Return mean and standard deviation of each channel, to two decimals."""
    channels = np.moveaxis(images, 3, 0)
    means = [round(float(channel.mean()), 2) for channel in channels]
    stds = [max(0.01, round(float(channel.std()), 2)) for channel in channels]  # not 0, even if all images are equal
    return tuple(means), tuple(stds)


def digest_of(arrays: Sequence[np.ndarray]) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over images and labels. Labels count as bytes if they fit."""
    total = hashlib.sha256()
    for part in arrays:
        total.update(np.ascontiguousarray(part, np.uint8 if part.max() < 256 else np.int64).data)
    return total.hexdigest()[:12]


def read_npz(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Read a .npz file of ARRAYS (images uint8 [N, 32, 32, 3], labels [N]) and optional `class_names`.

    Return the arrays, labels as int64, and the names. Raise ConfigError.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [archive[name] for name in ARRAYS]
            names = [*map(str, archive.get("class_names", []))]
        check_arrays(arrays, names)
    except Exception as error:  # zipfile, zlib and NumPy raise nearly anything for a damaged file
        what = f"a .npz file of {', '.join(ARRAYS)}"
        raise ConfigError(f"--data {path} cannot be read as {what}: {first_line(error)}") from error
    for index in (1, 3):
        arrays[index] = arrays[index].astype(np.int64)
    return arrays, names


def check_arrays(arrays: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Raise ValueError if arrays and names of classes are no data set."""
    classes = int(arrays[1].max()) + 1
    for images, labels in (arrays[:2], arrays[2:]):
        if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
            raise ValueError(f"images are {images.dtype} {list(images.shape)}, not uint8 [N, 32, 32, 3]")
        is_integers = labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
        if not is_integers or labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"labels are no integers from 0 to {classes - 1}")
    if names and not len(names) == len({*names}) == classes:
        raise ValueError(f"{len({*names})} names and {classes} classes")


def count_copies(images: Images) -> int:
    """Return how many test images are also training images."""
    known = {image.tobytes() for image in images.train_images}
    return sum(image.tobytes() in known for image in images.test_images)
