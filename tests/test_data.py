"""Images are downloaded, checked and read: CIFAR-10 from a server on loopback, .npz files, synthetic shapes."""

import hashlib
import http.server
import multiprocessing
import pickle
import struct
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import random_pictures, write_npz
from torchvision.datasets import CIFAR10

from large_batch_cifar_10_fast.data import cifar10
from large_batch_cifar_10_fast.data.cifar10 import Images, count_training_images, download_cifar10, load_images
from large_batch_cifar_10_fast.options import ConfigError


class Executed(Exception):  # noqa: N818 (a signal of the test)
    """Raised by whoever unpickles an Explosive."""


def explode():
    raise Executed


class Explosive:
    def __reduce__(self):
        return explode, ()


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A server of an archive in CIFAR-10's format, whose MD5s replace the originals'. Yields images, URL, requests."""
    source, served, md5 = tmp_path / "source", tmp_path / "served", {}
    source.mkdir()
    served.mkdir()
    train, test = random_pictures(20), random_pictures(6)
    contents = {"batches.meta": {"label_names": list("abcdefghij")}}
    for name, (images, labels) in (("train", train), ("test", test)):
        contents[name] = {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels.tolist()}
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content))
        md5[name] = hashlib.md5((source / name).read_bytes()).hexdigest()
    with tarfile.open(served / cifar10.ARCHIVE, "w:gz") as archive:
        archive.add(source, cifar10.BATCHES)
    original = (served / cifar10.ARCHIVE).read_bytes()
    (served / "cut.tar.gz").write_bytes(original[:500])
    with tarfile.open(served / "other.tar.gz", "w:gz") as archive:  # whole, but of other images
        (source / "train").write_bytes(pickle.dumps(contents["test"]))
        archive.add(source, cifar10.BATCHES)
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *more):
            super().__init__(*more, directory=str(served))

        def do_GET(self):
            requests.append(self.path[1:])
            if self.path == "/silent":
                time.sleep(30)
            elif self.path == "/stops":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(10**6))
                time.sleep(30)
            elif self.path == "/garbage":
                self.wfile.write(b"SSH-2.0\r\n\r\n")
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5(original).hexdigest())
    monkeypatch.setattr(cifar10, "TIMEOUT", 1)
    monkeypatch.setattr(CIFAR10, "train_list", [("train", md5["train"])])
    monkeypatch.setattr(CIFAR10, "test_list", [("test", md5["test"])])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(cifar10, "MIRRORS", (f"{url}{cifar10.ARCHIVE}",))
        yield Images("CIFAR-10", *train, *test), url, requests
        server.shutdown()


BROKEN = ("absent", "cut.tar.gz", "other.tar.gz", "silent", "garbage")


def test_mirrors_are_tried_in_turn_the_users_first_until_the_md5_is_right(mirror, tmp_path, monkeypatch):
    expected, url, requests = mirror
    monkeypatch.setattr(cifar10, "MIRRORS", tuple(url + name for name in (*BROKEN[1:], cifar10.ARCHIVE, "unasked")))
    monkeypatch.setenv("CIFAR10_URL", url + "absent")
    folder, start = tmp_path / "new" / "data", time.monotonic()
    assert load_images(str(folder)).digest == expected.digest
    assert time.monotonic() - start < 20, "a silent mirror is given up"
    assert requests == [*BROKEN, cifar10.ARCHIVE]
    assert sorted(path.name for path in folder.iterdir()) == [cifar10.BATCHES, cifar10.ARCHIVE]
    assert load_images(str(folder)).digest == expected.digest
    assert len(requests) == 6, "nothing is downloaded twice"


def test_without_a_whole_download_one_line_says_what_to_do_and_nothing_is_kept(mirror, tmp_path, monkeypatch):
    _, url, _ = mirror
    monkeypatch.setattr(cifar10, "MIRRORS", tuple(url + name for name in BROKEN))
    for folder in (tmp_path / "new" / "data", tmp_path / "served"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError) as error:
            download_cifar10(folder)
        for part in (*BROKEN, cifar10.ARCHIVE, cifar10.ARCHIVE_MD5, str(folder), "CIFAR10_URL", "--demo"):
            assert part in str(error.value)
        assert str(error.value).isprintable()
        assert sorted(tmp_path.rglob("*")) == before
        (tmp_path / "served" / cifar10.ARCHIVE).unlink(missing_ok=True)


def test_a_killed_download_leaves_no_half_archive_and_the_next_one_starts_over(mirror, tmp_path, monkeypatch):
    expected, url, _ = mirror
    (folder := tmp_path / "data").mkdir()
    (folder / cifar10.ARCHIVE).write_bytes(b"of another origin")
    monkeypatch.setattr(cifar10, "MIRRORS", (url + "stops",))
    monkeypatch.setattr(cifar10, "TIMEOUT", 60)
    process = multiprocessing.get_context("fork").Process(target=download_cifar10, args=(folder,), daemon=True)
    process.start()
    deadline = time.monotonic() + 20
    while not any(path.stat().st_size for path in folder.rglob(f".*/{cifar10.ARCHIVE}")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert (folder / cifar10.ARCHIVE).read_bytes() == b"of another origin"
    monkeypatch.setattr(cifar10, "MIRRORS", (url + cifar10.ARCHIVE,))
    assert load_images(str(folder)).digest == expected.digest
    assert sorted(path.name for path in folder.iterdir()) == [cifar10.BATCHES, cifar10.ARCHIVE]


def test_an_archive_placed_by_hand_is_used_without_a_download(mirror, tmp_path):
    expected, _, requests = mirror
    assert load_images(str(tmp_path / "served")).digest == expected.digest
    assert not requests


def test_processes_wait_for_the_first_which_downloads_once(mirror, tmp_path):
    threads = [threading.Thread(target=download_cifar10, args=(tmp_path / "data",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert mirror[2] == [cifar10.ARCHIVE]


def test_damaged_cifar10_is_not_unpickled(mirror, tmp_path):
    download_cifar10(tmp_path / "data")
    (tmp_path / "data" / cifar10.BATCHES / "train").write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(ConfigError, match="delete it and start again"):
        load_images(str(tmp_path / "data"))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_is_read_as_it_is(tmp_path, compression):
    train, test = random_pictures(30), random_pictures(7)
    path = write_npz(tmp_path / "some.npz", *train, *(part.astype(part.dtype.newbyteorder(">")) for part in test))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    loaded = load_images(str(path))
    assert (loaded.name, count_training_images(str(path))) == ("some.npz", 30)
    for got, expected in zip((*loaded.train, *loaded.test), (*train, *test), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == (np.uint8 if got.ndim == 4 else np.int64)
    flat = b"".join(part.astype(np.uint8).tobytes() for part in (*train, *test))
    assert loaded.digest == hashlib.sha256(flat).hexdigest()[:12]


def _npz_of(images, labels):
    return lambda path: write_npz(path, images, labels, *random_pictures(4))


def _change(change):
    """Write a good file, then change its bytes."""

    def write(path: Path) -> None:
        write_npz(path, *random_pictures(30), *random_pictures(7))
        path.write_bytes(change(path.read_bytes()))

    return write


def _huge(content: bytes) -> bytes:
    at = content.rindex(b"train_images.npy") - 46 + 24  # the uncompressed size in the zip directory
    return content[:at] + struct.pack("<L", 2**30) + content[at + 4 :]


IMAGES, LABELS = random_pictures(8)
UNUSABLE = {
    "float images": (_npz_of(IMAGES.astype(np.float32), LABELS), "images are float32"),
    "flat images": (_npz_of(IMAGES.reshape(8, -1), LABELS), r"\[8, 3072\], not uint8"),
    "no images": (_npz_of(IMAGES[:0], LABELS[:0]), r"\[0, 32, 32, 3\]"),
    "too few labels": (_npz_of(IMAGES, LABELS[:7]), r"labels are int64 \[7\]"),
    "float labels": (_npz_of(IMAGES, LABELS / 2), "labels are float64"),
    "an eleventh class": (_npz_of(IMAGES[:3], np.array([0, 10, 2])), "0 to 10, not 0 to 9"),
    "a negative class": (_npz_of(IMAGES[:3], np.array([0, -1, 2])), "-1 to 2, not 0 to 9"),
    "an array missing": (lambda path: np.savez(path, train_images=IMAGES), "train_labels is not a file"),
    "a pickle in an array": (_npz_of(np.array([Explosive()], dtype=object), LABELS), "allow_pickle=False"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Explosive())), "pickled"),
    "a single array": (lambda path: np.save(path.open("wb"), IMAGES), "ndarray"),
    "a folder": (Path.mkdir, "directory"),
    "nothing": (lambda path: None, "No such file"),
    "an empty file": (Path.touch, "."),
    "a short file": (_change(lambda content: content[:-100]), "."),
    "a flipped bit": (_change(lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]), "CRC"),
    "more than a gigabyte": (_change(_huge), "more than 1073741824 bytes"),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_an_npz_that_cannot_be_used_is_refused_in_one_line_and_no_pickle_is_executed(tmp_path, fault):
    write, message = UNUSABLE[fault]
    write(path := tmp_path / "some.npz")
    for read in (count_training_images, load_images):
        with pytest.raises(ConfigError, match=message) as error:
            read(str(path))
        assert str(path) in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 500


def test_synthetic_images_never_change():
    """To within rounding: NumPy's float32 sine differs in its last bit between CPUs."""
    shapes = load_images("synthetic")
    assert count_training_images("synthetic") == len(shapes.train_images) == 8192
    assert shapes.train_labels[:8].tolist() == [2, 3, 0, 8, 2, 8, 6, 6]
    assert shapes.test_labels[:8].tolist() == [8, 6, 3, 6, 4, 6, 8, 7]
    patch = [[94, 76, 116, 136], [142, 114, 72, 93], [148, 165, 130, 92], [118, 170, 82, 152]]
    np.testing.assert_allclose(shapes.train_images[5, ::8, ::8, 0], patch, atol=2)
    np.testing.assert_allclose(shapes.train_images.mean((0, 1, 2)), [127.69, 127.40, 126.82], atol=0.1)
