"""Draw campaigns side by side: accuracy and loss by epoch, and the final accuracy of each run.

    cifar10-fast plot night/runs.tsv day/runs.tsv --panels accuracy work --published --out picture.png

`compare --help` describes CAMPAIGN. For `runs.tsv:*` the command draws each campaign of the table. Lines are medians
over runs and shades are ranges; both include unfinished runs. Panels without data are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .. import ConfigError
from ..core.printing import warn
from .figures import write_picture
from .options import command_parser
from .results import Log, each_campaign, names_of, read_log
from .table import GOAL

ACCURACY = "test accuracy, %"
PANELS = {  # columns of x and y, and texts
    "accuracy": ("epoch", "accuracy", "Accuracy by epoch", "epoch", ACCURACY),
    "loss": ("epoch", "loss", "Loss by epoch (dashed: training)", "epoch", "loss"),
    "final": ("final", "final", "Final accuracy of each run", ACCURACY, ""),
    "work": ("work", "final", "Final accuracy against work", "PFLOP of a run", ACCURACY),
}
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9"]  # Okabe and Ito, for all eyes
COLORS += ["#882255", "#999933", "#332288"]  # Tol
MARKERS = "os^DvPX"
STYLE: dict[str, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.titlepad": 10, "axes.spines.right": False, "axes.spines.top": False, "grid.color": "0.9"}
STYLE |= {"text.parse_math": False, "svg.fonttype": "none", "lines.markeredgewidth": 0, "legend.frameon": False}


def label_of(name: str, log: Log) -> str:
    """Return a name with the number of runs."""
    started = int((log.epochs["epoch"] == 1).sum())
    unfinished = f", {started - log.count} unfinished" if started > log.count else ""
    diverged = f", {log.diverged} diverged" if log.diverged else ""
    return f"{name}, n = {len(log.runs)}{diverged}{unfinished}"


def table_of(log: Log, label: str, color: str) -> pd.DataFrame:
    """Return a row per run and one per epoch of a run, NaN where unknown: accuracies in percent, work in PFLOP."""
    last = float(log.conditions.get("hyp.epochs", "nan")) if log.epochs.empty else np.nan
    work = float(log.conditions.get("pflop", "nan"))
    runs = log.runs.assign(epoch=last, final=100 * log.runs["accuracy"], work=work)
    table = pd.concat([runs, log.epochs]).rename(columns={"validation_loss": "loss"}).assign(label=label, color=color)
    return table.assign(accuracy=100 * table["accuracy"]).replace([np.inf, -np.inf], np.nan)


def draw_medians(axes: Axes, table: pd.DataFrame, x: str, y: str, **how: Any) -> None:
    """Draw the median over runs of a column against another, and its range. The training loss has no range."""
    values = table.groupby(x)[y]
    low = values.min()
    high = values.max()
    axes.plot(values.median(), ms=4, lw=1.2, **how)
    if y == "loss" and "train_loss" in table:
        axes.plot(table.groupby(x)["train_loss"].median(), "--", lw=1.2, color=how["color"])
    if len(low) > 1:
        axes.fill_between(low.index, low, high, color=how["color"], alpha=0.2, lw=0)
    else:
        axes.vlines(low.index, low, high, color=how["color"], alpha=0.4, lw=2)


def draw_final(axes: Axes, runs: pd.Series, row: int, color: str) -> None:
    """Draw final accuracies as a row of dots, with mean and standard deviation beside it."""
    rises = row + 0.3 * ((0.5 + 0.618 * np.arange(len(runs))) % 1)  # neighbours lie apart
    axes.plot(runs.sort_values(), rises, "o", color=color, alpha=0.6, ms=5)
    axes.vlines(runs.mean(), row - 0.05, row + 0.35, color=color, lw=2)
    text = f"{runs.mean():.2f}" + (f" ± {runs.std():.2f}%" if len(runs) > 1 else "%")
    axes.text(1.02, row + 0.15, text, transform=axes.get_yaxis_transform(), color=color, va="center")
    axes.set(yticks=[], ylim=(row + 0.6, -0.6))


def draw_goal(axes: Axes, vertical: bool) -> None:
    """Draw a dashed line at 94%."""
    draw = axes.axvline if vertical else axes.axhline
    draw(100 * GOAL, color="black", lw=0.8, ls=(0, (4, 3)), zorder=1.7)


def draw_picture(data: pd.DataFrame, panels: Sequence[str]) -> Figure:
    """Draw panels, two in a row, of the campaigns that have data for them, below a legend."""
    rcdefaults()  # whatever a matplotlibrc says
    rcParams.update(STYLE)  # type: ignore[arg-type]
    rows: Any = [[*panels[i : i + 2], panels[-1]][:2] for i in range(0, len(panels), 2)]
    logs = data.drop_duplicates("log")
    height = len(rows) * max(3.4, 0.18 * len(logs)) + 0.1 * len(logs)
    figure = Figure(figsize=(8.5, height), dpi=200, layout="constrained")
    for panel, axes in figure.subplot_mosaic(rows).items():
        draw_panel(axes, panel, data)
    entries = [Line2D([], [], ms=4, color=log.color, marker=log.marker) for log in logs.itertuples()]
    figure.legend(entries, logs["label"], loc="outside upper left", ncols=2)
    notes = "shade: range over runs; ±: standard deviation over runs; dashed line: 94%"
    figure.supxlabel(notes, fontsize=7, color="0.4")
    return figure


def draw_panel(axes: Axes, panel: str, data: pd.DataFrame) -> None:
    x, y, title, x_label, y_label = PANELS[panel]
    shown: Any = data.dropna(subset=[x, y])
    for row, ((_, color, marker), table) in enumerate(shown.groupby(["log", "color", "marker"])):
        if panel == "final":
            draw_final(axes, table[x], row, color)
        else:
            draw_medians(axes, table, x, y, color=color, marker=marker)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(True)
    axes.set_xlim(None if panel == "final" else 0)
    low, high = axes.get_xlim() if panel == "final" else axes.get_ylim()
    if panel == "loss":
        axes.set_yscale("log")
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    elif low - 2 < 100 * GOAL < high + 2:
        draw_goal(axes, vertical=panel == "final")


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="CAMPAIGN")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=[*PANELS], help="default: all")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="names of the campaigns, in order")
    parser.add_argument("--published", action="store_true", help="add the published runs of apple2019, in grey")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    options = parser.parse_args(arguments)
    sources = [name for source in options.files for name in each_campaign(source)]
    logs = [read_log(source) for source in sources]
    by_epoch = {*options.panels} & {"accuracy", "loss"}
    drawn = [log for log in logs if log.count or (by_epoch and len(log.epochs))]
    for log in logs:
        if log not in drawn:
            warn(f"{log.name} has no finished run: left out")
    if not drawn:
        raise ConfigError("nothing to draw: wait for a finished run, or name another FILE:CAMPAIGN")
    names = options.labels or names_of(drawn)
    if len(names) != len(drawn):
        raise ConfigError(f"--labels has {len(names)}, but {len(drawn)} campaigns are drawn: give one for each")
    labels = [label_of(name, log) for name, log in zip(names, drawn, strict=True)]
    tables = [table_of(*each) for each in zip(drawn, labels, COLORS * len(drawn), strict=False)]
    if options.published:
        tables.append(table_of(read_log("published"), "apple2019, published", "0.5"))
    data = pd.concat([table.assign(log=i, marker=MARKERS[i % len(MARKERS)]) for i, table in enumerate(tables)])
    panels = [panel for panel in options.panels if data[[*PANELS[panel][:2]]].dropna().nunique().max() > 1]
    write_picture(draw_picture(data, panels or ["accuracy"]), options.out)
    print(options.out)
