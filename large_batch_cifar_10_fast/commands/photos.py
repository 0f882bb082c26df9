"""Make a .npz file of photos for `--data`: images of 32x32 pixels, with their folders' names as classes.

    cifar10-fast photos FOLDER photos.npz --test TEST_FOLDER

FOLDER has a folder of photos for each class, and so has TEST_FOLDER. Without --test, a fifth of each class become test
images, always the same ones. Photos are JPEG, PNG and WebP files of any size. Files and folders whose names begin with
a dot, @ or __ are left out. The command does not change FOLDER.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import list_some
from ..files import write_atomically
from ..images.photos import OTHERS, count_left_out, read_photos
from ..lab.options import read_options


@dataclass(frozen=True)
class Command:
    """Where photos are."""

    folder: Path  # a folder of photos for each class
    file: Path  # FILE.npz
    test: str = ""  # folder of the test photos


def main(arguments: Sequence[str]) -> None:
    options = read_options(Command, __doc__, arguments)
    test = Path(options.test) if options.test else None
    arrays = read_photos(options.folder, test)
    file = options.file.with_suffix(".npz")
    with write_atomically(file.resolve()) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    names = arrays["class_names"].tolist()
    counts = f"{len(arrays['train_images'])} training and {len(arrays['test_images'])} test images"
    print(f"{file}: {counts} of {len(names)} classes: {list_some(names, 10)}")
    left_out = count_left_out(options.folder) + (count_left_out(test) if test else 0)
    if left_out:
        print(f"left out: {left_out} files or folders whose names begin with {' '.join(OTHERS)}")
