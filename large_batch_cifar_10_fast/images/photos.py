"""Read your own photos: a folder per class, with JPEG, PNG and WebP files of any size, as images of 32x32 pixels.

photos/CLASS/PHOTO          a fifth of each class are test images, always the same
photos/train/CLASS/PHOTO    and photos/test/CLASS/PHOTO, or photos/val/CLASS/PHOTO
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from .. import ConfigError, list_some
from ..core.devices import count_cores
from ..core.team import warn

FORMATS = ("JPEG", "PNG", "WEBP")  # of files that are read, whatever their ending
SIZE = 32  # pixels a side
TEST_SHARE = 0.2  # of each class, if there is no folder of test photos
MOST_CLASSES = 1000
PARTS = {"train": "training", "training": "training", "seg_train": "training"}  # by names of folders, in lower case
PARTS |= {"test": "test", "testing": "test", "seg_test": "test"}
PARTS |= {"val": "validation", "valid": "validation", "validation": "validation"}
Classes = dict[str, list[Path]]  # the files of each class, in the order of their names
Pictures = dict[str, dict[Path, np.ndarray]]  # the pictures of each class, by their files

# ---- The files


def find_photos(folder: Path) -> tuple[Classes, Classes]:
    """Return the files of the training and test photos of a folder. Without such parts, all are training photos.

    Raise ConfigError if they are not a data set.
    """
    try:
        parts = find_parts(folder)
        if not parts:
            classes = files_of_classes(folder)
            check_no_parts([folder / name for name in classes])
            return classes, {}
        train, test = map(files_of_classes, parts)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    unmatched = sorted({*train} ^ {*test})
    if unmatched:
        has, lacks = parts if unmatched[0] in train else reversed(parts)
        raise ConfigError(f"{lacks} has no class {unmatched[0]!r}, which {has.name} has: give both the same classes")
    return train, test


def find_parts(folder: Path) -> tuple[Path, Path] | None:
    """Return the folders of training and test photos, or None if no folder has such a name.

    Without test photos, use validation photos. Raise ConfigError if a part is missing or occurs twice.
    """
    found: dict[str, Path] = {}
    for path in visible(folder):
        part = PARTS.get(path.name.lower())
        if not part or not path.is_dir():
            continue
        if part in found:
            two = f"{found[part].name} and {path.name}"
            raise ConfigError(f"{folder} has two folders of {part} photos, {two}: give one")
        is_doubled = visible(path) == [path / path.name]  # seg_train/seg_train, as Intel's scenes are unpacked
        found[part] = path / path.name if is_doubled else path
    if not found:
        return None
    test = found.get("test") or found.get("validation")
    if "training" not in found or not test:
        one = next(iter(found.values())).name
        other = "test" if "training" in found else "train"
        raise ConfigError(f"{folder} has a folder {one} and no {other}: add it, or rename {one} if it is a class")
    if len(found) == 3:
        warn(f"{found['validation']} is not read: {test.name} has the test photos")
    return found["training"], test


def check_no_parts(folders: Sequence[Path]) -> None:
    """Raise ConfigError if these folders look like parts of a data set: all have the same folders, and no files."""
    names = [[path.name for path in visible(folder)] for folder in folders]
    has_folders = all(path.is_dir() for path in visible(folders[0]))
    if has_folders and len(names[0]) > 1 and all(each == names[0] for each in names):
        alike = f"{folders[0]} and {folders[1].name} have the same folders, {list_some(names[0], 3)}"
        advice = "name them train and test, or put each class's photos right into its folder"
        raise ConfigError(f"{alike}: they look like parts, not classes: {advice}")


def visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def files_of_classes(folder: Path) -> Classes:
    """Return the files of each class. Raise ConfigError for a class without any."""
    folders = [path for path in visible(folder) if path.is_dir()]
    if not 2 <= len(folders) <= MOST_CLASSES:
        found = f"{len(folders)} folder{'s' * (len(folders) != 1)} with photos of a class"
        raise ConfigError(f"{folder} has {found}: give 2 to {MOST_CLASSES}, each with the name of its class")
    classes = {}
    for path in folders:
        if not path.name.isprintable():
            raise ConfigError(f"{folder} has a class {path.name!a} with unprintable characters: rename it")
        classes[path.name] = sorted(walk(path))
        if not classes[path.name]:
            raise ConfigError(f"{path} has no photos: add some, or remove the folder")
    return classes


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, and broken links. Raise OSError.

    Leave out hidden files, links to folders, and special files.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
            elif entry.is_file() or not os.path.exists(entry.path):
                yield Path(entry.path)


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
    """Return a picture in RGB, on white where it is transparent.

    Gray pictures of 16 bits are scaled by their range, because `convert` would clip them. Microscopes and scanners
    write 8 or 12 bits to such files; without this scale they would be almost black.
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


def read_photos(train: Classes, test: Classes) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file of these photos. Without test photos, a fifth of each class become test photos.

    Raise ConfigError if a class has too few readable photos.
    """
    if test:
        parts = {"train": read_classes(train, "train photos"), "test": read_classes(test, "test photos")}
    else:
        parts = split(read_classes(train, "photos"))
    arrays = {"class_names": np.array([*train])}
    for part, classes in parts.items():
        counts = [len(images) for images in classes.values()]
        arrays[f"{part}_images"] = np.stack([image for images in classes.values() for image in images.values()])
        arrays[f"{part}_labels"] = np.repeat(np.arange(len(counts)), counts)
    return arrays


def read_classes(classes: Classes, what: str) -> Pictures:
    """Return the pictures of each class. Raise ConfigError if it has none that can be read."""
    images = decode([file for files in classes.values() for file in files], what)
    found = {}
    for name, files in classes.items():
        found[name] = {file: images[file] for file in files if file in images}
        if not found[name]:
            raise ConfigError(f"class {name!r} has no {what} that can be read: add JPEG, PNG or WebP files")
    return found


def split(classes: Pictures) -> dict[str, Pictures]:
    """Return training and test pictures. A fifth of each class, and at least one picture, are test pictures.

    Hashes of the names choose them. So if photos are added later, few training photos become test photos.
    """
    train = {}
    test = {}
    for name, images in classes.items():
        if len(images) < 2:
            raise ConfigError(f"class {name!r} has one photo that can be read: give two or more, to train and to test")
        ranked = sorted(images, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
        chosen = {*ranked[: max(1, round(TEST_SHARE * len(images)))]}
        train[name] = {file: image for file, image in images.items() if file not in chosen}
        test[name] = {file: image for file, image in images.items() if file in chosen}
    return {"train": train, "test": test}


def decode(files: Sequence[Path], what: str) -> dict[Path, np.ndarray]:
    """Return the pictures of the readable files. Warn of the others."""

    def read_or_say(path: Path) -> np.ndarray | str:
        try:
            return read_picture(path)
        except UnidentifiedImageError:
            return f"{path} (not JPEG, PNG or WebP)"
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            return f"{path} ({str(error) or type(error).__name__})"

    # Pillow decodes without Python's lock. It also warns of much that does not matter at this size.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(count_cores()) as pool:
        results = list(tqdm(pool.map(read_or_say, files), what, len(files), disable=None, leave=False))
    broken = [result for result in results if isinstance(result, str)]
    if broken:
        warn(f"{len(broken)} of {len(files)} files cannot be read as {what}: {list_some(broken, 3)}")
    pairs = zip(files, results, strict=True)
    return {file: result for file, result in pairs if not isinstance(result, str)}
