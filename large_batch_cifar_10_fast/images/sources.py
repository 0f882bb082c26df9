"""Where the images come from: CIFAR-10, a .npz file, or shapes drawn in memory."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..settings.settings import CIFAR_10, SYNTHETIC, Refusal
from .cifar10 import fetch_cifar10, read_cifar10
from .npz import count_npz, read_npz
from .synthetic import TRAIN_COUNT, draw_shapes


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
        return {"images": self.name, "digest": self.digest, **counts}

    @cached_property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 over all images and labels, labels as bytes."""
        total = hashlib.sha256()
        for images, labels in (self.train, self.test):
            total.update(np.ascontiguousarray(images))
            total.update(labels.astype(np.uint8))
        return total.hexdigest()[:12]


def count_training_images(data: str) -> int:
    """How many training images `--data` holds, without reading the images; fetches CIFAR-10 if need be.

    Raises Refusal for anything that cannot be trained on, as far as that shows without reading every image.
    """
    if data == SYNTHETIC:
        return TRAIN_COUNT
    if "://" in data:
        raise Refusal(f"--data {data} is an address, not a folder: name a mirror of CIFAR-10 in CIFAR10_URL")
    if data.endswith(".npz"):
        return count_npz(Path(data))
    fetch_cifar10(Path(data))
    return 50_000


def load_images(data: str) -> Images:
    """Read `--data` into memory; raises Refusal."""
    if data == SYNTHETIC:
        return Images(SYNTHETIC, *draw_shapes())
    count_training_images(data)
    if data.endswith(".npz"):
        return Images(Path(data).name, *read_npz(Path(data)))
    return Images(CIFAR_10, *read_cifar10(Path(data)))


def random_images(train: int, test: int) -> Images:
    """Noise of the right shapes, to warm up and to measure on."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 32, 32, 3), np.uint8)
    labels = random.integers(0, 10, train + test)
    return Images("noise", images[:train], labels[:train], images[train:], labels[train:])
