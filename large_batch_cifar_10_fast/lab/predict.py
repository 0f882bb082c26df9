"""Say what pictures show, by weights that --save wrote.

    cifar10-fast predict weights.pt cat.jpg dog.png

A line for each picture: its file, and the three most probable classes with their probabilities. A picture of any size
is scaled to 32x32 pixels as photos are for training.

Exit status: 0, 1 if some pictures cannot be read, or 2 if none can.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from .. import ConfigError
from ..images.photos import decode
from .model import load
from .options import command_parser

MOST = 3  # classes of a line


def describe(probabilities: Tensor, classes: Sequence[str]) -> str:
    """Return the most probable classes of a picture with their probabilities, from those of all [C]."""
    values, labels = probabilities.topk(min(MOST, len(classes)))
    return ", ".join(f"{classes[int(label)]} {value:.3f}" for value, label in zip(values, labels, strict=True))


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PICTURE", help="JPEG, PNG or WebP")
    parser.add_argument("--program", default="", help="FILE.py of a program of your own")
    options = parser.parse_args(arguments)
    model = load(options.weights, options.program)
    images = decode(options.pictures, "pictures")
    if not images:
        raise ConfigError("no picture can be read: give JPEG, PNG or WebP")
    readable = [path for path in options.pictures if path in images]
    probabilities = model.predict(np.stack([images[path] for path in readable]))
    for path, of_picture in zip(readable, probabilities, strict=True):
        print(f"{path}: {describe(of_picture, model.classes)}")
    return int(len(readable) < len(options.pictures))
