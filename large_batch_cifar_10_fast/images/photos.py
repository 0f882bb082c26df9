"""Read your own photos: a folder per class, with JPEG, PNG and WebP files of any size, as images of 32x32 pixels."""

import hashlib
import os
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from .. import ConfigError, list_some
from ..core.devices import count_cores
from ..core.printing import warn

FORMATS = ("JPEG", "PNG", "WEBP")  # formats that are read, whatever a file's ending is
SIZE = 32  # pixels a side
TEST_SHARE = 0.2  # fraction of each class, if there is no folder of test photos
OTHERS = (".", "@", "__", "lost+found")  # names that begin so are left out: .DS_Store, @eaDir, __MACOSX
Pictures = dict[Path, np.ndarray]  # files and their pictures, uint8 [32, 32, 3]
Classes = dict[str, Pictures]  # the photos of each class, in the order of their names

# ---- The files


def visible(folder: Path) -> list[Path]:
    """Return what is in a folder, in order, without names that begin with OTHERS. Raise OSError."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(OTHERS))


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, and broken links, in order. Raise OSError.

    Leave out names that begin with OTHERS, links to folders, and special files.
    """
    for path in visible(folder):
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
        ImageOps.exif_transpose(picture, in_place=True)
        return np.asarray(ImageOps.fit(as_rgb(picture), (SIZE, SIZE), Image.Resampling.BILINEAR))


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB, on white where it is transparent. `convert` would clip gray pictures of 16 bits."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.convert("RGBA"))
    return white


# ---- The photos


def read_photos(folder: Path, test_folder: Path | None) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file of these photos. Without test photos, a fifth of each class become test photos.

    Raise ConfigError if a class has fewer than two readable photos, or if the folders have other classes.
    """
    train = read_classes(folder)
    test = read_classes(test_folder) if test_folder else split(train)
    if train.keys() != test.keys():
        raise ConfigError(f"only one of the folders has a class {min({*train} ^ {*test})!r}: give it to both")
    arrays = {"class_names": np.array([*train])}
    for part, classes in (("train", train), ("test", test)):
        pictures = [picture for photos in classes.values() for picture in photos.values()]
        arrays[f"{part}_images"] = np.stack(pictures)
        arrays[f"{part}_labels"] = np.repeat(np.arange(len(classes)), [*map(len, classes.values())])
    return arrays


def read_classes(folder: Path) -> Classes:
    """Return the readable photos of each folder in `folder`. Raise ConfigError if classes or photos are too few."""
    folders = [path for path in visible(folder) if path.is_dir()]
    if len(folders) < 2:
        raise ConfigError(f"{folder} has {len(folders)} folders: it needs 2")
    classes: Classes = {}
    for path in folders:
        name = unicodedata.normalize("NFC", path.name)  # file systems write é in one character or in two
        classes.setdefault(name, {}).update(decode([*walk(path)], f"photos of class {name}"))
    for name, photos in classes.items():
        if len(photos) < 2:
            raise ConfigError(f"class {name!r} has {len(photos)} photos that can be read: give 2")
    return classes


def split(classes: Classes) -> Classes:
    """Move a fifth of each class, and at least one photo, out of `classes`; return these test photos.

    The photos of one subfolder, of one video say, are all for training or all for testing. Hashes of the names choose.
    So if photos are added later, few training photos become test photos.
    """
    test = {}
    for name, photos in classes.items():
        root = os.path.commonpath(photos)
        groups = {file: file.relative_to(root).parts[0] for file in photos}
        ranked = sorted({*groups.values()}, key=lambda group: hashlib.sha256(os.fsencode(group)).digest())
        chosen = ranked[: max(1, round(TEST_SHARE * len(ranked)))]
        test[name] = {file: photos.pop(file) for file in sorted(photos) if groups[file] in chosen}
    return test


def decode(files: Sequence[Path], what: str) -> Pictures:
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
