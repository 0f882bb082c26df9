"""Write pictures."""

from pathlib import Path

from matplotlib.figure import Figure

from ..files import write_atomically


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure, in the format that the path ends with. Raise OSError, or ValueError for an unknown format."""
    with write_atomically(path.resolve()) as unfinished:  # a link's target, not the link
        figure.savefig(unfinished, format=path.suffix[1:].lower())
