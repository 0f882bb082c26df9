"""Images in a .npz file. It may come from anywhere: nothing is unpacked before its sizes are found right."""

import contextlib
import math
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..settings.settings import Refusal

PARTS = ("train", "test")
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
LIMIT = 2**30  # bytes, unpacked; CIFAR-10 has 185 MB
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes; of the others zipfile unpacks without bound


def count_npz(path: Path) -> int:
    """How many training images there are. Labels are read, the images' bytes stay on disk; raises Refusal."""
    with _opened(path) as archive:
        train, _ = (_read_labels(path, archive, part) for part in PARTS)
        return len(train)


def read_npz(path: Path) -> list[np.ndarray]:
    """The arrays in the order of ARRAYS: images uint8 [N, 32, 32, 3], labels int64 [N]; raises Refusal."""
    with _opened(path) as archive:
        return [
            array
            for part in PARTS
            for array in (_read_array(archive, f"{part}_images"), _read_labels(path, archive, part))
        ]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, its headers found right. Whatever fails in reading it is a Refusal."""
    try:
        if not path.is_file():
            raise Refusal(f"--data {path}: no such file")
        with zipfile.ZipFile(path) as archive:
            _check_headers(path, archive)
            yield archive
    except Refusal:
        raise
    except Exception as error:  # zipfile, zlib, ast and NumPy: a crafted file makes them raise nearly anything
        reason = textwrap.shorten(str(error) or type(error).__name__, 200)
        raise Refusal(f"--data {path} is damaged or no .npz file ({reason}): make or copy it again") from error


def _check_headers(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise Refusal, or ValueError where the file contradicts itself; at most 64 KB of an array are unpacked."""
    names = archive.namelist()
    for name in ARRAYS:
        if (count := names.count(f"{name}.npy")) != 1:
            raise Refusal(f"--data {path} holds {count} arrays {name}: it needs one each of {', '.join(ARRAYS)}")
    total = sum(archive.getinfo(f"{name}.npy").file_size for name in ARRAYS)
    if total > LIMIT:
        raise Refusal(f"--data {path} unpacks to {total} bytes, more than the limit of {LIMIT}: use fewer images")
    headers = {name: _checked_header(archive, name) for name in ARRAYS}
    for part in PARTS:
        shape, kind = headers[f"{part}_images"]
        if kind != np.uint8 or shape[1:] != (32, 32, 3) or shape[0] < 1:
            raise Refusal(f"--data {path}: {part}_images is {kind} {list(shape)}, not uint8 [N, 32, 32, 3]")
        labels_shape, labels_kind = headers[f"{part}_labels"]
        if labels_kind.kind not in "iu" or labels_shape != shape[:1]:
            raise Refusal(
                f"--data {path}: {part}_labels is {labels_kind} {list(labels_shape)}, not whole numbers [{shape[0]}]"
            )


def _checked_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in BOUNDED:
        raise ValueError(f"{name} is compressed in another way than NumPy's")
    with archive.open(info) as file:
        if np.lib.format.read_magic(file) != (1, 0):  # a later version's header may have gigabytes
            raise ValueError(f"{name} is not in version 1.0 of NumPy's format")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        expected = file.tell() + math.prod(shape) * kind.itemsize
    if not kind.hasobject and expected != info.file_size:
        raise ValueError(f"{name} has {info.file_size} bytes, {expected} by its header")
    return shape, kind


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """In NumPy's small pieces: ZipFile.read unpacks 2 GB before it looks at the size in the directory."""
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_labels(path: Path, archive: zipfile.ZipFile, part: str) -> np.ndarray:
    labels = _read_array(archive, f"{part}_labels")
    if labels.min() < 0 or labels.max() > 9:
        raise Refusal(f"--data {path}: {part}_labels holds {labels.min()} to {labels.max()}, outside 0 to 9")
    return labels.astype(np.int64)
