"""Images in .npz files: read as they are, and refused in one line whatever is wrong with them."""

import hashlib
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import random_pictures, write_npz

from large_batch_cifar_10_fast.images.sources import count_training_images, load_images
from large_batch_cifar_10_fast.settings.settings import Refusal


def test_npz_is_read_as_it_is(tmp_path):
    train, test = random_pictures(30), random_pictures(7)
    path = write_npz(tmp_path / "some.npz", *train, *test)
    assert count_training_images(str(path)) == 30
    loaded = load_images(str(path))
    assert loaded.name == "some.npz"
    for got, expected in zip(
        (loaded.train_images, loaded.train_labels, loaded.test_images, loaded.test_labels), (*train, *test), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    flat = b"".join(part.astype(np.uint8).tobytes() for part in (*train, *test))
    assert loaded.digest == hashlib.sha256(flat).hexdigest()[:12]


WRONG = {
    "a float image": ((random_pictures(8)[0].astype(np.float32), random_pictures(8)[1]), "train_images is float32"),
    "flat images": ((random_pictures(8)[0].reshape(8, -1), random_pictures(8)[1]), r"\[8, 3072\], not uint8"),
    "too few labels": ((random_pictures(8)[0], random_pictures(7)[1]), r"train_labels is int64 \[7\]"),
    "an eleventh class": (random_pictures(3, [0, 10, 2]), "0 to 10, outside 0 to 9"),
    "a negative class": (random_pictures(3, [0, -1, 2]), "-1 to 2, outside 0 to 9"),
    "no images": ((np.zeros((0, 32, 32, 3), np.uint8), np.zeros(0, int)), r"\[0, 32, 32, 3\]"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_npz_of_another_shape_is_refused(tmp_path, fault):
    train, message = WRONG[fault]
    path = write_npz(tmp_path / "wrong.npz", *train, *random_pictures(4))
    with pytest.raises(Refusal, match=message):
        count_training_images(str(path))


def test_npz_truncated_missing_or_incomplete_is_refused(tmp_path):
    path = write_npz(tmp_path / "whole.npz", *random_pictures(30), *random_pictures(7))
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:-100])
    np.savez(tmp_path / "part.npz", train_images=random_pictures(3)[0])
    for name, message in (("cut", "damaged"), ("none", "no such file"), ("part", "test_images")):
        with pytest.raises(Refusal, match=message):
            count_training_images(str(tmp_path / f"{name}.npz"))


def test_npz_with_a_flipped_byte_is_refused_when_read(tmp_path):
    path = write_npz(tmp_path / "whole.npz", *random_pictures(30), *random_pictures(7))
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(Refusal, match="damaged"):
        load_images(str(path))


def test_pickled_arrays_are_not_opened(tmp_path):
    labels = random_pictures(4)[1]
    path = write_npz(tmp_path / "evil.npz", np.array([print], dtype=object), labels, *random_pictures(4))
    with pytest.raises(Refusal, match="train_images is object"):
        load_images(str(path))


LABELS = "train_labels.npy"
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def _rezip(path: Path, compression: int, change=lambda labels: labels) -> None:
    """Write a file's members anew, the training labels' bytes changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(content) if name == LABELS else content)


def _forge(path: Path, offset: int, layout: str, value: int) -> None:
    """Overwrite a field of the training labels' entry in the zip's directory."""
    content = bytearray(path.read_bytes())
    entry = content.rindex(LABELS.encode()) - 46
    assert content[entry : entry + 4] == b"PK\x01\x02"
    struct.pack_into(layout, content, entry + offset, value)
    path.write_bytes(content)


def _npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def _second_version(labels: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.load(io.BytesIO(labels)), version=(2, 0))
    return file.getvalue()


def _shape(count: object) -> str:
    return f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},)}}"


HEADERS = {
    "more labels than memory": _shape(10**13),
    "more labels than a number holds": _shape(10**30),
    "more digits than Python reads": _shape("9" * 5000),
    "fewer labels than none": _shape(-30),
    "an unhashable key": "{[]: 1}",
    "parentheses without end": "(" * 9000,
    "signs without end": "-" * 9000 + "1",
    "more than NumPy reads": _shape(30) + " " * 20000,
    "a type of no parts": "{'descr': (), 'fortran_order': False, 'shape': (30,)}",
}
CRAFTED = {
    "encrypted": lambda path: _forge(path, 8, "<H", 1),
    "of unknown compression": lambda path: _forge(path, 10, "<H", 99),
    "lzma": lambda path: _rezip(path, zipfile.ZIP_LZMA),
    "bzip2": lambda path: _rezip(path, zipfile.ZIP_BZIP2),
    "of another version": lambda path: _rezip(path, STORED, _second_version),
    "longer than its header says": lambda path: _rezip(path, DEFLATED, lambda labels: labels + bytes(10**6)),
    "shorter than its header says": lambda path: _rezip(path, DEFLATED, lambda labels: labels[:-8]),
    **{name: lambda path, h=header: _rezip(path, STORED, lambda _: _npy(h)) for name, header in HEADERS.items()},
}


@pytest.mark.parametrize("read", [count_training_images, load_images])
@pytest.mark.parametrize("fault", CRAFTED)
def test_a_crafted_npz_is_refused_in_one_line(tmp_path, fault, read):
    path = write_npz(tmp_path / "crafted.npz", *random_pictures(30), *random_pictures(7))
    CRAFTED[fault](path)
    with pytest.raises(Refusal) as refusal:
        read(str(path))
    assert f"{path} is damaged or no .npz file (" in str(refusal.value)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


def test_a_compressed_npz_is_read_like_another(tmp_path):
    path = write_npz(tmp_path / "some.npz", *random_pictures(30), *random_pictures(7))
    digest = load_images(str(path)).digest
    _rezip(path, DEFLATED)
    assert load_images(str(path)).digest == digest


def test_an_npz_that_says_it_unpacks_to_gigabytes_is_refused(tmp_path):
    path = write_npz(tmp_path / "large.npz", *random_pictures(30), *random_pictures(7))
    _forge(path, 24, "<L", 2**30)
    with pytest.raises(Refusal, match="more than the limit of 1073741824"):
        count_training_images(str(path))


def test_an_npz_that_hides_how_much_it_unpacks_to_is_not_unpacked_further(tmp_path):
    path = write_npz(tmp_path / "bomb.npz", *random_pictures(1000), *random_pictures(7))  # labels of more than a buffer
    with zipfile.ZipFile(path) as archive:
        said = archive.getinfo(LABELS).file_size
    _rezip(path, DEFLATED, lambda labels: labels + bytes(10**8))
    _forge(path, 24, "<L", said)
    tracemalloc.start()
    with pytest.raises(Refusal, match="damaged"):
        count_training_images(str(path))
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_an_npz_with_two_arrays_of_a_name_is_refused(tmp_path):
    path = write_npz(tmp_path / "two.npz", *random_pictures(30), *random_pictures(7))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(LABELS, archive.read(LABELS))
    with pytest.raises(Refusal, match="holds 2 arrays train_labels: it needs one each of"):
        count_training_images(str(path))
