"""Images are downloaded, checked and read: CIFAR from a server on loopback, .npz files, synthetic shapes."""

import fcntl
import hashlib
import os
import pickle
import re
import shutil
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import python, write_npz
from numpy._core._multiarray_umath import __cpu_dispatch__
from torchvision import datasets

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.images import load as images
from large_batch_cifar_10_fast.images.load import CIFAR_10_NORMALIZATION, Images, load_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes

ARCHIVE, ARCHIVE_100 = "cifar-10-python.tar.gz", "cifar-100-python.tar.gz"
FOLDER = "cifar-10-batches-py"
ARRAYS = draw_shapes(20, 6)
TRAIN, TEST = ARRAYS[:2], ARRAYS[2:]
DIGEST = hashlib.sha256(b"".join(part.astype(np.uint8).tobytes() for part in ARRAYS)).hexdigest()[:12]


class Explosive:
    def __reduce__(self):
        return eval, ("1 / 0",)


EXPLOSIVE = pickle.dumps(Explosive())  # unpickling it raises ZeroDivisionError


class Handler(SimpleHTTPRequestHandler):
    """Serves files; /silent sends nothing, /short and /stalled a part."""

    def do_GET(self):
        if self.path in ("/short", "/stalled"):
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\npart")
        elif self.path != "/silent":
            super().do_GET()
        if self.path in ("/silent", "/stalled"):
            self.server.closing.wait(20)

    def log_request(self, *_):
        self.server.requests.append(self.path[1:])


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """Serve a small CIFAR-10 and CIFAR-100."""
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("served")
    batches = {f"data_batch_{i + 1}": [part[4 * i : 4 * i + 4] for part in TRAIN] for i in range(5)}
    batches["test_batch"] = TEST
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http:
        http.folder = folder
        http.requests = []
        http.handle_error = Mock()  # torchvision closes its first request unread
        http.closing = threading.Event()
        http.url = f"http://127.0.0.1:{http.server_port}/"
        for kind, content in ((datasets.CIFAR10, batches), (datasets.CIFAR100, {"train": TRAIN, "test": TEST})):
            key = kind.meta["key"]
            files = {kind.meta["filename"]: {key: []}}
            for file, (pixels, labels) in content.items():
                data = np.moveaxis(pixels, 3, 1).reshape(len(pixels), -1)
                files[file] = {"data": data, key.replace("label_names", "labels"): labels.tolist()}
            with tarfile.open(folder / kind.filename, "w:gz") as tar:
                for file, value in files.items():
                    (source / file).write_bytes(pickle.dumps(value))
                    tar.add(source / file, f"{kind.base_folder}/{file}")
            small = type("Small", (kind,), {"url": http.url + kind.filename})
            small.tgz_md5 = md5(folder / kind.filename)
            small.meta = kind.meta | {"md5": md5(source / kind.meta["filename"])}
            small.train_list = [(file, md5(source / file)) for file, _ in kind.train_list]
            small.test_list = [(file, md5(source / file)) for file, _ in kind.test_list]
            monkeypatch.setattr(datasets, kind.__name__, small)
        (source / "test_batch").write_bytes(EXPLOSIVE)
        with tarfile.open(folder / "explosive", "w:gz") as tar:
            tar.add(source, FOLDER)
        monkeypatch.setenv("CIFAR10_URL", "")  # which is the default
        monkeypatch.setattr(images, "TIMEOUT", 0.5)
        monkeypatch.setattr(images, "DATA", folder / "default" / "data")
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield http
        http.closing.set()
        http.shutdown()


def digest_of(data) -> str:
    return load_images(str(data)).digest


def refusal(data) -> str:
    with pytest.raises(ConfigError) as error:
        load_images(str(data))
    assert str(error.value).isprintable()
    return str(error.value)


def test_one_process_downloads_while_others_wait(server, tmp_path, monkeypatch, capfd):
    (server.folder / ARCHIVE).rename(server.folder / "mirrored")
    monkeypatch.setenv("CIFAR10_URL", server.url + "mirrored")
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(digest_of, [tmp_path] * 4)] == [DIGEST] * 4
    assert server.requests == 2 * ["mirrored"]  # torchvision first asks for redirects
    assert capfd.readouterr() == ("", f"Downloading {ARCHIVE} (170 MB) from {server.url}mirrored to {tmp_path}\n")
    assert {path.name for path in tmp_path.iterdir()} == {ARCHIVE, FOLDER}


def test_archive_or_unpacked_folder_is_enough_offline(server, tmp_path):
    shutil.copy(server.folder / ARCHIVE, tmp_path)
    assert digest_of(tmp_path / ARCHIVE) == DIGEST
    (tmp_path / ARCHIVE).unlink()
    assert digest_of(tmp_path) == DIGEST
    assert not server.requests


def test_a_damaged_archive_is_neither_unpickled_nor_replaced(server, tmp_path):
    content = (server.folder / "explosive").read_bytes()
    (tmp_path / ARCHIVE).write_bytes(content)
    for data in (tmp_path, tmp_path / ARCHIVE):
        assert re.search("is damaged .*: delete it", refusal(data))
    assert ((tmp_path / ARCHIVE).read_bytes(), server.requests) == (content, [])


def test_a_damaged_batch_is_not_unpickled_but_unpacked_again(server, tmp_path):
    for damaged in ("data_batch_3", "batches.meta"):
        digest_of(tmp_path)
        (tmp_path / FOLDER / damaged).write_bytes(EXPLOSIVE)
        assert digest_of(tmp_path) == DIGEST


@pytest.mark.parametrize("name", ["absent", "explosive", "silent", "short", "stalled"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(name, server, tmp_path, monkeypatch):
    monkeypatch.setenv("CIFAR10_URL", server.url + name)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(refusal, tmp_path)
        while not refused.done():
            assert not (tmp_path / ARCHIVE).exists()  # or a kill would leave it
            time.sleep(0.01)
    assert time.monotonic() - begin < 10
    said = rf"CIFAR-10 cannot be had in {tmp_path} \(.+\): put {ARCHIVE} there by hand, name .* CIFAR10_URL, or"
    assert re.match(said, refused.result())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("absent", f"absent does not exist: name FILE.npz, {ARCHIVE} or {ARCHIVE_100}"),
        (__file__, "test_data.py is another file"),
        ("pictures", "pictures has test, train"),
        ("x" * 300, "cannot be used (File name too long)"),
        ("folders", "folders has folders and no JPEG, PNG or WebP pictures in them"),
    ],
)
def test_other_data_is_refused_and_nothing_is_downloaded(name, found, server, tmp_path, monkeypatch):
    for folder in ("train", "test"):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
    (tmp_path / "folders" / "cats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert found in refusal(name)
    assert not server.requests


def test_locks_are_not_needed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError))
    assert digest_of(tmp_path) == DIGEST


def test_cifar_100_is_downloaded_beside_cifar_10(server, tmp_path):
    for data in ("cifar100", str(images.DATA / ARCHIVE_100)):
        found = load_images(data)
        assert (found.name, found.digest) == ("CIFAR-100", DIGEST)
    for data in ("cifar10", str(images.DATA)):
        assert load_images(data).name == "CIFAR-10"
    assert server.requests == [ARCHIVE_100, ARCHIVE_100, ARCHIVE, ARCHIVE]
    shutil.copy(server.folder / ARCHIVE_100, tmp_path)
    assert load_images(str(tmp_path)).name == "CIFAR-100"


def test_npz_is_read_as_it_is(tmp_path):
    path = write_npz(tmp_path / "some.npz", *TRAIN, TEST[0], TEST[1].astype(">i4"))
    loaded = load_images(str(path))
    for found, expected in zip(loaded.arrays, ARRAYS, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == (np.uint8 if found.ndim == 4 else np.int64)
    assert (loaded.name, loaded.digest) == ("some.npz", DIGEST)
    assert Images("", TRAIN[0], TRAIN[1] + 256, *TEST).digest != DIGEST


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        (2, TEST[0][:, :28], r"uint8 \[6, 28, 32, 3\], not"),
        (3, TEST[1][:5], r"labels are int64 \[5\]"),
        (3, np.arange(5, 11), "5 to 10, not 0 to 9"),
        (1, 50 * TRAIN[1] + 551, "labels are of 1002 classes"),
        (2, np.array([Explosive()], dtype=object), "allow_pickle=False"),
    ],
)
def test_a_wrong_npz_is_refused_and_never_unpickled(part, content, message, tmp_path):
    path = tmp_path / "some.npz"
    assert "No such file" in refusal(path)
    write_npz(path, *ARRAYS[:part], content, *ARRAYS[part + 1 :])
    assert re.search(f"{path} .*{message}", refusal(path))
    path.write_bytes(b"PK\3\4 and no more")
    assert "cannot be read as a .npz file" in refusal(path)


def test_only_images_of_cifar_10s_sizes_have_its_normalization():
    pixels = TRAIN[0].reshape(-1, 3)
    np.testing.assert_allclose(Images("", *ARRAYS).normalization, (pixels.mean(0), pixels.std(0)), atol=0.006)
    for classes in (10, 11):
        parts = [(np.broadcast_to(TRAIN[0][0], (n, 32, 32, 3)), np.arange(n) % classes) for n in (50_000, 10_000)]
        found = Images("", *parts[0], *parts[1]).normalization
        assert (found == CIFAR_10_NORMALIZATION) == (classes == 10)


@pytest.mark.parametrize(
    ("test", "doubts"),
    [
        (TEST[0], []),
        (TEST[0] // 128, ["all pixels"]),
        (np.full_like(TEST[0], 7), ["all images"]),
        (np.concatenate([TEST[0], TRAIN[0][:1]]), ["1 of 7 tes"]),
        (np.concatenate([*[TEST[0]] * 17, TRAIN[0][:1]]), []),  # 1 of 103
    ],
)
def test_images_that_cannot_be_right_are_doubted(test, doubts):
    assert [doubt[:10] for doubt in Images("", *TRAIN, test, TEST[1]).doubts()] == doubts


def test_every_machine_draws_the_same_synthetic_images(tmp_path):
    draw = f"from {images.__name__} import load_images; print(load_images('synthetic').digest)"
    newer = " ".join(__cpu_dispatch__)  # kernels than the oldest processor has
    assert digest_of("synthetic") == "7fa1af4342af"
    assert python("-c", draw, cwd=tmp_path, NPY_DISABLE_CPU_FEATURES=newer).stdout == "7fa1af4342af\n"


@pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="it names no CIFAR-10.npz")
def test_the_constants_are_those_of_cifar_10():
    found = load_images(os.environ["CIFAR10_NPZ"])
    pixels = found.train_images[::7].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose([pixels.mean(0), pixels.std(0)], CIFAR_10_NORMALIZATION, rtol=0.01)
