"""Images are downloaded, checked, read, put in order and doubted: CIFAR from a loopback server, .npz files, shapes."""

import hashlib
import os
import pickle
import re
import shutil
import tarfile
import threading
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
from large_batch_cifar_10_fast.images import cifar, load
from large_batch_cifar_10_fast.images.load import CIFAR_10_NORMALIZATION, count_copies, load_images, make_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import train

ARCHIVE, ARCHIVE_100 = "cifar-10-python.tar.gz", "cifar-100-python.tar.gz"
FOLDER = "cifar-10-batches-py"
ARRAYS = draw_shapes(20, 6)
TRAIN, TEST = ARRAYS[:2], ARRAYS[2:]
DIGEST = hashlib.sha256(b"".join(part.astype(np.uint8).tobytes() for part in ARRAYS)).hexdigest()[:12]


class Explosive:
    """Unpickling it raises ZeroDivisionError."""

    def __reduce__(self):
        return eval, ("1 / 0",)


class Handler(SimpleHTTPRequestHandler):
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
        (source / "test_batch").write_bytes(pickle.dumps(Explosive()))
        with tarfile.open(folder / "explosive", "w:gz") as tar:
            tar.add(source, FOLDER)
        monkeypatch.setenv("CIFAR10_URL", "")  # which is the default
        monkeypatch.setattr(cifar, "DATA", folder / "default" / "data")
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield http
        http.shutdown()


def digest_of(data) -> str:
    return load_images(str(data)).digest


def refusal(data) -> str:
    with pytest.raises(ConfigError) as error:
        load_images(str(data))
    assert str(error.value).isprintable()
    return str(error.value)


# ---- CIFAR


def test_one_process_downloads_while_others_wait_and_an_archive_or_its_folder_is_enough_offline(
    server, tmp_path, monkeypatch, capfd
):
    (server.folder / ARCHIVE).rename(server.folder / "mirrored")
    monkeypatch.setenv("CIFAR10_URL", server.url + "mirrored")
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(digest_of, [tmp_path] * 4)] == [DIGEST] * 4
    assert server.requests == 2 * ["mirrored"]  # torchvision first asks for redirects
    assert capfd.readouterr().out == "", "STDOUT is the log"
    shutil.rmtree(tmp_path / FOLDER)
    assert digest_of(tmp_path / ARCHIVE) == DIGEST
    (tmp_path / ARCHIVE).unlink()
    assert digest_of(tmp_path) == DIGEST
    assert server.requests == 2 * ["mirrored"]


def test_what_is_damaged_or_half_is_not_unpickled_but_made_again(server, tmp_path):
    digest_of(tmp_path)
    (tmp_path / FOLDER / "test_batch").write_bytes(pickle.dumps(Explosive()))
    assert digest_of(tmp_path) == DIGEST
    (tmp_path / FOLDER / "batches.meta").write_bytes(pickle.dumps(Explosive()))
    assert "metadata file not found or corrupted" in refusal(tmp_path)
    shutil.rmtree(tmp_path / FOLDER)
    content = (tmp_path / ARCHIVE).read_bytes()
    (tmp_path / ARCHIVE).write_bytes(content[:1000])  # as an interrupted download leaves it
    server.requests.clear()
    assert digest_of(tmp_path) == DIGEST
    assert server.requests == 2 * [ARCHIVE]
    assert (tmp_path / ARCHIVE).read_bytes() == content


@pytest.mark.parametrize("name", ["absent", "explosive"])
def test_a_failed_download_says_what_to_do(name, server, tmp_path, monkeypatch):
    monkeypatch.setenv("CIFAR10_URL", server.url + name)
    said = rf"CIFAR-10 cannot be loaded from {tmp_path} \(.+\): put {ARCHIVE} there by hand, name .* CIFAR10_URL, or"
    assert re.match(said, refusal(tmp_path))
    assert not (tmp_path / FOLDER).exists()


def test_the_launcher_downloads_before_it_starts_processes_that_an_interruption_kills(server, tmp_path, monkeypatch):
    """It does not read a data set that is there."""
    started = Mock()
    monkeypatch.setattr(train, "Processes", started)
    words = ["--data", "cifar10", "--nproc", "1", "--out", str(tmp_path), "--campaign", "night"]
    started.side_effect = lambda *_: (cifar.DATA / FOLDER).exists() or pytest.fail("it was not there")
    train.start_launch(words)
    monkeypatch.setattr(load, "read_cifar", None)
    train.start_launch(words)
    assert started.call_count == 2


def test_other_data_is_refused_and_nothing_is_downloaded(server, tmp_path, monkeypatch):
    (tmp_path / "my photos" / "cats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert f"absent is no data set: name FILE.npz, {ARCHIVE} or {ARCHIVE_100}" in refusal("absent")
    assert refusal("my photos").endswith("`cifar10-fast photos 'my photos' photos.npz` makes a file of photos")
    assert not server.requests


def test_cifar_100_is_downloaded_beside_cifar_10(server, tmp_path):
    for data in ("cifar100", str(cifar.DATA / ARCHIVE_100)):
        found = load_images(data)
        assert (found.name, found.digest) == ("CIFAR-100", DIGEST)
    for data in ("cifar10", str(cifar.DATA)):
        assert load_images(data).name == "CIFAR-10"
    assert server.requests == [ARCHIVE_100, ARCHIVE_100, ARCHIVE, ARCHIVE]
    shutil.copy(server.folder / ARCHIVE_100, tmp_path)
    assert load_images(str(tmp_path)).name == "CIFAR-100"


# ---- Files of one's own


def test_an_npz_file_is_read_as_it_is_but_for_the_order_of_training_images(tmp_path):
    path = tmp_path / "some.npz"
    names = [f"class {number}" for number in range(10)]
    parts = dict(zip(load.ARRAYS, [*TRAIN, TEST[0], TEST[1].astype(">i4")], strict=True))
    np.savez(path, **parts, class_names=names)
    found = load_images(str(path))
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(found.train_images, TRAIN[0][order])
    np.testing.assert_array_equal(found.train_labels, TRAIN[1][order])
    np.testing.assert_array_equal(found.test_images, TEST[0])
    np.testing.assert_array_equal(found.test_labels, TEST[1])
    assert found.test_labels.dtype == np.int64
    assert (found.name, found.digest, found.class_names) == ("some.npz", DIGEST, names)
    assert make_images("", [TRAIN[0], TRAIN[1] + 256, *TEST]).digest != DIGEST


def test_only_images_of_ones_own_are_shuffled_and_each_worker_gets_all_classes(tmp_path, monkeypatch):
    parts = draw_shapes(1000, 20)
    parts[1][:] = np.arange(1000) % 8
    parts[3][:] %= 8
    path = str(write_npz(tmp_path / "in turn.npz", *parts))
    labels = load_images(path).train_labels
    for worker in range(8):
        assert np.bincount(labels[worker::8], minlength=8).min() > 0
    for name in ("CIFAR-10", "CIFAR-100", "synthetic"):
        found = make_images(name, parts)
        assert not found.is_shuffled
        assert found.train_images is parts[0]
    monkeypatch.setattr(load, "CIFAR_10_TRAINING", load.digests_of(parts)[0])
    for tests in (20, 7):  # CIFAR-10 in a file, perhaps with other test images
        write_npz(tmp_path / "in turn.npz", *parts[:2], parts[2][:tests], parts[3][:tests])
        assert (load_images(path).train_labels == parts[1]).all()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_images", TEST[0][:, :28], r"uint8 \[6, 28, 32, 3\], not"),
        ("train_labels", 50 * TRAIN[1] + 551, "labels have 1002 classes"),
        ("test_images", np.array([Explosive()], dtype=object), "allow_pickle=False"),
        ("class_names", np.array([*"abcdefghi"]), r"class_names are <U1 \[9\], not 10 different texts"),
    ],
)
def test_a_wrong_npz_file_is_refused_and_never_unpickled(name, content, message, tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, **dict(zip(load.ARRAYS, ARRAYS, strict=True)) | {name: content})
    assert re.search(f"{path} .*{message}", refusal(path))
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be read as a .npz file" in refusal(path)


def test_only_images_of_cifar_10s_sizes_have_its_normalization():
    pixels = TRAIN[0].reshape(-1, 3)
    found = make_images("", ARRAYS).normalization
    np.testing.assert_allclose(found, (pixels.mean(0), pixels.std(0)), atol=0.006)
    for classes in (10, 11):
        parts = []
        for count in (50_000, 10_000):
            parts += [np.broadcast_to(TRAIN[0][0], (count, 32, 32, 3)), np.arange(count) % classes]
        assert (make_images("CIFAR-10", parts).normalization == CIFAR_10_NORMALIZATION) == (classes == 10)


def test_test_images_that_are_training_images_are_counted():
    parts = draw_shapes(40, 30)
    assert count_copies(make_images("", parts)) == 0
    parts[2][4:7] = parts[0][[0, 0, 3]]
    assert count_copies(make_images("", parts)) == 3


# ---- Constants


def test_every_machine_draws_the_same_synthetic_images(tmp_path):
    draw = f"from {draw_shapes.__module__} import draw_shapes\n"
    draw += "import numpy; numpy.save('drawn', draw_shapes(500, 1)[0])"
    newer = " ".join(__cpu_dispatch__)  # kernels than the oldest processor has
    python("-c", draw, cwd=tmp_path, NPY_DISABLE_CPU_FEATURES=newer)
    assert np.array_equal(np.load(tmp_path / "drawn.npy"), draw_shapes(500, 1)[0])
    assert digest_of("synthetic") == "7fa1af4342af"


@pytest.mark.skipif("CIFAR10_NPZ" not in os.environ, reason="it names no CIFAR-10.npz")
def test_the_constants_are_those_of_cifar_10():
    found = load_images(os.environ["CIFAR10_NPZ"])
    pixels = found.train_images[::7].reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose([pixels.mean(0), pixels.std(0)], CIFAR_10_NORMALIZATION, rtol=0.01)
    is_original = found.digest == "b9da7d04ca62"  # or they are JPEG-compressed copies
    assert found.is_shuffled != is_original
