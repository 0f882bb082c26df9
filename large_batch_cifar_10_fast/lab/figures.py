"""Make pictures in our style, and write them."""

from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from ..files import write_atomically

STYLE: dict[str, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "0.9",
    "axes.grid": True,
}
STYLE |= {"text.parse_math": False, "lines.markeredgewidth": 0, "legend.frameon": False}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, whatever a matplotlibrc says."""
    style.use(["default", "seaborn-v0_8-colorblind", STYLE])  # colors for all eyes
    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure, in the format that the path ends with. Raise OSError, or ValueError for an unknown format."""
    with write_atomically(path.resolve()) as unfinished:  # a link's target, not the link
        figure.savefig(unfinished, format=path.suffix[1:].lower())
