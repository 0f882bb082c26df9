"""Say what pictures show, by weights that --save wrote.

    cifar10-fast predict weights.pt cat.jpg dog.png FOLDER --csv table.csv

A line for each picture, also of a folder: its file, and the three most probable classes with their probabilities. A
picture of any size is scaled to 32x32 pixels as photos are for training.

Exit status: 0, 1 if some pictures cannot be read, or 2 if none can.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from .. import ConfigError
from ..files import write_atomically
from ..images.photos import decode, walk
from .model import load
from .options import command_parser

MOST = 3  # classes of a line


def find_pictures(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and those in these folders. Raise ConfigError for a folder that cannot be read."""
    found = []
    try:
        for path in paths:
            found += sorted(walk(path)) if path.is_dir() else [path]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    return found


def check_table(path: Path) -> None:
    """Raise ConfigError if a table could not be written, before anything takes time."""
    if path.suffix.lower() != ".csv" or path.is_dir():
        raise ConfigError(f"--csv {path} is no name of a .csv file: choose one that is, to overwrite nothing else")
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ConfigError(f"--csv {path} cannot be written ({error.strerror}): choose another") from error


def write_table(path: Path, files: Sequence[Path], probabilities: Tensor, classes: Sequence[str]) -> None:
    """Write the most probable classes of all files, from probabilities [n, C]. Raise ConfigError."""
    most = probabilities.topk(min(MOST, len(classes)))
    columns: dict[str, list] = {"file": [str(file) for file in files]}
    for place, (values, labels) in enumerate(zip(most.values.T, most.indices.T, strict=True), 1):
        columns[f"class_{place}"] = [classes[label] for label in labels.tolist()]
        columns[f"probability_{place}"] = values.tolist()
    table = pd.DataFrame(columns)
    try:
        with write_atomically(path.resolve()) as unfinished:
            # The mark at the beginning lets Excel read UTF-8. A file's name may be no text.
            table.to_csv(unfinished, index=False, float_format="%.4f", encoding="utf-8-sig", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--csv {path} cannot be written ({error.strerror}): choose another") from error


def describe(probabilities: Tensor, classes: Sequence[str]) -> str:
    """Return the most probable classes of a picture with their probabilities, from those of all [C]."""
    values, labels = probabilities.topk(min(MOST, len(classes)))
    return ", ".join(f"{classes[int(label)]} {value:.3f}" for value, label in zip(values, labels, strict=True))


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PICTURE", help="JPEG, PNG or WebP, or a folder")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="file for a table of the same classes")
    parser.add_argument("--program", default="", help="FILE.py of a program of your own")
    options = parser.parse_args(arguments)
    if options.csv:
        check_table(options.csv)
    pictures = find_pictures(options.pictures)
    model = load(options.weights, options.program)
    images = decode(pictures, "pictures")
    if not images:
        raise ConfigError("no picture can be read: give JPEG, PNG or WebP")
    readable = [path for path in pictures if path in images]
    probabilities = model.predict(np.stack([images[path] for path in readable]))
    if options.csv:
        write_table(options.csv, readable, probabilities, model.classes)
    for path, of_picture in zip(readable, probabilities, strict=True):
        print(f"{path}: {describe(of_picture, model.classes)}")
    return int(len(readable) < len(pictures))
