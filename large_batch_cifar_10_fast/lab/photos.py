"""Make a .npz file of photos for `--data`: images of 32x32 pixels, with their folders' names as classes.

    cifar10-fast photos FOLDER photos.npz

If FOLDER has photos as CLASS/PHOTO, a fifth of each class become test images, always the same ones. Or it has parts:
train/CLASS/PHOTO and test/CLASS/PHOTO (or training, testing, val). Photos are JPEG, PNG and WebP files of any size. The
command does not change FOLDER.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .. import ConfigError, list_some
from ..files import write_atomically
from ..images.photos import SIZE, find_photos, read_photos
from .options import command_parser


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("file", type=Path, metavar="FILE.npz")
    options = parser.parse_args(arguments)
    file = options.file.resolve()
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder: name one with a folder of photos for each class")
    if file.suffix != ".npz":
        raise ConfigError(f"{options.file} does not end with .npz: choose a name that does")
    if not file.parent.is_dir() or file.is_relative_to(options.folder.resolve()):
        raise ConfigError(f"{options.file} cannot be written there: choose a folder that exists, outside of the photos")
    train, test = find_photos(options.folder)
    needed = sum(map(len, (*train.values(), *test.values()))) * SIZE**2 * 3  # bytes, at most
    free = shutil.disk_usage(file.parent).free
    if needed > free:
        room = f"its disk has {free / 1e6:.0f} MB free, the images take up to {needed / 1e6:.0f} MB"
        raise ConfigError(f"{options.file} cannot be written ({room}): make room, or choose another disk")
    arrays = read_photos(train, test)
    try:
        with write_atomically(file) as unfinished, unfinished.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
    except OSError as error:
        raise ConfigError(f"{options.file} cannot be written ({error.strerror}): choose another") from error
    names = arrays["class_names"].tolist()
    counts = f"{len(arrays['train_images'])} training and {len(arrays['test_images'])} test images"
    print(f"{options.file}: {counts} of {len(names)} classes: {list_some(names, 10)}")
