"""Plot accuracy and time of logs over the published entries. Below, where a log has several runs, draw the shares of
runs up to each accuracy and time, beside those of the published runs.

    python -m large_batch_cifar_10_fast.plot FILE... [--out PICTURE]

FILE is what `compare` reads, several tables included (`a/runs.tsv,b/runs.tsv`): drawn in black, all others in grey.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

if not __package__:  # started as a file, not with -m
    sys.path[0], __package__ = __file__.rsplit("/", 2)[0], "large_batch_cifar_10_fast"

from . import ConfigError, exit_on_config_error
from .data.cifar10 import CIFAR_10
from .read_logs import PUBLISHED, Log, read_log
from .runs import GOAL, write_atomically

ENTRIES = {  # DAWNBench's files and their labels
    "apple_resnet9_8v100_pytorch": "Apple, 8 V100",
    "ajay_resnet9_4v100_pytorch": "Ajay, 4 V100",
    "kakaobrain_custom-resnet9_4v100-braincloud_pytorch": "Kakao, 4 V100",
    "BAIDU-USA-GAIT_BaiduNet9P_8GV100_pytorch": "Baidu, 8 V100",
    "kakaobrain_custom-resnet9_1v100-braincloud_pytorch": "Kakao, 1 V100",
    "BAIDU-USA-GAIT_BaiduNet9_1GV100_pytorch": "Baidu, 1 V100",
    "davidcpage_resnet9_1v100-ec2_pytorch": "Page, 1 V100",
    "fastai_pytorch": "fast.ai",
    "fastai_pytorch_single_volta": "fast.ai, 1 V100",
    "basenet": "basenet",
}
ENDS = ["seconds", "accuracy", "accuracy", "accuracy"]  # of a log without epochs, like a curve
BEHIND, INK = "0.6", "0.0"
STYLE: dict[str, Any] = {"font.size": 7, "axes.linewidth": 0.5, "axes.labelpad": 1, "svg.fonttype": "none"}
STYLE |= {"axes.spines.right": False, "axes.spines.top": False}
GOAL_LINE: dict[str, Any] = {"color": INK, "lw": 0.6, "ls": (0, (4, 3))}
LABEL: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6, "annotation_clip": False}
LABEL |= {"parse_math": False}  # a file may be called $x$


def separate_labels(places: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move places apart, in order, until neighbours are `gap` away from each other, within [low, high] if they fit."""
    order, gaps = np.argsort(places, kind="stable"), gap * np.arange(len(places))
    moved = isotonic_regression(places[order] - gaps).x.clip(low, high - gaps[-1]) + gaps
    return moved[np.argsort(order)]


def draw_curves(axes: Axes, logs: list[tuple[str, Log]]) -> None:
    """Draw accuracy against seconds: epochs as a line, or the ends of runs as dots, labelled above the axes."""
    lines = [(label, read_log(str(PUBLISHED / "dawnbench" / f"{name}.tsv"))) for name, label in ENTRIES.items()] + logs
    curves, ends = [log.curve or log.runs[ENDS].to_numpy().T for _, log in lines], []
    for number, ((_, log), (x, y, low, high)) in enumerate(zip(lines, curves, strict=True)):
        color, width, order = (BEHIND, 0.7, 2) if number < len(ENTRIES) else (INK, 1.6, 4)
        last = np.argmax(x) if log.curve else np.argsort(x)[len(x) // 2]
        ends.append((x[last], 100 * y[last], color))
        if log.curve:
            axes.plot(x, 100 * y, color=color, lw=width, zorder=order)
            axes.fill_between(x, 100 * low, 100 * high, color=color, alpha=0.15, lw=0, zorder=3)
        else:
            axes.plot(x, 100 * y, "o", ms=2.5, mec=color, mfc="white" if len(x) > 1 else color, mew=0.5, zorder=order)
    every = np.concatenate([x[x > 0] for x, *_ in curves])
    left, right = np.log10(every.min()) - 0.1, np.log10(every.max()) + 0.15
    axes.set(xscale="log", xlim=(10**left, 10**right), xlabel="training time, seconds")
    axes.set(ylim=(40.0, 101.0), ylabel="test accuracy, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(100 * GOAL, zorder=3, **GOAL_LINE)
    axes.text(10**left, 100 * GOAL + 0.4, " 94%", va="bottom", ha="left", fontsize=6)
    gap = (right - left) * 0.042  # a label's height as a share of the axis
    places = separate_labels(np.log10([x for x, *_ in ends]), gap, left + gap / 2, right - gap / 2)
    for (label, _), (x, y, color), place in zip(lines, ends, places, strict=True):
        text: dict[str, Any] = {"color": color, "weight": "bold" if color == INK else "normal", **LABEL}
        text |= {"arrowprops": {"arrowstyle": "-", "lw": 0.4, "color": color, "shrinkA": 0, "shrinkB": 0}}
        end = x, np.clip(y, *axes.get_ylim())
        axes.annotate(label, end, (10**place, 1.05), textcoords=axes.get_xaxis_transform(), **text)


def draw_picture(logs: list[tuple[str, Log]], out: Path) -> None:
    """Draw and save; the runs of the first log with several are drawn over the published ones. Raise OSError."""
    rcdefaults()  # whatever a matplotlibrc says
    rcParams.update(STYLE)  # type: ignore[arg-type]
    several = [(label, log) for label, log in logs if len(log.runs) > 1][:1]
    figure = Figure(figsize=(3.5, 4.9 if several else 3.0), layout="constrained")
    axes = figure.subplots(3 if several else 1, 1, height_ratios=[2.4, 1, 1] if several else None, squeeze=False)[:, 0]
    draw_curves(axes[0], logs)
    for below, title in zip(axes[1:], ("final test accuracy, %", "seconds"), strict=False):
        for (label, log), color in zip([*several, labelled(read_log("published"))], (INK, BEHIND), strict=True):
            values = log.runs["seconds"] if title == "seconds" else 100 * log.runs["accuracy"]
            below.ecdf(values, color=color, lw=1, label=label)
        below.set(xlabel=title, ylabel="share of runs")
        for text in below.legend(frameon=False, fontsize=6).get_texts():
            text.set_parse_math(False)
    with write_atomically(out.resolve()) as unfinished:  # the target of a link, not the link
        figure.savefig(unfinished, dpi=200, format=out.suffix[1:].lower())


def labelled(log: Log, name: str = "") -> tuple[str, Log]:
    """Return the log's label, with the images where they are known and not CIFAR-10, and the log."""
    images = log.conditions.get("images", CIFAR_10)
    return (name or "/".join(Path(log.name).parts[-2:])) + (f", on {images}" if images != CIFAR_10 else ""), log


@exit_on_config_error("plot")
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", help="run logs, runs.tsv, timing_log.tsv or other DAWNBench tables")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    options = parser.parse_args(arguments)
    logs = [labelled(read_log(name), "mine" if len(options.files) == 1 else "") for name in options.files]
    try:
        if options.out.exists() and not options.out.is_file():
            raise OSError("it exists and is not a file")
        draw_picture(logs, options.out)
    except (OSError, ValueError) as error:  # of the disk, or a format that Matplotlib lacks
        raise ConfigError(f"--out {options.out} cannot be written ({error}): choose another") from error


if __name__ == "__main__":
    main()
