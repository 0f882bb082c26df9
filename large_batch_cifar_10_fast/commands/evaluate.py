"""Test saved weights: accuracy of each class, and the most frequent confusions.

    cifar10-fast evaluate weights.pt --data photos.npz

It predicts all test images of --data in float32, with the test-time augmentation of the recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from ..core.devices import take_device
from ..images.cifar import DATA
from ..lab.model import load, score, test_images
from ..lab.options import read_options
from ..lab.statistics import in_columns, wilson

MOST = 5  # that are named


def as_table(answers: pd.DataFrame) -> str:
    """Return lines for all images and for each class with accuracy and interval, from columns `label` and `answer`."""
    lines = [("class", "images", "accuracy", "99% interval")]
    is_right = answers["label"] == answers["answer"]
    for name, right in [("all", is_right), *is_right.groupby(answers["label"], sort=False)]:
        low, high = wilson(int(right.sum()), len(right))
        lines.append((name, str(len(right)), f"{right.mean():.4f}", f"[{low:.4f}, {high:.4f}]"))
    return in_columns(lines)


def confusions(answers: pd.DataFrame) -> list[str]:
    """Return the most frequent confusions as texts, most frequent first."""
    totals = answers["label"].value_counts()
    wrong = answers[answers["label"] != answers["answer"]].value_counts()[:MOST]
    return [f"{label} taken for {answer}: {n} of {totals[label]}" for (label, answer), n in wrong.items()]


@dataclass(frozen=True)
class Command:
    """What to test, and where."""

    weights: str  # file that --save wrote
    data: str = str(DATA)  # images, see train
    device: Literal["", "cuda", "cpu"] = ""  # default: a GPU if there is one
    program: str = ""  # FILE.py of a program of your own


def main(arguments: Sequence[str]) -> None:
    options = read_options(Command, __doc__, arguments)
    model = load(options.weights, options.program).to(take_device(options.device))
    images, labels = test_images(model, options.data)
    logits = model.logits(images).cpu()
    found = score(model, logits, labels)
    print(f"accuracy {found.accuracy:.4f} ({found.correct} of {found.images} images), loss {found.loss:.3f}")
    order = labels.argsort(stable=True)
    columns = {"label": labels[order], "answer": logits.argmax(1)[order]}
    answers = pd.DataFrame({name: [model.classes[index] for index in column] for name, column in columns.items()})
    print(as_table(answers))
    for text in confusions(answers):
        print(text)
