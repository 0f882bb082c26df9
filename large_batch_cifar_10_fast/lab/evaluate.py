"""Test saved weights: accuracy of each class, confusions, and the most confident errors.

    cifar10-fast evaluate weights.pt --data photos.npz --confusion confusion.png --errors errors.png

It predicts all test images of --data in float32, with the test-time augmentation of the recipe.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from ..core.devices import take_device
from ..images.cifar import DATA
from .figures import write_picture
from .model import load, score, test_images
from .options import command_parser
from .statistics import in_columns, wilson

MOST_CONFUSIONS = 5  # that are named
MOST_WRITTEN = 20  # classes up to which the matrix has numbers
ERRORS = 15  # that are shown


def count_confusions(labels: Tensor, answers: Tensor, classes: int) -> Tensor:
    """Return how many images of class i were taken for class j: int64 [classes, classes]."""
    return torch.bincount(labels * classes + answers, minlength=classes**2).view(classes, classes)


def largest_confusions(counts: Tensor, classes: Sequence[str]) -> list[str]:
    """Return texts of the most frequent confusions, most frequent first."""
    errors = counts - counts.diag().diag()
    frequent = errors.flatten().topk(min(MOST_CONFUSIONS, errors.numel()))
    texts = []
    for count, place in zip(*map(Tensor.tolist, frequent), strict=True):
        label, answer = divmod(place, len(classes))
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


# ---- Pictures


def draw_confusions(counts: Tensor, classes: Sequence[str]) -> Figure:
    """Draw the confusion matrix: each row has a class, and the shares of its images by predicted class."""
    is_small = len(classes) <= MOST_WRITTEN
    size = 5.0 + 0.16 * len(classes)
    figure = Figure(figsize=(size + 1, size), dpi=150, layout="constrained")
    axes = figure.subplots()
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    axes.imshow(shares.numpy(), cmap="Greys", vmin=0, vmax=1)
    for row, column in counts.nonzero().tolist() if is_small else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color, size=8)
    axes.set_xticks(range(len(classes)), classes, rotation=90, parse_math=False)
    axes.set_yticks(range(len(classes)), classes, parse_math=False)
    axes.tick_params(labelsize=9 if is_small else 6)
    axes.set(xlabel="taken for", ylabel="is")
    largest = "\n".join(largest_confusions(counts, classes)[:3]) or "no errors"
    axes.set_title(f"Largest confusions:\n{largest}", loc="left", size=10, parse_math=False)
    return figure


def draw_errors(images: Tensor, labels: Tensor, probabilities: Tensor, classes: Sequence[str]) -> Figure:
    """Draw the errors with the highest probabilities, highest first."""
    sure, answers = probabilities.max(1)
    wrong = (answers != labels).nonzero()[:, 0]
    surest = wrong[sure[wrong].argsort(descending=True, stable=True)][:ERRORS].tolist()
    figure = Figure(figsize=(8.6, 6.1), dpi=150, layout=ConstrainedLayoutEngine(hspace=0.08))
    panels = list(figure.subplots(3, ERRORS // 3).flat)
    for axes in panels:
        axes.set(xticks=[], yticks=[], frame_on=False)
    for axes, place in zip(panels, surest, strict=False):
        axes.imshow(images[place].numpy())
        answer = f"taken for\n{classes[int(answers[place])][:20]}, {sure[place]:.0%}"
        axes.set_title(answer, size=8, parse_math=False)
        axes.set_xlabel(f"truth: {classes[int(labels[place])][:20]}", size=8, parse_math=False)
    figure.suptitle(f"The surest of {len(wrong)} errors on {len(labels)} images", weight="bold", size=11)
    return figure


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("--data", default=str(DATA), help="as for training (default: CIFAR-10)")
    parser.add_argument("--device", default="", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--program", default="", help="FILE.py of a program of your own")
    parser.add_argument("--confusion", type=Path, metavar="PICTURE", help="the confusion matrix: .png, .svg or .pdf")
    parser.add_argument("--errors", type=Path, metavar="PICTURE", help="the most confident errors, in the same formats")
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
    if options.confusion:
        write_picture(draw_confusions(counts, model.classes), options.confusion)
    if options.errors:
        write_picture(draw_errors(images, labels, logits.softmax(1), model.classes), options.errors)
