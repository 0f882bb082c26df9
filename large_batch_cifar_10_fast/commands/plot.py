"""Draw campaigns side by side: accuracy by epoch, and final accuracy against work.

    cifar10-fast plot night/runs.tsv day/runs.tsv published --out picture.png

`compare --help` describes CAMPAIGN. For `runs.tsv:*` the command draws each campaign of the table. Lines are medians
over runs and shades are ranges. For CIFAR-10's test images, a dashed line is at 94%.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .. import ConfigError
from ..lab.figures import new_figure, write_picture
from ..lab.options import read_options
from ..lab.report import accuracies
from ..lab.results import Results, each_campaign, names_of, read_results
from ..lab.table import GOAL, OPTION

MARKERS = "os^DvP"


def draw_epochs(axes: Axes, campaign: Results, look: Mapping[str, Any]) -> None:
    """Draw the median accuracy over runs by epoch, and its range. Of published runs, the last epoch is known."""
    epochs = campaign.epochs
    if epochs.empty:
        epochs = campaign.runs.assign(epoch=float(campaign.conditions.get(f"{OPTION}epochs", "nan")))
    found = (100 * epochs["accuracy"]).groupby(epochs["epoch"])
    median: pd.Series = found.median()
    axes.plot(median.index, median, **look)
    axes.fill_between(median.index, found.min(), found.max(), color=look["color"], alpha=0.2, lw=0)


def draw_work(axes: Axes, campaign: Results, look: Mapping[str, Any]) -> None:
    """Draw the median final accuracy against the work of a run, and its range."""
    work = float(campaign.conditions["pflop"])
    final = accuracies(campaign)
    axes.plot(work, final.median(), **look)
    axes.vlines(work, final.min(), final.max(), color=look["color"], lw=2)


def draw_picture(campaigns: Mapping[str, Results]) -> Figure:
    """Draw campaigns by their names in two panels, below a legend. An axis says on which images accuracies are."""
    figure = new_figure(8.5, 3.4 + 0.1 * len(campaigns))
    left, right = figure.subplots(1, 2)
    for number, (name, each) in enumerate(campaigns.items()):
        look = {"label": f"{name}, n = {len(each.runs)}", "color": f"C{number}"}
        look["marker"] = MARKERS[number % len(MARKERS)]
        draw_epochs(left, each, look)
        if "pflop" in each.conditions:
            draw_work(right, each, look)
    images = {each.conditions.get("images", "") for each in campaigns.values()}
    kinds = {"held-out" if "training images as test images" in name else "test" for name in images}
    accuracy = f"accuracy on {' and '.join(sorted(kinds))} images, %"
    if images == {"CIFAR-10"}:
        for axes in (left, right):
            axes.axhline(100 * GOAL, color="black", lw=0.8, ls="--")
    left.set(title="Accuracy by epoch", xlabel="epoch", ylabel=accuracy)
    left.set_xlim(0)
    left.locator_params("x", integer=True)
    right.set(title="Final accuracy against work", xlabel="PFLOP of a run", ylabel=accuracy, xscale="log")
    right.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


@dataclass(frozen=True)
class Command:
    """What to draw."""

    campaigns: tuple[str, ...]  # sources of results, see compare
    labels: tuple[str, ...] = ()  # names of the campaigns, in order
    out: Path = Path("timing.png")  # picture: .png, .svg or .pdf


def main(arguments: Sequence[str]) -> None:
    options = read_options(Command, __doc__, arguments)
    found = [read_results(name) for source in options.campaigns for name in each_campaign(source)]
    names = options.labels or names_of(found)
    if len(names) != len(found):
        raise ConfigError(f"--labels has {len(names)} names for {len(found)} campaigns")
    write_picture(draw_picture(dict(zip(names, found, strict=True))), options.out)
    print(options.out)
