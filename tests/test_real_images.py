"""Tests on CIFAR-10 itself, if CIFAR10_NPZ names it (also slightly compressed)."""

import os

import numpy as np
import pandas as pd
import pytest
from conftest import train_here, write_npz

from large_batch_cifar_10_fast.data.cifar10 import load_images
from large_batch_cifar_10_fast.recipe import CIFAR_10_NORMALIZATION

pytestmark = [pytest.mark.slow, pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="CIFAR10_NPZ is not set")]


@pytest.fixture(scope="module")
def cifar10():
    return load_images(os.environ["CIFAR10_NPZ"])


def test_the_constants_are_the_images_own(cifar10):
    pixels = cifar10.train_images[::7].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(pixels.mean(0), CIFAR_10_NORMALIZATION[0], rtol=0.01)
    np.testing.assert_allclose(pixels.std(0), CIFAR_10_NORMALIZATION[1], rtol=0.01)
    assert np.bincount(cifar10.train_labels).tolist() == [5000] * 10
    assert np.bincount(cifar10.test_labels).tolist() == [1000] * 10


def test_a_small_network_learns_from_real_images(cifar10, tmp_path):
    train, test = ([part[:count] for part in parts] for parts, count in ((cifar10.train, 2048), (cifar10.test, 1000)))
    npz = write_npz(tmp_path / "some.npz", *train, *test)
    small = ["--batch_size", 8, "--ghost_batch", 8, "--epochs", 4, "--no_warmup"]
    train_here("--demo", "--data", npz, *small, "--out", tmp_path)
    accuracy = pd.read_csv(tmp_path / "runs.tsv", sep="\t")["validation_accuracy"][0]
    assert accuracy > 0.3, "chance is 0.1"
