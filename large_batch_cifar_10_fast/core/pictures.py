"""Pictures of one's own: a folder per class, of JPEG, PNG and WebP files of any size, as images of 32x32 pixels.

photos/CLASS/PICTURE          a fifth of each class are test images, always the same
photos/train/CLASS/PICTURE    and photos/test/CLASS/PICTURE
"""

import hashlib
import os
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from .. import ConfigError
from .files import locked, write_atomically
from .team import warn

ENDINGS = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif"}
FORMATS = ("JPEG", "PNG", "WEBP")  # of files that are read, whatever their ending
SIZE = 32  # pixels a side
TEST_SHARE = 0.2  # of each class, if there is no folder of test pictures
MOST_CLASSES = 1000
VERSION = 2  # of what becomes of a picture: another makes the caches anew


class Pictures(NamedTuple):
    """The files of a folder of pictures, and the number of the class of each; not read yet."""

    folder: Path
    classes: list[str]
    train: list[tuple[Path, int]]
    test: list[tuple[Path, int]]


# ---- The files


def has_pictures(folder: Path) -> bool:
    """Return whether a folder, or one in it, has a picture, also of a format that is not read. Raise OSError."""
    folders = [path for level in ("*", "*/*") for path in folder.glob(level) if path.is_symlink() and path.is_dir()]
    return any(path.suffix.lower() in ENDINGS for top in (folder, *folders) for path in walk(top))


def find_pictures(folder: Path) -> Pictures:
    """Return the pictures of a folder, by class. Raise ConfigError if they are no data set."""
    try:
        folders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
        parts = {name: folders[name] for name in ("train", "test") if name in folders}
        if len(parts) == 2:
            train = files_of_classes(parts["train"])
            test = files_of_classes(parts["test"])
        elif parts:
            (one,) = parts
            other = "test" if one == "train" else "train"
            both = f"--data {folder} has a folder {one} and no {other}"
            raise ConfigError(f"{both}: give both, or a folder per class and no class of this name")
        else:
            train, test = split(files_of_classes(folder), folder)
    except OSError as error:
        raise ConfigError(f"--data {error.filename} cannot be read ({error.strerror}): make it readable") from error
    unknown = sorted({*test} - {*train})
    untested = sorted({*train} - {*test})
    if unknown:
        raise ConfigError(f"--data {folder}/test has a class {unknown[0]!r} that train lacks: give both the same")
    if untested:
        raise ConfigError(f"--data {folder}/test has no class {untested[0]!r}, which train has: give it test pictures")
    return Pictures(folder, [*train], numbered(train), numbered(test))


def numbered(classes: dict[str, list[Path]]) -> list[tuple[Path, int]]:
    return [(file, label) for label, name in enumerate(classes) for file in classes[name]]


def files_of_classes(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each class, in the order of names. Raise ConfigError for a class without any."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not 2 <= len(folders) <= MOST_CLASSES:
        found = f"{len(folders)} folder{'s' * (len(folders) != 1)} with pictures of a class"
        raise ConfigError(f"--data {folder} has {found}: give 2 to {MOST_CLASSES}, each named as its class")
    classes = {}
    for path in folders:
        if not path.name.isprintable():
            raise ConfigError(f"--data {folder} has a class {path.name!a}: rename it")
        classes[path.name] = sorted(walk(path))
        if not classes[path.name]:
            raise ConfigError(f"--data {path} has no pictures: add some, or remove the folder")
    return classes


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and the folders in it, and links that lead nowhere. Raise OSError.

    Hidden files, links to folders, and what is no file are left out.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
            elif entry.is_file() or not os.path.exists(entry.path):
                yield Path(entry.path)


def split(classes: dict[str, list[Path]], folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Return training and test pictures: a fifth of each class, and at least one.

    Hashes of their names choose them, so that new pictures make test pictures of few that were trained on.
    """
    train = {}
    test = {}
    for name, files in classes.items():
        if len(files) < 2:
            raise ConfigError(f"--data {folder}/{name} has one picture: give at least two, to train and to test")
        ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
        chosen = {*ranked[: max(1, round(TEST_SHARE * len(files)))]}
        train[name] = [file for file in files if file not in chosen]
        test[name] = [file for file in files if file in chosen]
    return train, test


# ---- The pixels


def read_picture(path: Path | str) -> np.ndarray:
    """Return a picture as uint8 [32, 32, 3] (RGB): its shorter side scaled to 32 pixels, then its middle.

    It is turned as its camera says, and transparent parts become white. Pillow raises nearly anything if it is none, or
    if its header promises more pixels than a picture has.
    """
    with Image.open(path, formats=FORMATS) as picture:
        picture.draft(None, (4 * SIZE, 4 * SIZE))  # a large JPEG is decoded at a fraction of its size, which is fast
        upright = as_rgb(ImageOps.exif_transpose(picture))
        return np.asarray(ImageOps.fit(upright, (SIZE, SIZE), Image.Resampling.BILINEAR))


def as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits, of which `convert` would clip all but the darkest
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def read_pictures(pictures: Pictures, cache: Path | None) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file of these pictures. Raise ConfigError if a class has none that can be read.

    With a folder `cache` they are stored there, and read from there the next time, unless a file changed.
    """
    if not cache:
        return decode_all(pictures)
    stored = cache / f"pictures-{fingerprint(pictures)}.npz"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache):  # one process of a run decodes, the others wait
            found = read_cache(stored)
            if found:
                return found
            arrays = decode_all(pictures)
            with write_atomically(stored) as unfinished, unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            return arrays
    except OSError as error:
        raise ConfigError(f"{stored} cannot be used ({error}): delete it, or choose another --out") from error


def read_cache(stored: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file; none if it is absent or damaged."""
    try:
        with np.load(stored, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return {}


def decode_all(pictures: Pictures) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {"class_names": np.array(pictures.classes)}
    for name, files in (("train", pictures.train), ("test", pictures.test)):
        images, labels = decode(files, f"{name} pictures")
        missing = sorted({*range(len(pictures.classes))} - {*labels})
        if missing:
            lost = f"no {name} picture of class {pictures.classes[missing[0]]!r} can be read"
            raise ConfigError(f"--data {pictures.folder}: {lost}: give others, JPEG, PNG or WebP")
        arrays[f"{name}_images"] = np.stack(images)
        arrays[f"{name}_labels"] = np.array(labels)
    return arrays


def decode(files: Sequence[tuple[Path, int]], what: str) -> tuple[list[np.ndarray], list[int]]:
    """Return images and labels of those files that can be read, and name the others on STDERR."""

    def read_or_say(path: Path) -> np.ndarray | str:
        try:
            return read_picture(path)
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            return f"{path} ({str(error) or type(error).__name__})"

    cores = len(os.sched_getaffinity(0))
    # Pillow decodes without Python's lock. It also warns of much that does not matter at this size.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(cores) as pool:
        found = pool.map(read_or_say, [path for path, _ in files])
        results = list(tqdm(found, what, len(files), disable=None, leave=False))
    broken = [result for result in results if isinstance(result, str)]
    if broken:
        more = f", and {len(broken) - 3} more" if len(broken) > 3 else ""
        warn(f"{len(broken)} of {len(files)} {what} cannot be read: {', '.join(broken[:3])}{more}")
    kept = [(result, label) for result, (_, label) in zip(results, files, strict=True) if not isinstance(result, str)]
    return [image for image, _ in kept], [label for _, label in kept]


def fingerprint(pictures: Pictures) -> str:
    """Return a name of the files: it changes if one is added, removed or written to."""
    total = hashlib.sha256(f"{VERSION} {pictures.folder.resolve()} {pictures.classes}".encode())
    for path, label in [*pictures.train, *pictures.test]:
        state = path.stat() if path.exists() else None  # a link may lead nowhere
        total.update(f"{path} {label} {state and (state.st_size, state.st_mtime_ns)}".encode(errors="surrogateescape"))
    return total.hexdigest()[:12]
