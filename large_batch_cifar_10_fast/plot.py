"""Draw campaigns side by side: accuracy and loss by epoch, and the final accuracy of each run.

    python -m large_batch_cifar_10_fast.plot FILE... [--panels accuracy work] [--published] [--out PICTURE]

FILE is what `compare` reads. Lines are medians over runs, their shade is the range. Panels without data are left out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from . import ConfigError, exit_on_config_error
from .core.files import write_atomically
from .core.program import flop_of_conditions
from .core.table import CONDITIONS, GOAL, PLACE
from .results import Log, read_log

ACCURACY = "test accuracy, %"
PANELS = {  # columns of x and y, and texts
    "accuracy": ("epoch", "accuracy", "Accuracy by epoch", "epoch", ACCURACY),
    "loss": ("epoch", "loss", "Loss by epoch (dashed: training)", "epoch", "loss"),
    "final": ("final", "final", "Final accuracy of each run", ACCURACY, ""),
    "work": ("work", "final", "Final accuracy against work", "PFLOP of a run on 50,000 images", ACCURACY),
}
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito, for all eyes
COLORS += ["#882255", "#999933", "#332288"]  # Tol
UNLABELLED = {*CONDITIONS, *PLACE, "clock"} - {"precision"}  # conditions that are not in a label
STYLE: dict[str, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.spines.right": False, "axes.spines.top": False, "axes.grid": True, "grid.color": "0.9"}
STYLE |= {"text.parse_math": False, "svg.fonttype": "none", "lines.markeredgewidth": 0, "legend.frameon": False}


def short_labels(logs: Sequence[Log]) -> list[str]:
    """Return for each log its recipe, the options in which the logs of this recipe differ, and the number of runs."""
    labels = []
    for log in logs:
        recipe = log.conditions.get("recipe", "")
        alike = pd.DataFrame([other.conditions for other in logs if recipe == other.conditions.get("recipe")])
        differing = [name for name in alike if alike[name].nunique() > 1 and name in {*log.conditions} - UNLABELLED]
        options = "".join(f" {name}={log.conditions[name]}" for name in differing[:3])
        labels.append((recipe or Path(log.name).stem[:30]) + options)
    files = ["" if labels.count(a) == 1 else " " + log.name[-30:] for a, log in zip(labels, logs, strict=True)]
    return [f"{a}{file}, n = {len(log.runs)}" for a, file, log in zip(labels, files, logs, strict=True)]


def table_of(log: Log, label: str, color: str) -> pd.DataFrame:
    """Return a row per run and one per epoch of a run, NaN where unknown: accuracies in percent, work in PFLOP."""
    last = float(log.conditions.get("epochs", "nan")) if log.epochs is None else np.nan
    work = flop_of_conditions(log.conditions, 50_000) / 1e15
    runs = log.runs.assign(epoch=last, final=100 * log.runs["accuracy"], work=work)
    table = pd.concat([runs, log.epochs]).rename(columns={"validation_loss": "loss"}).assign(label=label, color=color)
    return table.assign(accuracy=100 * table["accuracy"]).replace([np.inf, -np.inf], np.nan)


def draw_medians(axes: Axes, table: pd.DataFrame, x: str, y: str, label: str, color: str) -> None:
    """Draw the median over runs of a column against another, and its range; of the training loss its median alone."""
    values = table.groupby(x)[y]
    low, high = values.min(), values.max()
    axes.plot(values.median(), "o-", ms=4, label=label, color=color)
    axes.fill_between(low.index, low, high, color=color, alpha=0.2, lw=0)
    axes.vlines(low.index, low, high, color=color, alpha=0.4, lw=2)
    if y == "loss" and "train_loss" in table:
        axes.plot(table.groupby(x)["train_loss"].median(), "--", color=color)


def draw_final(axes: Axes, runs: pd.Series, row: int, label: str, color: str) -> None:
    """Draw final accuracies as a row of dots, below their label, mean and standard deviation."""
    rises = row + 0.3 * ((0.5 + 0.618 * np.arange(len(runs))) % 1)  # neighbours lie apart
    axes.plot(runs.sort_values(), rises, "o", color=color, alpha=0.6, ms=5)
    axes.vlines(runs.mean(), row - 0.05, row + 0.35, color=color, lw=2)
    text = f"{label}: {runs.mean():.2f}" + (f" ± {runs.std():.2f}%" if len(runs) > 1 else "%")
    axes.text(0.01, row - 0.25, text, transform=axes.get_yaxis_transform(), color=color, va="center")
    axes.set(yticks=[], ylim=(row + 0.6, -0.6))


def label_ends(axes: Axes, data: pd.DataFrame, x: str, y: str) -> None:
    """Write the label of each log above the end of its line or range, moved up where labels would overlap."""
    ends = data.sort_values([x, y]).groupby(["label", "color"])[[x, y]].last().sort_values(y)
    (low, high), right = axes.get_ylim(), axes.get_xlim()[1]
    step = 0.08 * (high - low)  # more than the height of a label
    placed: list[tuple[float, float, float]] = []  # left and right ends and heights of labels
    for (label, color), end, height in zip(ends.index, ends[x], ends[y] + step, strict=True):
        align = "right" if end > 0.4 * right else "left"
        width = 0.024 * right * len(label)  # more than that of a label
        left = end - width if align == "right" else end
        height = max([height, *(below + step for a, b, below in placed if a < left + width and left < b)])
        placed.append((left, left + width, height))
        how = {"ha": align, "va": "center", "color": color, "bbox": {"color": "white", "pad": 0}}
        axes.text(end, height, label, zorder=1.8, **how)  # below lines
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= 100])
    axes.set_ylim(low, max(high, *(height + step for *_, height in placed)))


def draw_picture(data: pd.DataFrame, panels: Sequence[str]) -> Figure:
    """Draw panels, two in a row, of the logs that have data for them. More than six logs have a legend."""
    rcdefaults()  # whatever a matplotlibrc says
    rcParams.update(STYLE)  # type: ignore[arg-type]
    rows: Any = [[*panels[i : i + 2], panels[-1]][:2] for i in range(0, len(panels), 2)]
    figure = Figure(figsize=(8.5, 3.4 * len(rows)), dpi=200, layout="constrained")
    with_legend = data["label"].nunique() > 6 or panels == ["loss"]
    for panel, axes in figure.subplot_mosaic(rows).items():
        x, y, title, x_label, y_label = PANELS[panel]
        shown: Any = data.dropna(subset=[x, y])
        for row, (log, table) in enumerate(shown.groupby(["label", "color"], sort=False)):
            if panel == "final":
                draw_final(axes, table[x], row, *log)
            else:
                draw_medians(axes, table, x, y, *log)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(None if panel == "final" else 0)
        goal, (low, high) = (axes.axvline, axes.get_xlim()) if panel == "final" else (axes.axhline, axes.get_ylim())
        if panel == "loss":
            axes.set_yscale("log")
            axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
        elif low - 2 < 100 * GOAL < high + 2:
            goal(100 * GOAL, color="black", lw=0.8, ls=(0, (4, 3)), zorder=1.7)
        if y_label == ACCURACY and not with_legend:
            label_ends(axes, shown, x, y)
    if with_legend:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


@exit_on_config_error("plot")
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=[*PANELS], help="default: all")
    parser.add_argument("--published", action="store_true", help="add the published runs of apple2019, in grey")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    options = parser.parse_args(arguments)
    logs = [read_log(name) for name in options.files]
    tables = [table_of(*each) for each in zip(logs, short_labels(logs), COLORS * len(logs), strict=False)]
    if options.published:
        tables.append(table_of(read_log("published"), "apple2019, published", "0.5"))
    data = pd.concat(tables)
    values = {panel: data.dropna(subset=PANELS[panel][:2])[PANELS[panel][0]] for panel in options.panels}
    figure = draw_picture(data, [panel for panel in values if values[panel].nunique() > 1] or ["final"])
    try:
        if options.out.exists() and not options.out.is_file():
            raise OSError("it exists and is not a file")
        with write_atomically(options.out.resolve()) as unfinished:  # the target of a link, not the link
            figure.savefig(unfinished, format=options.out.suffix[1:].lower())
    except (OSError, ValueError) as error:  # of the disk, or a format that Matplotlib lacks
        raise ConfigError(f"--out {options.out} cannot be written ({error}): choose another") from error
    print(options.out)


if __name__ == "__main__":
    main()
