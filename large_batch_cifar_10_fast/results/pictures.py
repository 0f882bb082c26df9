"""What all pictures share: their style, and where they may be written."""

import os
import tempfile
from pathlib import Path

import numpy as np

from ..settings.settings import Refusal
from .journal import written_whole

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH = 3.5  # inches, a column's
BEHIND, INK = "0.6", "0.0"
STYLE = {"font.size": 7, "axes.linewidth": 0.5, "svg.fonttype": "none"}


def refuse_picture(option: str, out: Path) -> None:
    if out.suffix.lower() not in SUFFIXES:
        raise Refusal(f"{option} {out} must end in {', '.join(SUFFIXES)}")
    if not out.absolute().parent.is_dir():
        raise Refusal(f"{option} {out}: there is no folder {out.absolute().parent}")
    if out.exists() and not out.is_file():
        raise Refusal(f"{option} {out} is there and is no file: choose another name")


def new_figure(width: float, height: float):
    """Matplotlib's Figure, for files alone, of these inches; imported here because it takes a second."""
    # It caches its fonts at import; a home folder that cannot be written must not matter.
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), "matplotlib-cache"))
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE | {"axes.spines.right": False, "axes.spines.top": False})
    return Figure(figsize=(width, height), layout="constrained")


def save_picture(figure, out: Path) -> None:
    """Whole or not at all; raises Refusal if it cannot be written."""
    try:
        with written_whole(out.resolve()) as unfinished:  # what a link leads to, not the link
            figure.savefig(unfinished, dpi=200, format=out.suffix[1:].lower())
    except OSError as error:
        raise Refusal(
            f"{out} cannot be written ({error.strerror or error}): make room or choose another place"
        ) from error


def spread(places: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move places apart until neighbours are `gap` away from each other, within [low, high] if they fit.

    Order is kept, and nobody moves further than crowding asks for.
    """
    order = np.argsort(places, kind="stable")
    moved = places[order].astype(float)
    for _ in range(200):
        overlap = gap - np.diff(moved)
        crowded = overlap > 1e-9
        if not crowded.any():
            break
        push = np.where(crowded, overlap / 2, 0)
        moved[:-1] -= push
        moved[1:] += push
        moved = np.clip(moved, low, high)
    return moved[np.argsort(order)]


def draw_bars(axes, names: list[str], values: list[float], label: str) -> None:
    """Horizontal bars from the top down, each with its figure at its end."""
    bars = axes.barh(names, values, color=BEHIND, height=0.6)
    axes.bar_label(bars, [f" {value:.3g}" if value < 1000 else f" {value:.0f}" for value in values], fontsize=6)
    axes.set(xlabel=label, xlim=(0, 1.15 * max(values)))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
