"""Write pictures, with fonts that have their characters."""

import contextlib
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from .. import ConfigError, list_some
from ..core.team import warn
from ..files import write_atomically


def write_picture(figure: Figure, path: Path, option: str) -> None:
    """Write a figure, in the format that the path ends with. Raise ConfigError that names the option."""
    add_font(figure, f"{option} {path}")
    try:
        if path.exists() and not path.is_file():
            raise OSError("it exists and is not a file")
        with write_atomically(path.resolve()) as unfinished, warnings.catch_warnings():  # a link's target, not the link
            warnings.filterwarnings("ignore", "Glyph")  # add_font warns of missing characters
            figure.savefig(unfinished, format=path.suffix[1:].lower())
    except (OSError, ValueError, RuntimeError) as error:  # of the disk, or a format that Matplotlib or LaTeX lacks
        raise ConfigError(f"{option} {path} cannot be written ({error}): choose another") from error


def add_font(figure: Figure, name: str) -> None:
    """Draw characters that the default font lacks, such as Chinese, in another font of this machine. Warn without one.

    Other texts are all found. Of tick labels, only those that our code sets are, because Matplotlib makes the others
    when it draws.
    """
    default = FT2Font(font_manager.findfont(font_manager.FontProperties()))
    texts = figure.findobj(Text)
    used = sorted({c for text in texts for c in text.get_text() if c.isprintable()})
    missing = [c for c in used if not has_all(default, c)]
    if not missing:
        return
    family = find_font(missing)
    if not family:
        lacking = f"{name}: no font of this machine has {list_some(missing, 5)}"
        warn(f"{lacking}: install one that has all, for example Noto Sans CJK")
        return
    logging.getLogger(font_manager.__name__).setLevel(logging.ERROR)  # or it reports each missing weight many times
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), family])


def has_all(font: FT2Font, characters: Iterable[str]) -> bool:
    return all(font.get_char_index(ord(c)) for c in characters)


def find_font(characters: Iterable[str]) -> str | None:
    """Return the family of a font of this machine that has these characters, a regular one if possible."""
    files = sorted(font_manager.findSystemFonts(), key=lambda file: ("Regular" not in file, file))
    for file in files:
        with contextlib.suppress(OSError, RuntimeError):  # damaged, or without outlines
            font = FT2Font(file)
            if has_all(font, characters) and "LastResort" not in file:  # macOS's boxes for all characters
                font_manager.fontManager.addfont(file)
                return font.family_name
    return None
