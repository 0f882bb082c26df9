"""Draw campaigns side by side: accuracy by epoch, the final accuracy of each run, and accuracy against work.

    cifar10-fast plot night/runs.tsv day/runs.tsv published --panels accuracy work --out picture.png

`compare --help` describes CAMPAIGN. For `runs.tsv:*` the command draws each campaign of the table. Lines are medians
over runs and shades are ranges; both include unfinished runs. Panels without data are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from .. import ConfigError
from ..lab.figures import new_figure, write_picture
from ..lab.options import command_parser
from ..lab.results import Results, each_campaign, names_of, read_results
from ..lab.table import GOAL, OPTION

MARKERS = "os^DvPX"


class Drawn(NamedTuple):
    """A campaign in a picture: final accuracies, accuracies by epoch (both in percent), and the PFLOP of a run."""

    label: str
    color: str
    marker: str
    final: pd.Series
    epochs: pd.DataFrame  # columns epoch and accuracy
    work: float  # NaN if unknown
    is_held_out: bool


def as_drawn(campaign: Results, name: str, number: int) -> Drawn:
    epochs = campaign.epochs
    if epochs.empty:  # the last one is known
        last = float(campaign.conditions.get(f"{OPTION}epochs", "nan"))
        epochs = campaign.runs.assign(epoch=last).dropna(subset="epoch")
    return Drawn(
        f"{name}, n = {len(campaign.runs)}",
        f"C{number}",
        MARKERS[number % len(MARKERS)],
        100 * campaign.runs["accuracy"],
        epochs.assign(accuracy=100 * epochs["accuracy"]).dropna(subset="accuracy"),
        float(campaign.conditions.get("pflop", "nan")),
        "training images as test images" in campaign.conditions.get("images", ""),
    )


# ---- Panels


def draw_epochs(axes: Axes, campaigns: Sequence[Drawn], accuracy: str) -> None:
    """Draw the median accuracy over runs by epoch, and its range."""
    axes.set(title="Accuracy by epoch", xlabel="epoch", ylabel=accuracy)
    for each in campaigns:
        found = each.epochs.groupby("epoch")["accuracy"]
        axes.plot(found.median(), ms=4, lw=1.2, color=each.color, marker=each.marker)
        axes.fill_between(found.median().index, found.min(), found.max(), color=each.color, alpha=0.2, lw=0)
    axes.set_xlim(0)


def draw_final(axes: Axes, campaigns: Sequence[Drawn], accuracy: str) -> None:
    """Draw final accuracies as rows of dots, with mean and standard deviation beside them."""
    axes.set(title="Final accuracy of each run", xlabel=accuracy, yticks=[], ylim=(len(campaigns) - 0.4, -0.6))
    for row, each in enumerate(campaigns):
        rises = row + 0.3 * ((0.5 + 0.618 * np.arange(len(each.final))) % 1)  # neighbours lie apart
        axes.plot(each.final.sort_values(), rises, "o", color=each.color, alpha=0.6, ms=5)
        axes.vlines(each.final.mean(), row - 0.05, row + 0.35, color=each.color, lw=2)
        text = f"{each.final.mean():.2f} ± {each.final.std():.2f}%".replace(" ± nan", "")
        axes.text(1.02, row + 0.15, text, transform=axes.get_yaxis_transform(), color=each.color, va="center")


def draw_work(axes: Axes, campaigns: Sequence[Drawn], accuracy: str) -> None:
    """Draw the median final accuracy against the work of a run, and its range."""
    axes.set(title="Final accuracy against work", xlabel="PFLOP of a run", ylabel=accuracy, xscale="log")
    axes.set_xlim(min(each.work for each in campaigns) / 1.5, max(each.work for each in campaigns) * 1.5)
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    for each in campaigns:
        axes.plot(each.work, each.final.median(), each.marker, ms=4, color=each.color)
        axes.vlines(each.work, each.final.min(), each.final.max(), color=each.color, alpha=0.4, lw=2)


PANELS = {"accuracy": draw_epochs, "final": draw_final, "work": draw_work}


def draw_picture(campaigns: Sequence[Drawn], names: Sequence[str]) -> Figure:
    """Draw panels side by side, of the campaigns that have data for them, below a legend. Raise ConfigError."""
    data = {
        "accuracy": [each for each in campaigns if len(each.epochs)],
        "final": [each for each in campaigns if len(each.final)],
        "work": [each for each in campaigns if each.work > 0 and len(each.final)],
    }
    panels = [name for name in names if data[name]]
    if not panels:
        raise ConfigError("nothing to draw: wait for a finished run, or name another FILE:CAMPAIGN")
    figure = new_figure(4.25 * max(2, len(panels)), 3.4 + 0.1 * len(campaigns))
    held_out = {each.is_held_out for each in campaigns}
    images = "test images" if held_out == {False} else "images that were held out"
    accuracy = "accuracy, %" if len(held_out) > 1 else f"accuracy on {images}, %"
    for name, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        PANELS[name](axes, data[name], accuracy)
        axes.grid(True)
        line = axes.axvline if name == "final" else axes.axhline
        if held_out == {False}:
            line(100 * GOAL, color="black", lw=0.8, ls="--")
    entries = [Line2D([], [], ms=4, color=each.color, marker=each.marker) for each in campaigns]
    figure.legend(entries, [each.label for each in campaigns], loc="outside upper left", ncols=2)
    notes = "shade: range; ±: standard deviation; dashed: 94% of the test images"
    figure.supxlabel(notes, fontsize=7, color="0.4")
    return figure


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="CAMPAIGN")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=[*PANELS], help="default: all")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="names of the campaigns, in order")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    options = parser.parse_args(arguments)
    found = [read_results(name) for source in options.files for name in each_campaign(source)]
    names = options.labels or names_of(found)
    if len(names) != len(found):
        raise ConfigError(f"--labels has {len(names)}, but {len(found)} campaigns are drawn: give one for each")
    drawn = [as_drawn(each, name, number) for number, (each, name) in enumerate(zip(found, names, strict=True))]
    write_picture(draw_picture(drawn, options.panels), options.out)
    print(options.out)
