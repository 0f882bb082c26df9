"""Images are downloaded, checked, read, put in order and doubted: CIFAR from a loopback server, .npz files, shapes."""

import hashlib
import os
import pickle
import shutil
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import python
from numpy._core._multiarray_umath import __cpu_dispatch__
from torchvision import datasets

from large_batch_cifar_10_fast.images import cifar, load
from large_batch_cifar_10_fast.images.load import CIFAR_10_NORMALIZATION, load_images, make_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
PARTS = dict(zip(load.ARRAYS, draw_shapes(20, 6), strict=True))
ARRAYS = [*PARTS.values()]
TRAIN, TEST = ARRAYS[:2], ARRAYS[2:]
DIGEST = load.digest_of(ARRAYS)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """Serve a small CIFAR-10, whose training images are one file."""
    folder = tmp_path_factory.mktemp("served")
    (folder / FOLDER).mkdir()
    files = {"batches.meta": {"label_names": [*cifar.CLASSES]}}
    for name, (images, labels) in (("data_batch_1", TRAIN), ("test_batch", TEST)):
        pixels = np.moveaxis(images, 3, 1).reshape(len(images), -1)
        files[name] = {"data": pixels, "labels": labels.tolist()}
    sums = []
    for name, content in files.items():
        (folder / FOLDER / name).write_bytes(pickle.dumps(content))
        sums.append((name, md5(folder / FOLDER / name)))
    shutil.make_archive(folder / "cifar-10-python", "gztar", folder, FOLDER)

    class CIFAR10(datasets.CIFAR10):
        tgz_md5 = md5(folder / ARCHIVE)
        meta = datasets.CIFAR10.meta | {"md5": sums[0][1]}
        train_list = sums[1:2]
        test_list = sums[2:]

    monkeypatch.setattr(datasets, "CIFAR10", CIFAR10)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as http:
        monkeypatch.setenv("CIFAR10_URL", f"http://127.0.0.1:{http.server_port}/{ARCHIVE}")
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield
        http.shutdown()


def digest_of(data) -> str:
    return load_images(str(data)).digest


# ---- CIFAR


def test_one_process_downloads_and_an_archive_or_what_was_in_it_is_enough_offline(server, tmp_path, capfd):
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(digest_of, [tmp_path] * 4)] == [DIGEST] * 4
    said = capfd.readouterr()
    assert said.err.count("GET /") == 2  # torchvision first asks for redirects
    assert said.out == ""  # which is the log
    shutil.rmtree(tmp_path / FOLDER)
    assert digest_of(tmp_path) == DIGEST
    (tmp_path / ARCHIVE).unlink()
    assert digest_of(tmp_path) == DIGEST
    assert "GET /" not in capfd.readouterr().err


def test_what_is_damaged_or_half_is_not_unpickled_but_made_again(server, tmp_path):
    digest_of(tmp_path)
    (tmp_path / FOLDER / "test_batch").write_bytes(b"damaged")
    assert digest_of(tmp_path) == DIGEST
    shutil.rmtree(tmp_path / FOLDER)
    (tmp_path / ARCHIVE).write_bytes(b"half")  # as an interrupted download leaves it
    assert digest_of(tmp_path) == DIGEST


def test_data_that_cannot_be_loaded_is_refused_with_what_to_do(tmp_path, monkeypatch, error_line):
    monkeypatch.setenv("CIFAR10_URL", "file:///absent")
    assert "there, name a mirror in CIFAR10_URL, or" in error_line(load_images, str(tmp_path))
    folder = tmp_path / "my photos"
    (folder / "cats").mkdir(parents=True)
    assert "`photos` reads photos" in error_line(load_images, str(folder))


def test_cifar_100_is_found_beside_cifar_10(tmp_path):
    for kind in (datasets.CIFAR10, datasets.CIFAR100):
        own = tmp_path / kind.__name__
        own.mkdir()
        (own / kind.filename).touch()
        assert cifar.find_cifar(own) == (own, kind)
        assert cifar.find_cifar(Path(own.name.lower())) == (cifar.DATA, kind)
    assert cifar.find_cifar(cifar.DATA) == (cifar.DATA, datasets.CIFAR10)


# ---- Files of one's own


def test_an_npz_file_is_read_as_it_is_but_for_the_order_of_training_images(tmp_path):
    names = [f"class {number}" for number in range(10)]
    np.savez(tmp_path / "some.npz", **PARTS | {"test_labels": TEST[1].astype(">i4"), "class_names": names})
    found = load_images(str(tmp_path / "some.npz"))
    order = np.random.default_rng(0).permutation(20)
    for name, expected in zip(PARTS, [TRAIN[0][order], TRAIN[1][order], *TEST], strict=True):
        np.testing.assert_array_equal(getattr(found, name), expected)
    assert found.test_labels.dtype == np.int64
    assert (found.name, found.digest, found.class_names) == ("some.npz", DIGEST, names)


def test_only_images_of_ones_own_are_shuffled(monkeypatch):
    """CIFAR-10 in a file, perhaps with other test images, has a random order, too."""
    for name in ("CIFAR-10", "CIFAR-100", "synthetic"):
        assert make_images(name, ARRAYS).train_images is TRAIN[0]
    monkeypatch.setattr(load, "CIFAR_10_TRAINING", load.digest_of(TRAIN))
    found = make_images("cifar10.npz", [*TRAIN, TEST[0][:3], TEST[1][:3]])
    assert found.train_images is TRAIN[0]
    assert not found.is_shuffled


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_images", TEST[0][:, :28], "uint8 [6, 28, 32, 3], not"),
        ("test_images", np.array([None]), "allow_pickle=False"),
        ("class_names", np.array([*"abcdefghi"]), "9 names and 10 classes"),
        ("class_names", np.array([*"aabcdefghij"]), "10 names and 10 classes"),
        ("train_labels", TRAIN[1][:, None], "labels are no integers from 0 to 9"),
    ],
)
def test_a_wrong_npz_file_is_refused_and_never_unpickled(name, content, message, tmp_path, error_line):
    path = tmp_path / "some.npz"
    np.savez(path, **PARTS | {name: content})
    assert message in error_line(load_images, str(path))
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path} cannot be read as a .npz file" in error_line(load_images, str(path))


def test_only_images_of_cifar_10s_sizes_have_its_normalization():
    pixels = TRAIN[0].reshape(-1, 3)
    found = make_images("", ARRAYS).normalization
    np.testing.assert_allclose(found, (pixels.mean(0), pixels.std(0)), atol=0.006)
    images = np.broadcast_to(TRAIN[0][0], (50_000, 32, 32, 3))
    for classes in (10, 100):
        labels = np.arange(50_000) % classes
        found = make_images("CIFAR-10", [images, labels, images[:10_000], labels[:10_000]])
        assert (found.normalization == CIFAR_10_NORMALIZATION) == (classes == 10)


# ---- Constants


def test_every_machine_draws_the_same_synthetic_images(tmp_path):
    draw = f"import zlib, {draw_shapes.__module__} as shapes\nprint(zlib.crc32(shapes.draw_shapes(500, 1)[0]))"
    newer = " ".join(__cpu_dispatch__)  # kernels than the oldest processor has
    drawn = python("-c", draw, cwd=tmp_path, NPY_DISABLE_CPU_FEATURES=newer)
    assert int(drawn.stdout) == zlib.crc32(draw_shapes(500, 1)[0])
    assert digest_of("synthetic") == "7fa1af4342af"


@pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="it names no CIFAR-10.npz")
def test_the_constants_are_those_of_cifar_10():
    found = load_images(os.environ["CIFAR10_NPZ"])
    measured = load.normalization_of(found.train_images[::7])
    np.testing.assert_allclose(measured, CIFAR_10_NORMALIZATION, rtol=0.01)
    is_original = found.digest == "b9da7d04ca62"  # or they are JPEG-compressed copies
    assert found.is_shuffled != is_original
