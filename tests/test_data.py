"""Images are downloaded, checked and read: CIFAR-10 from a server on loopback, .npz files, synthetic shapes."""

import hashlib
import os
import pickle
import re
import socket
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import random_pictures, write_npz
from torchvision.datasets import CIFAR10

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.data import cifar10
from large_batch_cifar_10_fast.data.cifar10 import ARCHIVE, Images, count_training_images, load_images

TRAIN, TEST = random_pictures(20), random_pictures(6)


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
    with tarfile.open(folder / ARCHIVE, "w:gz") as archive:
        archive.add(source, "cifar-10-batches-py")
    (source / "test_batch").write_bytes(pickle.dumps(Explosive()))
    with tarfile.open(folder / "explosive", "w:gz") as archive:
        archive.add(source, "cifar-10-batches-py")

    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5((folder / ARCHIVE).read_bytes()).hexdigest())
    monkeypatch.setattr(cifar10, "TIMEOUT", 1)
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()


@pytest.mark.parametrize("damaged", [False, True])
def test_one_process_tries_mirrors_in_turn_until_the_md5_is_right(server, damaged, tmp_path, monkeypatch, capsys):
    served, url = server
    if damaged:  # an archive in the folder with a wrong MD5 is replaced, and not unpickled
        (tmp_path / ARCHIVE).write_bytes((served / "explosive").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(4) as pool:
        mirrors = [f"http://127.0.0.1:{silent.getsockname()[1]}/", url + "explosive", url + ARCHIVE, url + "unasked"]
        monkeypatch.setattr(cifar10, "MIRRORS", mirrors)
        monkeypatch.setenv("CIFAR10_URL", url + "absent")
        loaded = pool.map(load_images, [str(tmp_path)] * 4)
        assert {images.digest for images in loaded} == {Images("", *TRAIN, *TEST).digest}
    for name in (tmp_path, tmp_path / ARCHIVE, tmp_path / cifar10.BATCHES):  # all mean the folder
        assert load_images(str(name)).digest == Images("", *TRAIN, *TEST).digest
    requests = re.findall('"GET /(.*) HTTP', capsys.readouterr().err)
    assert requests == ["absent", "explosive", ARCHIVE], "one process downloads; later an existing archive is used"
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]


def test_an_unpacked_archive_is_read_if_its_files_have_their_md5(server, tmp_path, monkeypatch):
    with tarfile.open(server[0] / ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    files = sorted((tmp_path / cifar10.BATCHES).iterdir())
    monkeypatch.setattr(CIFAR10, "train_list", [(f.name, hashlib.md5(f.read_bytes()).hexdigest()) for f in files])
    monkeypatch.setattr(CIFAR10, "test_list", [])
    assert load_images(str(tmp_path)).digest == Images("", *TRAIN, *TEST).digest
    files[-1].write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(ConfigError, match=r"damaged .* delete it and start again"):
        load_images(str(tmp_path))


def test_without_a_whole_download_one_line_says_what_to_do_and_nothing_is_written(server, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "MIRRORS", (server[1] + "absent", server[1] + "explosive"))
    with pytest.raises(ConfigError) as error:
        load_images(str(tmp_path / "data"))
    for part in ("absent", "explosive", ARCHIVE, cifar10.ARCHIVE_MD5, str(tmp_path / "data"), "CIFAR10_URL", "--demo"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_dangling_link_is_called_one_and_locks_are_not_needed(server, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("/absent")
    with pytest.raises(ConfigError, match="it is a link to /absent, which does not exist"):
        load_images(str(tmp_path / "link"))
    monkeypatch.setattr(cifar10.fcntl, "flock", lambda *_: os.stat("/absent"))
    monkeypatch.setenv("CIFAR10_URL", server[1] + ARCHIVE)
    assert load_images(str(tmp_path)).digest == Images("", *TRAIN, *TEST).digest


def test_npz_is_read_as_it_is(tmp_path):
    path = write_npz(tmp_path / "some.npz", *TRAIN, TEST[0], TEST[1].astype(">i4"))
    loaded = load_images(str(path))
    assert (loaded.name, count_training_images(str(path))) == ("some.npz", 20)
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


def test_synthetic_images_never_change():
    """To within rounding: NumPy's float32 sine differs in its last bit between CPUs."""
    shapes = load_images("synthetic")
    assert count_training_images("synthetic") == len(shapes.train_images) == 8192
    assert shapes.train_labels[:8].tolist() == [2, 3, 0, 8, 2, 8, 6, 6]
    assert shapes.test_labels[:8].tolist() == [8, 6, 3, 6, 4, 6, 8, 7]
    patch = [[94, 76, 116, 136], [142, 114, 72, 93], [148, 165, 130, 92], [118, 170, 82, 152]]
    np.testing.assert_allclose(shapes.train_images[5, ::8, ::8, 0], patch, atol=2)
    np.testing.assert_allclose(shapes.train_images.mean((0, 1, 2)), [127.69, 127.40, 126.82], atol=0.1)
