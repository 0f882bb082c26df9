"""Plot measured accuracy and time over the published entries.

    python -m large_batch_cifar_10_fast.plot FILE... [--out PICTURE]

Above: test accuracy against training seconds, the given logs in black, DAWNBench's entries of 2018 to 2020 in grey.
Below, where a log holds several runs: the distributions of their accuracies and times, beside the reference's.
FILE is what `compare` reads, shares of one campaign included (`share0/runs.tsv,share1/runs.tsv`).
"""

import argparse
from pathlib import Path

import numpy as np
from scipy.optimize import isotonic_regression

from .campaign import GOAL, write_atomically
from .options import CIFAR_10, ConfigError, exit_on_config_error
from .read_logs import PUBLISHED, Log, read_log

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
BEHIND, INK = "0.6", "0.0"
STYLE = {"font.size": 7, "axes.linewidth": 0.5, "axes.spines.right": False, "axes.spines.top": False}
GOAL_LINE = {"color": INK, "lw": 0.6, "ls": (0, (4, 3))}


def separate_labels(places: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move places apart, in order, until neighbours are `gap` away from each other, within [low, high] if they fit."""
    order, gaps = np.argsort(places, kind="stable"), gap * np.arange(len(places))
    moved = isotonic_regression(places[order] - gaps).x.clip(low, high - gaps[-1]) + gaps
    return moved[np.argsort(order)]


def draw_curves(axes, logs: list[Log], labels: list[str]) -> None:
    """Draw accuracy against seconds: epochs as a line, or the ends of runs as dots, labelled above the axes."""
    lines = [(label, read_log(str(PUBLISHED / "dawnbench" / f"{name}.tsv")), False) for name, label in ENTRIES.items()]
    lines += [(label, log, True) for label, log in zip(labels, logs, strict=True)]
    curves, ends = [log.epochs or (log.seconds, log.accuracy) for _, log, _ in lines], []
    for (_, log, own), (x, y) in zip(lines, curves, strict=True):
        last = np.argmax(x) if log.epochs else np.argsort(x)[len(x) // 2]
        ends.append((x[last], 100 * y[last]))
        if log.epochs:
            style = {"color": INK, "lw": 1.6, "zorder": 4} if own else {"color": BEHIND, "lw": 0.7, "zorder": 2}
            axes.plot(x, 100 * y, **style)
        else:
            axes.plot(x, 100 * y, "o", ms=2.5, mec=INK, mfc="white" if len(x) > 1 else INK, mew=0.5, zorder=4)
        if log.epochs and log.spread:
            axes.fill_between(x, *(100 * edge for edge in log.spread), color=INK, alpha=0.15, lw=0, zorder=3)
    every = np.concatenate([x[x > 0] for x, _ in curves])
    low, high = np.log10(every.min()) - 0.1, np.log10(every.max()) + 0.15
    axes.set(xscale="log", xlim=(10**low, 10**high), ylim=(40.0, 101.0), ylabel="test accuracy, %")
    axes.set_xlabel("training time, seconds", labelpad=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(100 * GOAL, zorder=3, **GOAL_LINE)
    axes.text(10**low, 100 * GOAL + 0.4, " 94%", va="bottom", ha="left", fontsize=6)
    gap = (high - low) * 0.042  # a label's height as a share of the axis
    places = separate_labels(np.log10([x for x, _ in ends]), gap, low + gap / 2, high - gap / 2)
    for (label, _, own), (x, y), place in zip(lines, ends, places, strict=True):
        color, weight = (INK, "bold") if own else ("0.35", "normal")
        text = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6, "color": color, "weight": weight}
        text |= {"annotation_clip": False, "parse_math": False}  # a file may be called $x$
        arrow = {"arrowstyle": "-", "lw": 0.4, "color": color, "shrinkA": 0, "shrinkB": 0}
        place = {"xytext": (10**place, 1.05), "textcoords": axes.get_xaxis_transform()}
        axes.annotate(label, xy=(x, np.clip(y, *axes.get_ylim())), arrowprops=arrow, **place, **text)


def draw_runs(axes, logs: list[Log], names: list[str], figure: str, factor: float, label: str) -> None:
    """Draw the share of runs at or below each value: mine in black, the reference in grey."""
    for log, name, color in zip(logs, names, (INK, BEHIND), strict=False):
        axes.ecdf(factor * getattr(log, figure), color=color, lw=1, label=name)
    axes.set_ylabel("share of runs")
    axes.set_xlabel(label, labelpad=1)
    for text in axes.legend(frameon=False, fontsize=6).get_texts():
        text.set_parse_math(False)


def draw_picture(logs: list[Log], labels: list[str], reference: Log, out: Path) -> None:
    """Draw and save; the runs of the first log with several are drawn over the reference's. Raise OSError."""
    from matplotlib import rcdefaults, rcParams
    from matplotlib.figure import Figure

    rcdefaults()  # whatever a matplotlibrc says
    rcParams.update(STYLE | {"svg.fonttype": "none"})
    campaign = next((i for i, log in enumerate(logs) if len(log.accuracy) > 1), None)
    rows, height = (1, 3.0) if campaign is None else (3, 4.9)
    figure = Figure(figsize=(3.5, height), layout="constrained")
    axes = figure.subplots(rows, 1, height_ratios=[2.4, 1, 1][:rows], squeeze=False)[:, 0]
    draw_curves(axes[0], logs, labels)
    if campaign is not None:
        sides, names = [logs[campaign], reference], [labels[campaign], with_other_images(reference.name, reference)]
        sides = sides[:1] if sides[0].name == reference.name else sides  # the reference is not drawn over itself
        draw_runs(axes[1], sides, names, "accuracy", 100, "final test accuracy, %")
        axes[1].axvline(100 * GOAL, zorder=0, **GOAL_LINE)
        draw_runs(axes[2], sides, names, "seconds", 1, "seconds")
    with write_atomically(out.resolve()) as unfinished:  # the target of a link, not the link
        figure.savefig(unfinished, dpi=200, format=out.suffix[1:].lower())


def with_other_images(name: str, log: Log) -> str:
    """Return the label, with the images where they are known and not CIFAR-10."""
    return name if (images := log.conditions.get("images", CIFAR_10)) == CIFAR_10 else f"{name}, on {images}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", help="run logs, runs.tsv, timing_log.tsv or other DAWNBench tables")
    parser.add_argument("--out", type=Path, default="timing.png", help="picture: .png, .svg or .pdf (timing.png)")
    parser.add_argument("--reference", default="published", help="campaign drawn in grey (published)")
    options = parser.parse_args(arguments)
    with exit_on_config_error("plot"):
        logs, reference = [read_log(name) for name in options.files], read_log(options.reference)
        alone = len(logs) == 1 and logs[0].name != reference.name
        names = ["mine"] if alone else [Path(log.name).name for log in logs]
        labels = [with_other_images(name, log) for name, log in zip(names, logs, strict=True)]
        try:
            if options.out.exists() and not options.out.is_file():
                raise OSError("it exists and is not a file")
            draw_picture(logs, labels, reference, options.out)
        except (OSError, ValueError) as error:  # of the disk, or a format that Matplotlib lacks
            raise ConfigError(f"--out {options.out} cannot be written ({error}): choose another") from error


if __name__ == "__main__":
    main()
