"""The line of systems that are recipes here, in figures: docs/lineage.md's table and picture.

    python -m large_batch_cifar_10_fast.lineage [--picture FILE]

Parameters, multiply-adds and work are counted on the recipes themselves; seconds are those published.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from .networks import work
from .options import exit_on_config_error
from .plot import BEHIND, INK, WIDTH, check_picture, new_figure, save_picture, spread
from .recipe import Recipe
from .recipes.apple2019 import Apple2019
from .recipes.basenet import Basenet
from .recipes.fastai import FastAI
from .recipes.muon import Muon2024, MuonRecipe
from .recipes.page import Page

TRAINING_IMAGES = 50_000


@dataclass(frozen=True)
class System:
    """What was published: network, rate over the epochs (for a step's mean loss; muon: of the filters), and seconds: on
    what, to where, and what the clock behind them counts."""

    name: str
    recipe: Recipe
    year: int
    network: str
    rate: str
    seconds: float | None  # not measured yet
    hardware: str
    clock: str


ONE_CYCLE = "0.04 → 2 (17.5) → 0.04 (35) → 0.0004 (40)"
ONE_CYCLE_ALONE = "0.075 → 1.5 (12) → 0.075 (24) → 0.00075 (30)"
KINK = "0 → 0.1 (15), 0.105 → 0.005 (30) → 0 (35)"
WIDE, PREACTIVATION, CLEANED = "wide ResNet 22-6", "pre-activation ResNet-18", "the same, without its first norm"
WITH_VALIDATION = "validation, too, until 94%"
SYSTEMS = (
    System(
        "fastai --entry one_gpu", FastAI(entry="one_gpu"), 2018, WIDE, ONE_CYCLE_ALONE, 404.1, "1 V100", WITH_VALIDATION
    ),
    System(
        "basenet",
        Basenet(),
        2018,
        PREACTIVATION,
        f"{KINK}, 0.0005 (40)",
        340.6,
        "1 V100",
        "validation, too, not set-up, until 94%",
    ),
    System("fastai", FastAI(), 2018, WIDE, ONE_CYCLE, 174.0, "8 V100", WITH_VALIDATION),
    System("page --starting_point", Page(starting_point=True), 2018, PREACTIVATION, KINK, 356, "1 V100", "not said"),
    System("page", Page(), 2018, CLEANED, "0 → 0.1 (15) → 0.005 (30) → 0 (35)", 297, "1 V100", "not said"),
    System(
        "apple2019",
        Apple2019(),
        2019,
        "ResNet-9, whitened, ghost norms",
        "0 → 1.5 (3.6) → 0.15 (16)",
        7.885,
        "8 V100",
        "upload and training alone",
    ),
    System("muon2024", Muon2024(), 2024, "6 convolutions, whitened", "0.24 → 0 (8)", 2.59, "1 A100", "validation, too"),
    System("muon", MuonRecipe(), 2026, "the same", "0.24 → 0 (9)", None, "-", "-"),
)
HEAD = ("recipe", "network", "parameters", "G multiply-adds, forward", "workers x batch", "epochs", "rate (at epoch)")
HEAD += ("work, PFLOP", "seconds, published", "on", "its clock counts, until")


def pflop(recipe: Recipe) -> float:
    return work(recipe, TRAINING_IMAGES) / 1e15


def multiply_adds(recipe: Recipe) -> float:
    """Of an image of 32 pixels forward, 1e9 of them, by torch's counter."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        recipe.network().eval()(torch.empty(1, 3, 32, 32))
    return counter.get_total_flops() / 2e9


def as_table() -> str:
    """In Markdown, a row a system."""
    lines = [f"| {' | '.join(HEAD)} |", f"| {' | '.join(['---'] * len(HEAD))} |"]
    for system in SYSTEMS:
        recipe = system.recipe
        trained = sum(weight.numel() for weight in recipe.network().parameters() if weight.requires_grad)
        cells = [f"`{system.name}`", system.network, f"{trained:,}", f"{multiply_adds(recipe):.3f}"]
        cells += [f"{recipe.workers} x {recipe.batch_size}", str(recipe.epochs), system.rate, f"{pflop(recipe):.2f}"]
        seconds = f"{system.seconds:g}" if system.seconds else "not measured yet"
        lines.append(f"| {' | '.join([*cells, seconds, system.hardware, system.clock])} |")
    return "\n".join(lines)


def draw(out: Path) -> None:
    """Work and published seconds against the year, both by factors of ten."""
    figure = new_figure(2 * WIDTH, 2.6)
    axes = figure.subplots(1, 2)
    work_of_a_run = [pflop(system.recipe) for system in SYSTEMS]
    named = [f"{system.name}: {value:.4g}" for system, value in zip(SYSTEMS, work_of_a_run, strict=True)]
    draw_against_year(axes[0], [system.year for system in SYSTEMS], work_of_a_run, named, "work of a run, PFLOP")
    timed = [system for system in SYSTEMS if system.seconds]
    named = [f"{system.name}, {system.hardware}: {system.seconds:.4g} ({system.clock})" for system in timed]
    seconds = [system.seconds for system in timed]
    draw_against_year(
        axes[1], [system.year for system in timed], seconds, named, "seconds published (its clock counts)"
    )
    save_picture(figure, out)


def draw_against_year(axes, years: list[int], values: list[float], named: list[str], label: str) -> None:
    """A point a system, and what it is beside it, moved up or down where texts would meet."""
    low, high = min(values) / 2, max(values) * 2
    axes.set(yscale="log", xlim=(2017.5, 2029), ylim=(low, high), xlabel="year", ylabel=label)
    axes.set_xticks([2018, 2020, 2022, 2024, 2026])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.plot(years, values, "o", ms=3, color=INK)
    places = spread(np.log10(values), 0.055 * np.log10(high / low), np.log10(low), np.log10(high))
    for year, text, value, place in zip(years, named, values, places, strict=True):
        line = {"arrowstyle": "-", "lw": 0.4, "color": BEHIND, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        axes.annotate(text, (year, value), (year + 0.5, 10**place), va="center", fontsize=6, arrowprops=line)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.lineage", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--picture", default="", help="file for the picture: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    with exit_on_config_error("lineage"):
        if options.picture:
            check_picture("--picture", Path(options.picture))
            draw(Path(options.picture))
    print(as_table())


if __name__ == "__main__":
    main()
