"""Warn of suspicious images and labels, with a likely cause."""

import numpy as np

from ..core.data import Images


def doubts_of(images: Images) -> list[str]:
    found = []
    tests = len(images.test_images)
    if images.train_images.max() <= 1 or images.test_images.max() <= 1:
        found.append("all pixels are 0 or 1: scale images to bytes from 0 to 255")
    train_hash = hash_images(images.train_images)
    test_hash = hash_images(images.test_images)
    copies = int(np.isin(test_hash, train_hash).sum())
    if copies > tests / 100:
        found.append(f"{copies} of {tests} test images are also training images")
    if np.ptp(train_hash) == 0 or (tests > 1 and np.ptp(test_hash) == 0):
        found.append("all training images, or all test images, are equal")
    else:
        some = images.train_images[:: len(images.train_images) // 1000 + 1].reshape(-1, 3)
        channels = zip(("red", "green", "blue"), some.T, strict=True)
        empty = [name for name, values in channels if np.ptp(values) == 0]
        if empty:
            found.append(f"{' and '.join(empty)} is the same in all pixels: check that no channel was lost")
    return found + doubts_of_labels(images)


def doubts_of_labels(images: Images) -> list[str]:
    classes = images.classes
    absent = np.flatnonzero(np.bincount(images.train_labels, minlength=classes) == 0)
    untested = np.flatnonzero(np.bincount(images.test_labels, minlength=classes) == 0)
    if absent.tolist() == [0]:
        return [f"no training image has label 0, so one of {classes} classes is empty: number the labels from 0"]
    if len(absent):
        gaps = f"{len(absent)} of the labels 0 to {classes - 1} have no training image, for example {absent[0]}"
        return [
            f"{gaps}: number the labels without gaps, and leave out unlabeled images (some data sets mark them by 255)"
        ]
    if len(untested) and len(images.test_labels) > 20 * classes:
        return [f"no test image has label {untested[0]}: check that the test images have all classes"]
    return []


def hash_images(images: np.ndarray) -> np.ndarray:
    """Return a hash of each image (int64 [n])."""
    factors = np.random.default_rng(0).integers(2**62, size=384)
    return images.reshape(len(images), -1).view(np.int64) @ factors
