"""One picture of what was measured, before what was published.

    python -m large_batch_cifar_10_fast.plot FILE... [--out PICTURE]

Above, test accuracy against training seconds: the given logs in front, DAWNBench's entries of 2018 to 2020
behind. Below, where a log holds several runs, how their accuracies and times are distributed, beside the reference's.
"""

import argparse
from pathlib import Path

import numpy as np

from .results.logs import PUBLISHED, Log, read_log
from .results.pictures import BEHIND, INK, WIDTH, new_figure, refuse_picture, save_picture, spread
from .results.tables import GOAL
from .settings.settings import CIFAR_10, refusals_end

ENTRIES = {  # DAWNBench's files, and what to call them in a picture
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


def draw_curves(axes, logs: list[Log], labels: list[str]) -> None:
    """Accuracy against seconds; every line is named at its end, above the picture."""
    lines = [(label, read_log(str(PUBLISHED / "dawnbench" / f"{name}.tsv")), False) for name, label in ENTRIES.items()]
    lines += [(label, log, True) for label, log in zip(labels, logs, strict=True)]
    ends = []
    for _, log, own in lines:
        x, y = log.epochs or (log.seconds, log.accuracy)
        style = {"color": INK, "lw": 1.6, "zorder": 4} if own else {"color": BEHIND, "lw": 0.7, "zorder": 2}
        if log.epochs:
            axes.plot(x, 100 * y, **style)
        else:
            axes.plot(x, 100 * y, "o", ms=2.5, mec=INK, mfc="white" if len(x) > 1 else INK, mew=0.5, zorder=4)
        last = np.argmax(x) if log.epochs else np.argsort(x)[len(x) // 2]
        ends.append((x[last], 100 * y[last]))
    every = np.concatenate([(log.epochs or (log.seconds,))[0] for _, log, _ in lines])
    every = every[every > 0]
    low, high = np.log10(every.min()) - 0.1, np.log10(every.max()) + 0.15
    bottom, top = 40.0, 101.0
    axes.set(xscale="log", xlim=(10**low, 10**high), ylim=(bottom, top), ylabel="test accuracy, %")
    axes.set_xlabel("training time, seconds", labelpad=1)
    axes.axhline(100 * GOAL, color=INK, lw=0.6, ls=(0, (4, 3)), zorder=3)
    axes.text(10**low, 100 * GOAL + 0.4, " 94%", va="bottom", ha="left", fontsize=6)
    gap = (high - low) * 0.042  # a label's height as a share of the axis
    places = spread(np.log10([x for x, _ in ends]), gap, low + gap / 2, high - gap / 2)
    for (label, _, own), (x, y), place in zip(lines, ends, places, strict=True):
        color, weight = (INK, "bold") if own else ("0.35", "normal")
        axes.annotate(
            label,
            xy=(x, np.clip(y, bottom, top)),
            xytext=(10**place, 1.05),
            textcoords=axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=6,
            color=color,
            weight=weight,
            annotation_clip=False,
            parse_math=False,  # a file may be called $x$
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": color, "shrinkA": 0, "shrinkB": 0},
        )


def draw_runs(axes, logs: list[Log], names: list[str], figure: str, factor: float) -> None:
    """The share of runs at or below each value, one step a run: mine in black, the reference in grey."""
    for log, name, color in zip(logs, names, (INK, BEHIND), strict=False):
        axes.ecdf(factor * getattr(log, figure), color=color, lw=1, label=name)
    axes.set_ylabel("share of runs")
    for text in axes.legend(frameon=False, fontsize=6).get_texts():
        text.set_parse_math(False)


def picture(logs: list[Log], labels: list[str], reference: Log, out: Path) -> None:
    """Draw and save; the runs of the first log that holds several are set over the reference's."""
    campaign = next((i for i, log in enumerate(logs) if len(log.accuracy) > 1), None)
    rows, height = (1, 3.0) if campaign is None else (3, 4.9)
    figure = new_figure(WIDTH, height)
    axes = figure.subplots(rows, 1, height_ratios=[2.4, 1, 1][:rows], squeeze=False)
    draw_curves(axes[0, 0], logs, labels)
    axes[0, 0].xaxis.set_major_formatter("{x:g}")
    if campaign is not None:
        sides, names = [logs[campaign], reference], [labels[campaign], with_other_images(reference.name, reference)]
        sides = sides[:1] if sides[0].name == reference.name else sides  # the reference is not drawn over itself
        draw_runs(axes[1, 0], sides, names, "accuracy", 100)
        axes[1, 0].axvline(100 * GOAL, color=INK, lw=0.6, ls=(0, (4, 3)), zorder=0)
        axes[1, 0].set_xlabel("final test accuracy, %", labelpad=1)
        draw_runs(axes[2, 0], sides, names, "seconds", 1)
        axes[2, 0].set_xlabel("seconds", labelpad=1)
    save_picture(figure, out)


def with_other_images(name: str, log: Log) -> str:
    """Beside curves of CIFAR-10 a result on other images says so, where its log does, or the table beside it."""
    images = log.facts.get("images", CIFAR_10)
    return name if images == CIFAR_10 else f"{name}, on {images}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", help="run logs, runs.tsv, timing_log.tsv or other DAWNBench tables")
    parser.add_argument("--out", default="timing.png", help="picture to write: .png, .svg or .pdf (timing.png)")
    parser.add_argument("--reference", default="published", help="campaign to set the first one over (published)")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    with refusals_end("plot"):
        refuse_picture("--out", out)
        logs, reference = [read_log(name) for name in options.files], read_log(options.reference)
        alone = len(logs) == 1 and logs[0].name != reference.name
        names = ["mine"] if alone else [Path(log.name).name for log in logs]
        labels = [with_other_images(name, log) for name, log in zip(names, logs, strict=True)]
        picture(logs, labels, reference, out)


if __name__ == "__main__":
    main()
