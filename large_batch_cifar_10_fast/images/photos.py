"""Photos of one's own: a folder per class, of JPEG, PNG and WebP files of any size, as images of 32x32 pixels.

photos/CLASS/PHOTO          a fifth of each class are test images, always the same
photos/train/CLASS/PHOTO    and photos/test/CLASS/PHOTO
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from .. import ConfigError
from ..core.devices import count_cores
from ..core.team import warn

FORMATS = ("JPEG", "PNG", "WEBP")  # of files that are read, whatever their ending
SIZE = 32  # pixels a side
TEST_SHARE = 0.2  # of each class, if there is no folder of test photos
MOST_CLASSES = 1000
Classes = dict[str, list[Path]]  # the files of each class, in the order of their names

# ---- The files


def find_photos(folder: Path) -> tuple[Classes, Classes]:
    """Return the training and test photos of a folder. Raise ConfigError if they are no data set."""
    try:
        folders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
        parts = {name: folders[name] for name in ("train", "test") if name in folders}
        if len(parts) == 1:
            (one,) = parts
            other = "test" if one == "train" else "train"
            both = f"{folder} has a folder {one} and no {other}"
            raise ConfigError(f"{both}: give both, or a folder per class and no class of this name")
        if not parts:
            return split(files_of_classes(folder), folder)
        train = files_of_classes(parts["train"])
        test = files_of_classes(parts["test"])
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    unknown = sorted({*test} - {*train})
    untested = sorted({*train} - {*test})
    if unknown:
        raise ConfigError(f"{folder}/test has a class {unknown[0]!r} that train lacks: give both the same")
    if untested:
        raise ConfigError(f"{folder}/test has no class {untested[0]!r}, which train has: give it test photos")
    return train, test


def files_of_classes(folder: Path) -> Classes:
    """Return the files of each class. Raise ConfigError for a class without any."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not 2 <= len(folders) <= MOST_CLASSES:
        found = f"{len(folders)} folder{'s' * (len(folders) != 1)} with photos of a class"
        raise ConfigError(f"{folder} has {found}: give 2 to {MOST_CLASSES}, each named as its class")
    classes = {}
    for path in folders:
        if not path.name.isprintable():
            raise ConfigError(f"{folder} has a class {path.name!a}: rename it")
        classes[path.name] = sorted(walk(path))
        if not classes[path.name]:
            raise ConfigError(f"{path} has no photos: add some, or remove the folder")
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


def split(classes: Classes, folder: Path) -> tuple[Classes, Classes]:
    """Return training and test photos: a fifth of each class, and at least one.

    Hashes of their names choose them, so that new photos make test photos of few that were trained on.
    """
    train = {}
    test = {}
    for name, files in classes.items():
        if len(files) < 2:
            raise ConfigError(f"{folder}/{name} has one photo: give at least two, to train and to test")
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
    """Return a picture in RGB, on white where it is transparent.

    Gray pictures of 16 bits, which `convert` would clip, are scaled by their range: microscopes and scanners write 8 or
    12 bits to such files, which would be almost black.
    """
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        shift = 8
        if values.max() < 2**12:
            shift = 4
        if values.max() < 2**8:
            shift = 0
        picture = Image.fromarray((values >> shift).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def read_photos(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file of a folder's photos. Raise ConfigError if a class has none that can be read."""
    train, test = find_photos(folder)
    names = [*train]
    arrays = {"class_names": np.array(names)}
    for part, classes in (("train", train), ("test", test)):
        files = [(file, label) for label, name in enumerate(names) for file in classes[name]]
        images, labels = decode(files, f"{part} photos")
        missing = sorted({*range(len(names))} - {*labels})
        if missing:
            lost = f"no {part} photo of class {names[missing[0]]!r} can be read"
            raise ConfigError(f"{folder}: {lost}: give others, JPEG, PNG or WebP")
        arrays[f"{part}_images"] = np.stack(images)
        arrays[f"{part}_labels"] = np.array(labels)
    return arrays


def decode(files: Sequence[tuple[Path, int]], what: str) -> tuple[list[np.ndarray], list[int]]:
    """Return images and labels of those files that can be read, and name the others on STDERR."""

    def read_or_say(path: Path) -> np.ndarray | str:
        try:
            return read_picture(path)
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            return f"{path} ({str(error) or type(error).__name__})"

    # Pillow decodes without Python's lock. It also warns of much that does not matter at this size.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(count_cores()) as pool:
        found = pool.map(read_or_say, [path for path, _ in files])
        results = list(tqdm(found, what, len(files), disable=None, leave=False))
    broken = [result for result in results if isinstance(result, str)]
    if broken:
        more = f", and {len(broken) - 3} more" if len(broken) > 3 else ""
        warn(f"{len(broken)} of {len(files)} {what} cannot be read: {', '.join(broken[:3])}{more}")
    kept = [(result, label) for result, (_, label) in zip(results, files, strict=True) if not isinstance(result, str)]
    return [image for image, _ in kept], [label for _, label in kept]
