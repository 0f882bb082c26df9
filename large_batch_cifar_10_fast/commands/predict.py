"""Predict the classes of pictures with saved weights.

    cifar10-fast predict weights.pt cat.jpg dog.png FOLDER --csv table.csv

The command prints a line for each picture: the file, and the three most probable classes with their probabilities. It
reads all pictures in a folder. Pictures of any size are scaled to 32x32 pixels, like photos for training.

Exit status: 0 all pictures are read, 1 some cannot be read, 2 none can be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from .. import ConfigError
from ..images.photos import decode, walk
from ..lab.model import load
from ..lab.options import read_options

MOST = 3  # classes of a line


def find_pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the files among these paths, and all files in the folders among them. Raise OSError."""
    found: list[Path] = []
    for path in paths:
        found += walk(path) if path.is_dir() else [path]
    return found


def most_probable(files: Sequence[Path], probabilities: Tensor, classes: Sequence[str]) -> pd.DataFrame:
    """Return the most probable classes of each file, from probabilities [n, C]."""
    values, labels = probabilities.topk(min(MOST, len(classes)))
    table = pd.DataFrame({"file": [*map(str, files)]})
    for index in range(labels.shape[1]):
        table[f"class_{index + 1}"] = [classes[label] for label in labels[:, index]]
        table[f"probability_{index + 1}"] = values[:, index].numpy()
    return table


@dataclass(frozen=True)
class Command:
    """What to predict."""

    weights: str  # file that --save wrote
    pictures: tuple[Path, ...]  # JPEG, PNG or WebP, or folders
    csv: str = ""  # FILE.csv: also write the classes to a table
    program: str = ""  # FILE.py of a program of your own


def main(arguments: Sequence[str]) -> int:
    options = read_options(Command, __doc__, arguments)
    pictures = find_pictures(options.pictures)
    model = load(options.weights, options.program)
    images = decode(pictures, "pictures")
    if not images:
        raise ConfigError("no picture can be read: give JPEG, PNG or WebP")
    readable = [path for path in pictures if path in images]
    probabilities = model.predict(np.stack([images[path] for path in readable]))
    found = most_probable(readable, probabilities, model.classes)
    if options.csv:  # marked as UTF-8 for Excel
        found.to_csv(options.csv, index=False, float_format="%.4f", encoding="utf-8-sig", errors="backslashreplace")
    for file, *rest in found.itertuples(index=False):
        pairs = zip(rest[::2], rest[1::2], strict=True)
        print(f"{file}: " + ", ".join(f"{name} {value:.3f}" for name, value in pairs))
    return int(len(readable) < len(pictures))
