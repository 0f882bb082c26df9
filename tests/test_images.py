"""Fetching CIFAR-10, with a mirror on loopback and an archive of a few pictures; and the shapes drawn in memory."""

import contextlib
import hashlib
import http.server
import itertools
import pickle
import tarfile
import threading
import time

import numpy as np
import pytest
from conftest import random_pictures
from torchvision.datasets import CIFAR10

from large_batch_cifar_10_fast.images import cifar10 as module
from large_batch_cifar_10_fast.images.cifar10 import fetch_cifar10
from large_batch_cifar_10_fast.images.sources import Images, count_training_images, load_images
from large_batch_cifar_10_fast.images.synthetic import draw_shapes
from large_batch_cifar_10_fast.settings.settings import Refusal


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """An archive in CIFAR-10's format, its MD5s put in the places of the originals', served on loopback."""
    source = tmp_path / "source" / module.BATCHES
    source.mkdir(parents=True)
    (train, train_labels), (test, test_labels) = random_pictures(20), random_pictures(6)
    contents = {
        "train": {"data": train.transpose(0, 3, 1, 2).reshape(20, -1), "labels": train_labels.tolist()},
        "test": {"data": test.transpose(0, 3, 1, 2).reshape(6, -1), "labels": test_labels.tolist()},
        "batches.meta": {"label_names": list("abcdefghij")},
    }
    md5 = {}
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content))
        md5[name] = hashlib.md5((source / name).read_bytes()).hexdigest()
    served = tmp_path / "served"
    served.mkdir()
    with tarfile.open(served / module.ARCHIVE, "w:gz") as archive:
        archive.add(source, module.BATCHES)
    (served / "cut.tar.gz").write_bytes((served / module.ARCHIVE).read_bytes()[:500])
    monkeypatch.setattr(module, "ARCHIVE_BYTES", (served / module.ARCHIVE).stat().st_size)
    monkeypatch.setattr(module, "ARCHIVE_MD5", hashlib.md5((served / module.ARCHIVE).read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [("train", md5["train"])])
    monkeypatch.setattr(CIFAR10, "test_list", [("test", md5["test"])])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *more):
            super().__init__(*more, directory=str(served))

        def log_message(self, *_):
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(module, "MIRRORS", (f"{url}/absent.tar.gz", f"{url}/cut.tar.gz", f"{url}/{module.ARCHIVE}"))
        yield Images("CIFAR-10", train, train_labels, test, test_labels), url, requests, served
        server.shutdown()


def _same(a: Images, b: Images) -> bool:
    return a.digest == b.digest


def test_mirrors_are_tried_until_one_sends_the_right_bytes(small_cifar10, tmp_path):
    expected, _, requests, _ = small_cifar10
    folder = tmp_path / "data"
    fetch_cifar10(folder)
    assert _same(load_images(str(folder)), expected)
    assert requests[0].startswith("/absent")
    assert any(path.startswith("/cut") for path in requests)
    assert sorted(p.name for p in folder.iterdir()) == [module.BATCHES, module.ARCHIVE]
    before = len(requests)
    fetch_cifar10(folder)
    assert len(requests) == before, "what is there is not fetched again"


def test_a_mirror_of_ones_own_comes_first(small_cifar10, tmp_path, monkeypatch):
    _, url, requests, served = small_cifar10
    (served / "own.tar.gz").write_bytes((served / module.ARCHIVE).read_bytes())
    monkeypatch.setenv("CIFAR10_URL", f"{url}/own.tar.gz")
    fetch_cifar10(tmp_path / "data")
    assert requests
    assert all("own" in path for path in requests)


def test_an_archive_placed_by_hand_is_used(small_cifar10, tmp_path):
    expected, _, requests, served = small_cifar10
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / module.ARCHIVE).write_bytes((served / module.ARCHIVE).read_bytes())
    assert _same(load_images(str(folder)), expected)
    assert not requests


def test_a_broken_off_download_is_not_taken_for_whole(small_cifar10, tmp_path):
    expected, _, requests, _ = small_cifar10
    folder = tmp_path / "data"
    (folder / ".unfinished" / module.BATCHES).mkdir(parents=True)
    (folder / ".unfinished" / module.ARCHIVE).write_bytes(b"half")
    (folder / module.ARCHIVE).write_bytes(b"half")
    assert _same(load_images(str(folder)), expected)
    assert requests


def test_processes_wait_for_the_first_and_fetch_once(small_cifar10, tmp_path):
    _, _, requests, _ = small_cifar10
    threads = [threading.Thread(target=fetch_cifar10, args=(tmp_path / "data",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len([path for path in requests if module.ARCHIVE in path]) == 1


def test_when_no_mirror_answers_all_are_named_with_the_way_out(small_cifar10, tmp_path, monkeypatch):
    _, url, _, _ = small_cifar10
    monkeypatch.setattr(module, "MIRRORS", (f"{url}/absent.tar.gz", "http://127.0.0.1:9/closed.tar.gz"))
    folder = tmp_path / "data"
    with pytest.raises(Refusal) as refusal:
        fetch_cifar10(folder)
    text = str(refusal.value)
    assert "\n" not in text
    for part in ("absent.tar.gz", "closed.tar.gz", module.ARCHIVE, str(folder), "--demo", "CIFAR10_URL"):
        assert part in text
    assert not folder.exists(), "nothing is left of it"


def test_after_a_failure_only_folders_made_for_it_go(monkeypatch, tmp_path):
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    monkeypatch.setattr(module, "MIRRORS", ("http://127.0.0.1:9/closed.tar.gz",))
    mine = tmp_path / "mine"
    mine.mkdir()
    for folder in (mine, mine / "made" / "here"):
        with pytest.raises(Refusal, match="cannot be fetched"):
            fetch_cifar10(folder)
        assert not list(mine.iterdir())


@pytest.fixture
def mirror(monkeypatch):
    """serve(pieces) makes a server that answers with these bytes the only mirror; returns the list of what it sent."""
    monkeypatch.delenv("CIFAR10_URL", raising=False)
    monkeypatch.setattr(module, "STALLED", 2)
    monkeypatch.setattr(module, "LEAST", 1000)
    sent = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # nobody takes it any more
                for piece in self.server.pieces:
                    self.wfile.write(piece)
                    sent.append(len(piece))
            sent.append("end")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

        def serve(pieces) -> list:
            server.pieces = pieces
            monkeypatch.setattr(module, "MIRRORS", (f"http://127.0.0.1:{server.server_port}/{module.ARCHIVE}",))
            return sent

        yield serve
        server.shutdown()


def _slowly(pieces, seconds: float):
    for piece in pieces:
        yield piece
        time.sleep(seconds)


OK = b"HTTP/1.0 200 OK\r\n"
SLOW = "(fewer than 1000 bytes in 2 seconds)"
GIVEN_UP = {
    "its bytes trickle": (lambda: _slowly([OK + b"\r\n", *[b"x"] * 150], 0.1), SLOW),
    "its headers trickle": (lambda: _slowly([OK, *[b"x"] * 150], 0.1), SLOW),
    "it says nothing": (lambda: _slowly([b"", b""], 15), "timed out|" + SLOW),
    "its size is another": (
        lambda: _slowly([OK + b"Content-Length: 7\r\n\r\n"], 15),
        "(it offers 7 bytes, the archive has",
    ),
    "it ends too early": (lambda: [OK + b"\r\n" + b"half"], "(it sent 4 bytes that are not the archive's)"),
    "it speaks another language": (lambda: [b"SSH-2.0\r\n\r\n"], "(SSH-2.0"),
}


@pytest.mark.parametrize("fault", GIVEN_UP)
def test_a_mirror_is_given_up_within_seconds_if(fault, mirror, tmp_path):
    answer, message = GIVEN_UP[fault]
    mirror(answer())
    start = time.monotonic()
    with pytest.raises(Refusal) as refusal:
        fetch_cifar10(tmp_path / "data")
    assert any(part in str(refusal.value) for part in message.split("|"))
    assert time.monotonic() - start < 10
    assert not list(tmp_path.iterdir())


def test_a_mirror_that_sends_without_end_is_given_up_at_once(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ARCHIVE_BYTES", 10**6)
    sent = mirror(itertools.chain([OK + b"\r\n"], itertools.repeat(bytes(10**5), 2000)))
    with pytest.raises(Refusal, match="it sends more than the archive's 1000000 bytes"):
        fetch_cifar10(tmp_path / "data")
    start = time.monotonic()
    while "end" not in sent:
        assert time.monotonic() - start < 20, "the thread that was left behind ends"
        time.sleep(0.1)
    assert sum(sent[:-1]) < 5e7, "what buffers hold"


def test_a_mirror_that_is_slow_but_steady_is_waited_for(small_cifar10, mirror, tmp_path):
    expected, *_, served = small_cifar10
    archive = (served / module.ARCHIVE).read_bytes()
    size = len(archive) // 6
    pieces = [archive[start : start + size] for start in range(0, len(archive), size)]
    mirror(_slowly([OK + f"Content-Length: {len(archive)}\r\n\r\n".encode(), *pieces], 0.5))
    start = time.monotonic()
    assert _same(load_images(str(tmp_path / "data")), expected)
    assert time.monotonic() - start > module.STALLED


def test_damaged_batches_are_refused_not_unpickled(small_cifar10, tmp_path):
    folder = tmp_path / "data"
    fetch_cifar10(folder)
    (folder / module.BATCHES / "train").write_bytes(pickle.dumps({"data": [], "labels": []}))
    with pytest.raises(Refusal, match="delete it and start again"):
        load_images(str(folder))


@pytest.mark.slow
def test_synthetic_images_are_a_constant_balanced_and_hard_for_a_linear_model():
    train, labels, test, test_labels = draw_shapes()
    assert count_training_images("synthetic") == len(train)
    np.testing.assert_array_equal(draw_shapes(300, 20)[0], draw_shapes(300, 20)[0])
    assert max(np.bincount(labels)) - min(np.bincount(labels)) <= 1
    shuffled = np.random.default_rng(0).permutation(len(train))
    assert len(np.unique(train[shuffled[:500]].reshape(500, -1), axis=0)) == 500

    def rows(pictures):
        return np.c_[pictures.reshape(len(pictures), -1) / 255.0 - 0.5, np.ones(len(pictures))]

    x = rows(train)
    linear = np.linalg.solve(x.T @ x + 100 * np.eye(x.shape[1]), x.T @ np.eye(10)[labels])
    assert np.mean((rows(test) @ linear).argmax(1) == test_labels) < 0.6
