"""The Python interface: train as the command line does; load weights, evaluate them, predict with them.

from large_batch_cifar_10_fast import api
runs = api.train("muon", runs=5, data="cifar10.npz", save="weights.pt")
probabilities = api.load("weights.pt").predict(api.read_picture("cat.jpg"))
"""

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .core.devices import take_device
from .core.machine import Machine
from .core.score import Score
from .images.cifar import DATA
from .images.load import load_images
from .images.photos import read_picture
from .lab.conduct import run_program
from .lab.model import Classifier, load, score, test_images
from .lab.options import as_words
from .lab.program import load_program
from .lab.table import NUMBERS

__all__ = ["Classifier", "Machine", "evaluate", "load", "load_images", "read_picture", "train"]


def train(recipe: Path | str = "apple2019", **options: Any) -> pd.DataFrame:
    """Train in this process with options of the command line; return the rows of its runs, as in runs.tsv.

    Afterwards torch's random numbers on the CPU and its settings of cuDNN are those of before.

    `recipe` is a name, or FILE.py. Raise ConfigError for invalid options.
    """
    with torch.random.fork_rng([]), torch.backends.cudnn.flags(enabled=True):
        rows = run_program(load_program(str(recipe)), ["--recipe", str(recipe), *as_words(options)])
    table = pd.DataFrame(rows, columns=None if rows else NUMBERS)  # none if other launches made them
    table[[*NUMBERS]] = table[[*NUMBERS]].apply(pd.to_numeric)
    return table


def evaluate(weights: Path | str, data: str = str(DATA), device: str = "", program: Path | str = "") -> Score:
    """Return the score of saved weights on the test images of `data`, in float32, with the views of the last epoch.

    The loss is that of the program.
    """
    model = load(weights, program).to(take_device(device))
    images, labels = test_images(model, data)
    return score(model, model.logits(images), labels)
