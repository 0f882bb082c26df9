"""The line of systems that are recipes here, in figures: docs/lineage.md's table and picture.

    python -m large_batch_cifar_10_fast.lineage [--picture FILE]

Parameters and work are counted on the recipes themselves; seconds are those published.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from .recipes.apple2019 import Apple2019
from .recipes.basenet import Basenet
from .recipes.fastai import FastAI
from .recipes.muon import Muon2024, MuonRecipe
from .recipes.page import Page
from .results.pictures import WIDTH, draw_bars, refuse_picture, save_picture, start_drawing
from .settings.settings import refusals_end
from .training.networks import work
from .training.recipe import Recipe

TRAINING_IMAGES = 50_000


@dataclass(frozen=True)
class System:
    """What was published: seconds to 94%, on what, and what the clock behind them counts."""

    name: str
    recipe: Recipe
    year: int
    seconds: float | None  # not measured yet
    hardware: str
    clock: str


SYSTEMS = (
    System("fastai --entry one_gpu", FastAI(entry="one_gpu"), 2018, 404.1, "1 V100", "validation, too"),
    System("basenet", Basenet(), 2018, 340.6, "1 V100", "validation, too; not set-up"),
    System("fastai", FastAI(), 2018, 174.0, "8 V100", "validation, too"),
    System("page --starting_point", Page(starting_point=True), 2018, 356, "1 V100", "not said"),
    System("page", Page(), 2018, 297, "1 V100", "not said"),
    System("apple2019", Apple2019(), 2019, 7.885, "8 V100", "upload and training alone"),
    System("muon2024", Muon2024(), 2024, 2.59, "1 A100", "validation, too"),
    System("muon", MuonRecipe(), 2026, None, "-", "-"),
)


def pflop(recipe: Recipe) -> float:
    return work(recipe, TRAINING_IMAGES) / 1e15


def as_table() -> str:
    """In Markdown, a row a system."""
    lines = [
        "| recipe | parameters | workers x batch | epochs | work, PFLOP | seconds, published | on | its clock counts |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for system in SYSTEMS:
        recipe = system.recipe
        trained = sum(weight.numel() for weight in recipe.network().parameters() if weight.requires_grad)
        cells = [f"`{system.name}`", f"{trained:,}", f"{recipe.workers} x {recipe.batch_size}", str(recipe.epochs)]
        seconds = f"{system.seconds:g}" if system.seconds else "not measured yet"
        cells += [f"{pflop(recipe):.2f}", seconds, system.hardware, system.clock]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(out: Path) -> None:
    plt = start_drawing()
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 3.2), layout="constrained")
    timed = [system for system in SYSTEMS if system.seconds]
    names = {system: f"{system.name}, {system.year}" for system in SYSTEMS}
    draw_bars(axes[0], list(names.values()), [pflop(system.recipe) for system in SYSTEMS], "work of a run, PFLOP")
    on = [f"{names[system]}, {system.hardware}" for system in timed]
    draw_bars(axes[1], on, [system.seconds for system in timed], "seconds to 94%, by its own clock")
    save_picture(figure, out)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.lineage", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--picture", default="", help="file for the picture: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    with refusals_end("lineage"):
        if options.picture:
            refuse_picture("--picture", Path(options.picture))
            draw(Path(options.picture))
    print(as_table())


if __name__ == "__main__":
    main()
