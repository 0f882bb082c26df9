"""Images are downloaded, checked and read: CIFAR-10 from a server on loopback, .npz files, synthetic shapes."""

import hashlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, python, write_npz
from numpy._core._multiarray_umath import __cpu_dispatch__
from PIL import Image

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.data import cifar10
from large_batch_cifar_10_fast.core.images import ARCHIVES, Images, load_images
from large_batch_cifar_10_fast.core.shapes import draw_shapes
from large_batch_cifar_10_fast.recipe import CIFAR_10_NORMALIZATION

ARCHIVE = ARCHIVES[0].file
ARRAYS = draw_shapes(20, 6)
TRAIN, TEST = ARRAYS[:2], ARRAYS[2:]
DIGEST = Images("", *TRAIN, *TEST).digest


class Explosive:  # unpickling it raises ZeroDivisionError
    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """Serve archives in the formats of CIFAR-10 and CIFAR-100. Yield the server's folder and its URL.

    It names each request on STDERR.
    """
    folder, source = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("source")
    parts = {f"data_batch_{5 - i}": [part[16 - 4 * i : 20 - 4 * i] for part in TRAIN] for i in range(5)}
    contents = [parts | {"test_batch": TEST}, {"train": TRAIN, "test": TEST}]
    for kind, labels_of, content in zip(ARCHIVES, ("labels", "fine_labels"), contents, strict=True):
        for name, (images, labels) in content.items():
            pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
            (source / name).write_bytes(pickle.dumps({"data": pixels, labels_of: labels.tolist()}))
        with tarfile.open(folder / kind.file, "w:gz") as archive:
            for name in content:
                archive.add(source / name, f"cifar/{name}")
    (source / "test_batch").write_bytes(pickle.dumps(Explosive()))
    with tarfile.open(folder / "explosive", "w:gz") as archive:
        archive.add(source, "cifar")
    served = [each._replace(md5=hashlib.md5((folder / each.file).read_bytes()).hexdigest()) for each in ARCHIVES]
    monkeypatch.setattr(cifar10, "ARCHIVES", served)
    monkeypatch.setattr(cifar10, "TIMEOUT", 1)
    monkeypatch.setattr(cifar10, "DATA", tmp_path_factory.mktemp("default") / "data")
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/"
        monkeypatch.setattr(cifar10, "MIRRORS", [url + "{file}"])
        yield folder, url
        http.shutdown()


def test_one_process_tries_mirrors_in_turn_until_the_md5_is_right(server, tmp_path, monkeypatch, capsys):
    folder, url = tmp_path, server[1]
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(4) as pool:
        mirrors = [f"http://127.0.0.1:{silent.getsockname()[1]}/", url + "explosive", url + ARCHIVE, url + "unasked"]
        monkeypatch.setattr(cifar10, "MIRRORS", mirrors)
        monkeypatch.setenv("CIFAR10_URL", url + "absent")
        assert {images.digest for images in pool.map(load_images, [str(folder)] * 4)} == {DIGEST}
    assert load_images(str(folder / ARCHIVE)).digest == DIGEST, "the archive stands for its folder"
    requests = re.findall('"GET /(.*) HTTP', capsys.readouterr().err)
    assert requests == ["absent", "explosive", ARCHIVE], "one process downloads; later the archive is used"
    assert [path.name for path in folder.iterdir()] == [ARCHIVE]


def test_a_killed_download_is_not_taken_for_the_archive(server, tmp_path, monkeypatch):
    def write_half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        child = multiprocessing.get_context("fork").Process(target=load_images, args=(str(tmp_path),))
        child.start()
        child.join(20)
    assert child.exitcode == -signal.SIGKILL
    assert load_images(str(tmp_path)).digest == DIGEST


def test_a_damaged_archive_is_neither_unpickled_nor_replaced(server, tmp_path, capsys):
    content = (server[0] / "explosive").read_bytes()
    (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged .* delete it"):
        load_images(str(tmp_path))
    assert ((tmp_path / ARCHIVE).read_bytes(), capsys.readouterr().err) == (content, "")


def test_without_a_whole_download_one_line_says_what_to_do_and_nothing_is_written(server, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "MIRRORS", (server[1] + "absent", server[1] + "explosive"))
    with pytest.raises(ConfigError) as error:
        load_images(str(tmp_path))
    for part in ("absent", "explosive", ARCHIVE, cifar10.ARCHIVES[0].md5, str(tmp_path), "CIFAR10_URL", "--demo"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())


FOUND = {  # what --data names, after its files were made, and what the error says of it
    "absent": "absent does not exist: name FILE.npz, cifar-10-python.tar.gz or cifar-100-python.tar.gz, or another",
    "absent/cifar-10-python.tar.gz": "does not exist",
    "http://host/x": "does not exist",
    "picture.png": "picture.png is another file",
    "binary/cifar-10-binary.tar.gz": "cifar-10-binary.tar.gz is another file",
    "binary": "binary has cifar-10-binary.tar.gz: name",
    "unpacked": "unpacked has data_batch_1.mat, test_batch.mat: name",
    "pictures": "pictures has test, train: name",
    "x" * 300: "File name too long",
    "/proc/self": "/proc/self cannot be used",
}


@pytest.mark.parametrize("name", FOUND)
def test_data_of_another_kind_is_named_in_one_line_and_nothing_is_downloaded(
    name, server, tmp_path, monkeypatch, capsys
):
    files = ["picture.png", "binary/cifar-10-binary.tar.gz", "unpacked/data_batch_1.mat", "unpacked/test_batch.mat"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    for folder in ("train", "test"):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_images(name)
    assert FOUND[name] in str(error.value)
    assert "Downloading" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("cifar-10-python*"))


def test_locks_are_not_needed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10.fcntl, "flock", lambda *_: os.stat("/absent"))
    assert load_images(str(tmp_path)).digest == DIGEST


def test_cifar_100_is_downloaded_and_the_default_folder_still_means_cifar_10(server, capsys):
    for data in ("cifar100", str(cifar10.DATA / ARCHIVES[1].file), "cifar100"):
        images = load_images(data)
        assert images.name == "CIFAR-100"
        np.testing.assert_array_equal(images.train_labels, TRAIN[1])
        np.testing.assert_array_equal(images.test_images, TEST[0])
    assert load_images(str(cifar10.DATA)).name == "CIFAR-10"
    (cifar10.DATA / ARCHIVE).unlink()
    (elsewhere := cifar10.DATA.with_name("elsewhere")).mkdir()
    (cifar10.DATA / ARCHIVES[1].file).rename(elsewhere / ARCHIVES[1].file)
    assert load_images(str(elsewhere)).name == "CIFAR-100"
    assert re.findall('"GET /(.*) HTTP', capsys.readouterr().err) == [ARCHIVES[1].file, ARCHIVE]


def test_npz_is_read_as_it_is(tmp_path):
    path = write_npz(tmp_path / "some.npz", *TRAIN, TEST[0], TEST[1].astype(">i4")).rename(tmp_path / "some.NPZ")
    loaded = load_images(str(path))
    assert loaded.name == "some.NPZ"
    for found, expected in zip((*loaded.train, *loaded.test), (*TRAIN, *TEST), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == (np.uint8 if found.ndim == 4 else np.int64)
    content = b"".join(part.astype(np.uint8).tobytes() for part in (*TRAIN, *TEST))
    assert loaded.digest == hashlib.sha256(content).hexdigest()[:12]
    assert Images("", TRAIN[0], TRAIN[1] + 256, *TEST).digest != loaded.digest


def with_test(images, labels):
    return lambda path: write_npz(path, *TRAIN, images, labels)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (with_test(TEST[0].astype(np.float32), TEST[1]), "images are float32"),
        (with_test(TEST[0], TEST[1][:5]), r"labels are int64 \[5\]"),
        (with_test(TEST[0][:2], np.array([0, 10])), "0 to 10, not 0 to 9"),
        (lambda path: write_npz(path, TRAIN[0], 50 * TRAIN[1] + 551, *TEST), "labels are of 1002 classes, not of 2 to"),
        (lambda path: write_npz(path, TRAIN[0], 0 * TRAIN[1], TEST[0], 0 * TEST[1]), "labels are of 1 classes, not of"),
        (with_test(TEST[0][:, :28], TEST[1]), r"uint8 \[6, 28, 32, 3\], not uint8 \[N, 32, 32, 3\]"),
        (with_test(TEST[0][:2], np.array([0, -1])), "-1 to 0, not 0 to 9"),
        (with_test(np.array([Explosive()], dtype=object), TEST[1]), "allow_pickle=False"),
        (lambda path: np.savez(path, train_images=TEST[0]), "train_labels is not a file"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"PK\3\4 and no more"), "cannot be read as a .npz file"),
    ],
)
def test_an_npz_that_cannot_be_used_is_one_line_and_no_pickle_is_executed(write, message, tmp_path):
    write(path := tmp_path / "some.npz")
    with pytest.raises(ConfigError, match=message) as error:
        load_images(str(path))
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()


def test_images_are_normalized_by_cifar_10s_constants_only_if_they_have_its_sizes():
    own = Images("own", *TRAIN, *TEST).normalization
    pixels = TRAIN[0].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(own, (pixels.mean(0), pixels.std(0)), atol=0.006)
    parts = [part for n in (50_000, 10_000) for part in (np.broadcast_to(TRAIN[0][:1], (n, 32, 32, 3)), np.arange(n))]
    for classes in (10, 11):
        images = Images("like CIFAR-10", parts[0], parts[1] % classes, parts[2], parts[3] % classes)
        assert (images.classes, images.normalization == CIFAR_10_NORMALIZATION) == (classes, classes == 10)


@pytest.mark.parametrize(
    ("train", "test", "doubts"),
    [
        (TRAIN[0], TEST[0], []),
        (TRAIN[0], TEST[0] // 128, ["all pixels are 0 or 1"]),
        (np.full_like(TRAIN[0], 7), TEST[0], ["all images are equal"]),
        (TRAIN[0], np.concatenate([TEST[0], TRAIN[0][:1]]), ["1 of 7 test images are also training images"]),
        (TRAIN[0], np.concatenate([*[TEST[0]] * 17, TRAIN[0][:1]]), []),  # 1 of 103
    ],
)
def test_images_that_cannot_be_right_are_doubted(train, test, doubts):
    found = Images("", train, TRAIN[1], test, TEST[1]).doubts()
    assert [a.startswith(b) for a, b in zip(found, doubts, strict=True)] == [True] * len(doubts)


def test_the_documented_script_makes_images_of_a_folder_of_pictures(tmp_path):
    for number, (image, label) in enumerate(zip(*TRAIN, strict=True)):
        for part, size in (("train", (32, 32)), ("test", (80, 60))):
            (folder := tmp_path / "pictures" / part / f"class {label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize(size).save(folder / f"{number:02}.png")
    page = (REPO / "docs" / "running.md").read_text()
    (script,) = re.findall("```python\n([^`]*ImageFolder[^`]*)```", page)
    assert (result := python("-c", script, cwd=tmp_path)).returncode == 0, result.stderr
    loaded, order = load_images(str(tmp_path / "pictures.npz")), np.argsort(TRAIN[1], kind="stable")
    np.testing.assert_array_equal(loaded.train_images, TRAIN[0][order])
    for labels in (loaded.train_labels, loaded.test_labels):
        np.testing.assert_array_equal(labels, np.unique(TRAIN[1], return_inverse=True)[1][order])
    assert loaded.test_images.shape == (20, 32, 32, 3)


DRAW = "from large_batch_cifar_10_fast.core.images import load_images; print(load_images('synthetic').digest)"


def test_every_machine_draws_the_same_synthetic_images(tmp_path):
    """IEEE 754 leaves no choice in +, -, *, / and the square root; sines and powers depend on NumPy's kernels."""
    assert load_images("synthetic").digest == "7fa1af4342af"
    others = " ".join(__cpu_dispatch__)  # without them NumPy takes the kernels of an older processor
    assert python("-c", DRAW, cwd=tmp_path, NPY_DISABLE_CPU_FEATURES=others).stdout == "7fa1af4342af\n"


@pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="CIFAR10_NPZ does not name CIFAR-10, or it compressed")
def test_the_constants_are_those_of_cifar_10():
    images = load_images(os.environ["CIFAR10_NPZ"])
    pixels = images.train_images[::7].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(pixels.mean(0), CIFAR_10_NORMALIZATION[0], rtol=0.01)
    np.testing.assert_allclose(pixels.std(0), CIFAR_10_NORMALIZATION[1], rtol=0.01)
    for labels, count in ((images.train_labels, 5000), (images.test_labels, 1000)):
        assert np.bincount(labels).tolist() == 10 * [count]
