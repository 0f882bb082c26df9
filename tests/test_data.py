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
from conftest import python, write_npz
from numpy._core._multiarray_umath import __cpu_dispatch__

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.data import cifar10
from large_batch_cifar_10_fast.data.augment import MEAN, STD
from large_batch_cifar_10_fast.data.cifar10 import ARCHIVE, Images, load_images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes

ARRAYS = draw_shapes(20, 6)
TRAIN, TEST = ARRAYS[:2], ARRAYS[2:]
DIGEST = Images("", *TRAIN, *TEST).digest


class Explosive:  # unpickling it raises ZeroDivisionError
    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """Serve an archive in CIFAR-10's format. Yield the server's folder and its URL. It names each request on STDERR."""
    folder, source = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("source")
    parts = {f"data_batch_{1 + i}": [part[4 * i : 4 * i + 4] for part in TRAIN] for i in range(5)}
    for name, (images, labels) in [*parts.items(), ("test_batch", TEST)]:
        batch = {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels.tolist()}
        (source / name).write_bytes(pickle.dumps(batch))
    for name in (ARCHIVE, "explosive"):
        with tarfile.open(folder / name, "w:gz") as archive:
            archive.add(source, "cifar-10-batches-py")
        (source / "test_batch").write_bytes(pickle.dumps(Explosive()))

    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5((folder / ARCHIVE).read_bytes()).hexdigest())
    monkeypatch.setattr(cifar10, "TIMEOUT", 1)
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/"
        monkeypatch.setattr(cifar10, "MIRRORS", [url + ARCHIVE])
        yield folder, url
        http.shutdown()


def test_one_process_tries_mirrors_in_turn_until_the_md5_is_right(server, tmp_path, monkeypatch, capsys):
    folder, url = tmp_path / "new" / "folder", server[1]
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
    for part in ("absent", "explosive", ARCHIVE, cifar10.ARCHIVE_MD5, str(tmp_path), "CIFAR10_URL", "--demo"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_one_line_before_any_download_but_locks_are_not_needed(
    server, tmp_path, monkeypatch, capsys
):
    (tmp_path / "link").symlink_to("/absent")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ARCHIVE).symlink_to("/absent")
    (tmp_path / "file").touch()
    for name, message in {"link": "link to /absent", "folder": "link to /absent", "file": "", "/proc": "/proc"}.items():
        with pytest.raises(ConfigError, match=f"{message}.*: name another folder"):
            load_images(str(tmp_path / name))
    with pytest.raises(ConfigError, match="is an address"):
        load_images(server[1])
    assert not capsys.readouterr().err
    monkeypatch.setattr(cifar10.fcntl, "flock", lambda *_: os.stat("/absent"))
    assert load_images(str(tmp_path)).digest == DIGEST


def test_npz_is_read_as_it_is(tmp_path):
    path = write_npz(tmp_path / "some.npz", *TRAIN, TEST[0], TEST[1].astype(">i4"))
    loaded = load_images(str(path))
    assert loaded.name == "some.npz"
    for found, expected in zip((*loaded.train, *loaded.test), (*TRAIN, *TEST), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == (np.uint8 if found.ndim == 4 else np.int64)
    content = b"".join(part.astype(np.uint8).tobytes() for part in (*TRAIN, *TEST))
    assert loaded.digest == hashlib.sha256(content).hexdigest()[:12]


def with_test(images, labels):
    return lambda path: write_npz(path, *TRAIN, images, labels)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (with_test(TEST[0].astype(np.float32), TEST[1]), "images are float32"),
        (with_test(TEST[0], TEST[1][:5]), r"labels are int64 \[5\]"),
        (with_test(TEST[0][:2], np.array([0, 10])), "0 to 10, not 0 to 9"),
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


DRAW = "from large_batch_cifar_10_fast.data.cifar10 import load_images; print(load_images('synthetic').digest)"


def test_every_machine_draws_the_same_synthetic_images(tmp_path):
    """IEEE 754 leaves no choice in +, -, *, / and the square root; sines and powers depend on NumPy's kernels."""
    assert load_images("synthetic").digest == "7fa1af4342af"
    others = " ".join(__cpu_dispatch__)  # without them NumPy takes the kernels of an older processor
    assert python("-c", DRAW, cwd=tmp_path, NPY_DISABLE_CPU_FEATURES=others).stdout == "7fa1af4342af\n"


@pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="CIFAR10_NPZ does not name CIFAR-10, or it compressed")
def test_the_constants_are_those_of_cifar_10():
    images = load_images(os.environ["CIFAR10_NPZ"])
    pixels = images.train_images[::7].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(pixels.mean(0), MEAN, rtol=0.01)
    np.testing.assert_allclose(pixels.std(0), STD, rtol=0.01)
    for labels, count in ((images.train_labels, 5000), (images.test_labels, 1000)):
        assert np.bincount(labels).tolist() == 10 * [count]
