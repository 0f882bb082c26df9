"""Draw campaigns side by side: accuracy and loss by epoch, and the final accuracy of each run.

    python -m large_batch_cifar_10_fast.plot FILE... [--panels accuracy work] [--published] [--out PICTURE]

FILE is what `compare` reads; of `runs.tsv:*` each campaign is drawn. Lines are medians over runs, with those that are
not finished, and their shade is the range. Panels without data are left out.
"""

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from . import ConfigError, exit_on_config_error
from .core.files import write_picture
from .core.program import flop_of_conditions
from .core.table import CONDITIONS, GOAL, PLACE
from .core.team import warn
from .results import Log, each_campaign, read_log

ACCURACY = "test accuracy, %"
PANELS = {  # columns of x and y, and texts
    "accuracy": ("epoch", "accuracy", "Accuracy by epoch", "epoch", ACCURACY),
    "loss": ("epoch", "loss", "Loss by epoch (dashed: training)", "epoch", "loss"),
    "final": ("final", "final", "Final accuracy of each run", ACCURACY, ""),
    "work": ("work", "final", "Final accuracy against work", "PFLOP of a run on 50,000 images", ACCURACY),
}
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9"]  # Okabe and Ito, for all eyes
COLORS += ["#882255", "#999933", "#332288"]  # Tol
MARKERS = "os^DvPX"
MOST_LABELS = 4  # at lines; more are in a legend
LONGEST = 90  # characters of a label, without n
HEIGHTS = (0, 12, 24, 36, -12, -24, -36, 48, -48)  # of a label above the end of its line, in points
SIDES = {"left": 6, "right": -6}  # of a label that begins or ends there, to the right of this end
UNLABELLED = {*CONDITIONS, *PLACE, "clock"} - {"precision"}  # conditions that are not in a label
STYLE: dict[str, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.titlepad": 10, "axes.spines.right": False, "axes.spines.top": False, "grid.color": "0.9"}
STYLE |= {"text.parse_math": False, "svg.fonttype": "none", "lines.markeredgewidth": 0, "legend.frameon": False}


def shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters: the middle of a longer one becomes an ellipsis."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def name_of(log: Log) -> str:
    """Return the campaign of a log, or its recipe if the campaign has an automatic name or none."""
    recipe = log.conditions.get("recipe", "")
    named = log.campaign and not (recipe and re.match(r"\d{8}T\d{6}-[0-9a-f]+\b", log.campaign))
    return log.campaign if named else recipe or Path(log.name).stem


def short_labels(logs: Sequence[Log]) -> list[str]:
    """Return for each log its name, and the recipe and options in which the logs of this name differ, or its file."""
    names = [(name_of(log), log.conditions.get("recipe", "")) for log in logs]
    labels = []
    for log, (name, recipe) in zip(logs, names, strict=True):
        alike = pd.DataFrame([each.conditions for each, its in zip(logs, names, strict=True) if its == (name, recipe)])
        differing = [each for each in alike if alike[each].nunique() > 1 and each in {*log.conditions} - UNLABELLED][:3]
        words = [shorten(name, LONGEST // 3)]
        if recipe and len(alike) < [other for other, _ in names].count(name):
            words.append(recipe)
        for option in differing:
            value = shorten(log.conditions[option], 36 // len(differing))
            words.append(f"{shorten(option, 12)}={value}")
        labels.append(" ".join(words))
    files = ["" if labels.count(label) == 1 else f" {log.name[-30:]}" for label, log in zip(labels, logs, strict=True)]
    return [shorten(label, LONGEST - len(file)) + file for label, file in zip(labels, files, strict=True)]


def with_runs(label: str, log: Log) -> str:
    """Return a label, shortened, with the number of runs."""
    started = 0 if log.epochs is None else int((log.epochs["epoch"] == 1).sum())
    unfinished = f", {started - len(log.runs)} unfinished" if started > len(log.runs) else ""
    return f"{shorten(label, LONGEST)}, n = {len(log.runs)}{unfinished}"


def table_of(log: Log, label: str, color: str) -> pd.DataFrame:
    """Return a row per run and one per epoch of a run, NaN where unknown: accuracies in percent, work in PFLOP."""
    last = float(log.conditions.get("epochs", "nan")) if log.epochs is None else np.nan
    work = flop_of_conditions(log.conditions, 50_000) / 1e15
    runs = log.runs.assign(epoch=last, final=100 * log.runs["accuracy"], work=work)
    table = pd.concat([runs, log.epochs]).rename(columns={"validation_loss": "loss"}).assign(label=label, color=color)
    return table.assign(accuracy=100 * table["accuracy"]).replace([np.inf, -np.inf], np.nan)


def draw_medians(axes: Axes, table: pd.DataFrame, x: str, y: str, **how: Any) -> None:
    """Draw the median over runs of a column against another, and its range; of the training loss its median alone."""
    values = table.groupby(x)[y]
    low, high = values.min(), values.max()
    axes.plot(values.median(), ms=4, lw=1.2, **how)
    if y == "loss" and "train_loss" in table:
        axes.plot(table.groupby(x)["train_loss"].median(), "--", lw=1.2, color=how["color"])
    if len(low) > 1:
        axes.fill_between(low.index, low, high, color=how["color"], alpha=0.2, lw=0)
    else:
        axes.vlines(low.index, low, high, color=how["color"], alpha=0.4, lw=2)


def draw_final(axes: Axes, runs: pd.Series, row: int, label: str, color: str) -> None:
    """Draw final accuracies as a row of dots, below their label, mean and standard deviation, or with these beside."""
    rises = row + 0.3 * ((0.5 + 0.618 * np.arange(len(runs))) % 1)  # neighbours lie apart
    axes.plot(runs.sort_values(), rises, "o", color=color, alpha=0.6, ms=5)
    axes.vlines(runs.mean(), row - 0.05, row + 0.35, color=color, lw=2)
    text = f"{runs.mean():.2f}" + (f" ± {runs.std():.2f}%" if len(runs) > 1 else "%")
    where = (0.01, row - 0.25, f"{label}: {text}") if label else (1.02, row + 0.15, text)
    axes.text(*where, transform=axes.get_yaxis_transform(), color=color, va="center")
    axes.set(yticks=[], ylim=(row + 0.6, -0.6))


def draw_goal(axes: Axes, vertical: bool) -> None:
    """Draw a line at 94%, with its name at its end, outside the panel."""
    draw = axes.axvline if vertical else axes.axhline
    draw(100 * GOAL, color="black", lw=0.8, ls=(0, (4, 3)), zorder=1.7)
    where = [(1.03, "axes fraction"), (100 * GOAL, "data")]
    (x, of_x), (y, of_y) = reversed(where) if vertical else where
    axes.annotate("94%", (x, y), xycoords=(of_x, of_y), fontsize=7, ha="center", va="center")


def label_ends(axes: Axes, medians: pd.DataFrame, taken: Any) -> bool:
    """Write labels near the ends of lines where no pixel is taken, and take theirs. Return whether all have a place.

    A place is near a line if no point of another one is much nearer.
    """
    points = axes.transData.transform(medians[["x", "y"]])  # in pixels
    ends = medians.drop_duplicates("log", keep="last").sort_values(["x", "y"], ascending=[False, True])
    for place, end in ends.iterrows():
        others = points[medians["log"] != end["log"]]
        text = axes.annotate(end["label"], (end["x"], end["y"]), (0, 0), textcoords="offset points", va="center")
        text.set_color(end["color"])
        for align, up in itertools.product(SIDES, HEIGHTS):
            text.set(position=(SIDES[align], up), ha=align)
            box = text.get_window_extent().padded(4)
            pixels = taken[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]
            offset = np.array([SIDES[align], up]) * axes.figure.dpi / 72
            distances = np.linalg.norm(others - points[place] - offset, axis=1)
            is_near = distances.min(initial=np.inf) > 0.6 * np.linalg.norm(offset)
            if is_near and axes.bbox.count_contains(box.corners()) == 4 and not pixels.any():
                pixels[:] = True
                break
        else:
            return False
    return True


def draw_picture(data: pd.DataFrame, panels: Sequence[str], legend: bool = False) -> Figure:
    """Draw panels, two in a row, of the logs that have data for them.

    Labels are at lines, or in a legend: if one is asked for, if there are many, or if they do not fit.
    """
    rcdefaults()  # whatever a matplotlibrc says
    rcParams.update(STYLE)  # type: ignore[arg-type]
    rows: Any = [[*panels[i : i + 2], panels[-1]][:2] for i in range(0, len(panels), 2)]
    logs = data.drop_duplicates("log")
    legend = legend or len(logs) > MOST_LABELS or ("loss" in panels and "accuracy" not in panels)
    columns = 2 if logs["label"].str.len().max() < 45 else 1
    height = len(rows) * max(3.4, 0.18 * len(logs)) + legend * 0.19 * len(logs) / columns
    figure = Figure(figsize=(8.5, height), dpi=200, layout="constrained")
    mosaic = figure.subplot_mosaic(rows)
    medians = {}
    for panel, axes in mosaic.items():
        x, y, title, x_label, y_label = PANELS[panel]
        shown: Any = data.dropna(subset=[x, y])
        names = ["log", "label", "color", "marker"]
        for row, ((_, label, color, marker), table) in enumerate(shown.groupby(names)):
            if panel == "final":
                draw_final(axes, table[x], row, "" if legend else label, color)
            else:
                draw_medians(axes, table, x, y, color=color, marker=marker)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(None if panel == "final" else 0)
        low, high = axes.get_xlim() if panel == "final" else axes.get_ylim()
        if panel == "loss":
            axes.set_yscale("log")
            axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
        elif low - 2 < 100 * GOAL < high + 2:
            draw_goal(axes, vertical=panel == "final")
        if y_label == ACCURACY and not legend:
            low, high = axes.get_ylim()
            axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= 100])
            axes.set_ylim(low, high + 0.07 * len(logs) * (high - low))  # room for labels
            axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
            medians[axes] = shown.groupby([*names, x], as_index=False)[y].median().rename(columns={x: "x", y: "y"})
    if legend:
        entries = [Line2D([], [], ms=4, color=log.color, marker=log.marker) for log in logs.itertuples()]
        figure.legend(entries, logs["label"], loc="outside upper left", ncols=columns)
    if data.duplicated(["log", "epoch"]).any():  # runs
        notes = ["shade: range over runs"] if {*panels} - {"final"} else []
        notes += ["± is the standard deviation over runs"] if "final" in panels else []
        figure.supxlabel("; ".join(notes), fontsize=7, color="0.4")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # labels stay where they fit
    taken = (np.asarray(canvas.buffer_rgba())[::-1, :, :3] < 250).any(axis=2)
    fits = [label_ends(axes, of_panel, taken) for axes, of_panel in medians.items()]
    if "final" in panels:
        fits += [text.get_window_extent().x1 < mosaic["final"].bbox.x1 for text in mosaic["final"].texts]
    for axes in mosaic.values():
        axes.grid(True)
    return figure if legend or all(fits) else draw_picture(data, panels, True)


@exit_on_config_error("plot")
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=[*PANELS], help="default: all")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="one for each log that is drawn, in order")
    parser.add_argument("--published", action="store_true", help="add the published runs of apple2019, in grey")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    options = parser.parse_args(arguments)
    by_epoch = [panel for panel in options.panels if panel in ("accuracy", "loss")]
    logs = []
    left_out = []
    for name in [name for source in options.files for name in each_campaign(source)]:
        log = read_log(name, unfinished=True)
        left_out += log.left_out
        if len(log.runs) or (by_epoch and log.epochs is not None):
            logs.append(log)
        elif not log.left_out:
            left_out.append(name)
    if not logs:
        raise ConfigError(f"{', '.join(left_out)} has no finished run: wait for one, or name another FILE:CAMPAIGN")
    labels = options.labels or short_labels(logs)
    if len(labels) != len(logs):
        raise ConfigError(f"--labels has {len(labels)}, but {len(logs)} logs are drawn: give one for each")
    labels = [with_runs(*each) for each in zip(labels, logs, strict=True)]
    tables = [table_of(*each) for each in zip(logs, labels, COLORS * len(logs), strict=False)]
    if options.published:
        tables.append(table_of(read_log("published"), "apple2019, published", "0.5"))
    data = pd.concat([table.assign(log=i, marker=MARKERS[i % len(MARKERS)]) for i, table in enumerate(tables)])
    values = {panel: data.dropna(subset=PANELS[panel][:2])[PANELS[panel][0]] for panel in options.panels}
    default = ["final"] if data["final"].notna().any() else by_epoch[:1]
    figure = draw_picture(data, [panel for panel in values if values[panel].nunique() > 1] or default)
    for name in left_out:
        warn(f"{name} has no finished run: left out")
    write_picture(figure, options.out, "--out")
    print(options.out)


if __name__ == "__main__":
    main()
