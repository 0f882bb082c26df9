"""Test saved weights: accuracy of each class, and the most frequent confusions.

    cifar10-fast evaluate weights.pt --data photos.npz

It predicts all test images of --data in float32, with the test-time augmentation of the recipe.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.devices import take_device
from ..images.cifar import DATA
from ..lab.model import load, score, test_images
from ..lab.options import command_parser
from ..lab.statistics import in_columns, wilson

MOST_CONFUSIONS = 5  # that are named


def count_confusions(labels: Tensor, answers: Tensor, classes: int) -> Tensor:
    """Return how many images of class i were taken for class j: int64 [classes, classes]."""
    return torch.bincount(labels * classes + answers, minlength=classes**2).view(classes, classes)


def largest_confusions(counts: Tensor, classes: Sequence[str]) -> list[str]:
    """Return texts of the most frequent confusions, most frequent first."""
    errors = counts - counts.diag().diag()
    frequent = errors.flatten().topk(min(MOST_CONFUSIONS, errors.numel()))
    texts = []
    for count, index in zip(*map(Tensor.tolist, frequent), strict=True):
        label, answer = divmod(index, len(classes))
        if count:
            texts.append(f"{classes[label]} taken for {classes[answer]}: {count} of {int(counts[label].sum())}")
    return texts


def as_table(counts: Tensor, classes: Sequence[str]) -> str:
    """Return a line for each class: its accuracy, with an interval."""
    lines = [("class", "images", "accuracy", "99% interval")]
    for name, row, correct in zip(classes, counts, counts.diag().tolist(), strict=True):
        total = int(row.sum())
        if total:
            low, high = wilson(correct, total)
            lines.append((name, str(total), f"{correct / total:.4f}", f"[{low:.4f}, {high:.4f}]"))
    return in_columns(lines)


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("--data", default=str(DATA), help="as for training (default: CIFAR-10)")
    parser.add_argument("--device", default="", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--program", default="", help="FILE.py of a program of your own")
    options = parser.parse_args(arguments)
    model = load(options.weights, options.program).to(take_device(options.device))
    images, labels = test_images(model, options.data)
    logits = model.logits(images).cpu()
    found = score(model, logits, labels)
    low, high = wilson(found.correct, found.images)
    print(f"accuracy {found.accuracy:.4f} ({found.correct} of {found.images} images), loss {found.loss:.3f}")
    print(f"99% interval [{low:.4f}, {high:.4f}]")
    counts = count_confusions(labels, logits.argmax(1), len(model.classes))
    print(as_table(counts, model.classes))
    for text in largest_confusions(counts, model.classes):
        print(text)
