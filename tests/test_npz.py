"""Images in .npz files: read as they are, and refused in one line whatever is wrong with them."""

import hashlib

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
    assert loaded.digest() == hashlib.sha256(flat).hexdigest()[:12]


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
    path = write_npz(
        tmp_path / "evil.npz", np.array([print], dtype=object), *random_pictures(4)[1:], *random_pictures(4)
    )
    with pytest.raises(Refusal):
        load_images(str(path))
