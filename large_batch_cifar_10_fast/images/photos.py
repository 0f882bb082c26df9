"""Read your own photos: a folder per class, with JPEG, PNG and WebP files of any size, as images of 32x32 pixels."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from .. import ConfigError, list_some
from ..core.devices import count_cores
from ..core.printing import warn

FORMATS = ("JPEG", "PNG", "WEBP")  # of files that are read, whatever their ending
SIZE = 32  # pixels a side
TEST_SHARE = 0.2  # of each class, if there is no folder of test photos
OTHERS = (".", "@", "__")  # names of files and folders that begin so are left out: .DS_Store, @eaDir, __MACOSX
Classes = dict[str, list[Path]]  # the files of each class, in the order of their names

# ---- The files


def find_photos(folder: Path) -> Classes:
    """Return the files of each class: of each folder in `folder`. Raise ConfigError for fewer than two."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(OTHERS))
    if len(names) < 2:
        raise ConfigError(f"{folder} has {len(names)} folders: it needs one for each class")
    return {name: [*walk(folder / name)] for name in names}


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, and broken links, in order. Raise OSError.

    Leave out names that begin with OTHERS, links to folders, and special files.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith(OTHERS):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        elif path.is_file() or not path.exists():
            yield path


def count_left_out(folder: Path) -> int:
    return sum(path.name.startswith(OTHERS) for path in folder.rglob("*"))


# ---- The pixels


def read_picture(path: Path | str) -> np.ndarray:
    """Return a picture as uint8 [32, 32, 3] (RGB): its shorter side scaled to 32 pixels, then its middle.

    It is rotated by its EXIF orientation, and transparent parts become white. For a damaged or huge file, Pillow raises
    nearly any exception.
    """
    with Image.open(path, formats=FORMATS) as picture:
        picture.draft(None, (4 * SIZE, 4 * SIZE))  # a large JPEG is decoded at a fraction of its size, which is fast
        upright = as_rgb(ImageOps.exif_transpose(picture))
        return np.asarray(ImageOps.fit(upright, (SIZE, SIZE), Image.Resampling.BILINEAR))


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB, on white where it is transparent. `convert` would clip gray pictures of 16 bits."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def read_photos(train: Classes, test: Classes) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file of these photos. Without test photos, a fifth of each class become test photos.

    Raise ConfigError if a class has too few readable photos, or if training and test photos have other classes.
    """
    if test and train.keys() != test.keys():
        raise ConfigError(f"only one of the folders has a class {min({*train} ^ {*test})!r}: give it to both")
    pictures = decode([file for classes in (train, test) for files in classes.values() for file in files], "photos")
    least = 1 if test else 2
    kept = readable(train, pictures, least)
    parts = {"train": kept, "test": readable(test, pictures, least)} if test else split(kept)
    arrays = {"class_names": np.array([*train])}
    for part, classes in parts.items():
        counts = [len(files) for files in classes.values()]
        arrays[f"{part}_images"] = np.stack([pictures[file] for files in classes.values() for file in files])
        arrays[f"{part}_labels"] = np.repeat(np.arange(len(counts)), counts)
    return arrays


def readable(classes: Classes, pictures: Mapping[Path, np.ndarray], least: int) -> Classes:
    """Return the files of each class that were read. Raise ConfigError if a class has fewer than `least`."""
    found = {name: [file for file in files if file in pictures] for name, files in classes.items()}
    for name, files in found.items():
        if len(files) < least:
            raise ConfigError(f"class {name!r} has {len(files)} photos that can be read: give two or more")
    return found


def split(classes: Classes) -> dict[str, Classes]:
    """Return training and test photos. A fifth of each class, and at least one photo, are test photos.

    Hashes of the names choose them. So if photos are added later, few training photos become test photos.
    """
    train = {}
    test = {}
    for name, files in classes.items():
        ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
        chosen = {*ranked[: max(1, round(TEST_SHARE * len(files)))]}
        train[name] = [file for file in files if file not in chosen]
        test[name] = [file for file in files if file in chosen]
    return {"train": train, "test": test}


def decode(files: Sequence[Path], what: str) -> dict[Path, np.ndarray]:
    """Return the pictures of the readable files. Warn of the others."""

    def read_or_say(path: Path) -> np.ndarray | str:
        try:
            return read_picture(path)
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            return f"{path} ({error!r})"

    # Pillow decodes without Python's lock. It also warns of much that does not matter at this size.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(count_cores()) as pool:
        results = list(tqdm(pool.map(read_or_say, files), what, len(files), disable=None, leave=False))
    broken = [result for result in results if isinstance(result, str)]
    if broken:
        warn(f"{len(broken)} of {len(files)} files cannot be read as {what}: {list_some(broken, 3)}")
    return {file: result for file, result in zip(files, results, strict=True) if not isinstance(result, str)}
