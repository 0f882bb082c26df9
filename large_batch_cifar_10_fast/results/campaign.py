"""A campaign as somebody's log tells it, and how its figures are read."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..settings.settings import Refusal
from .tables import GOAL, diverged

LARGEST = 64 << 20  # bytes of a file; a hundred thousand runs are less


@dataclass(frozen=True)
class Log:
    """A campaign as its log tells it, one entry a run; NaN where the log does not tell.

    `loss` is validation's, NaN where a run diverged, and empty where no loss is told.
    Accuracies are fractions, each within `rounding` of the true one (0: exact). `reached` are the least and
    the most runs that may have reached 94%. `epochs` is the first run's curve, seconds and accuracies, if told.
    """

    name: str
    accuracy: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    goal_seconds: np.ndarray
    reached: tuple[int, int]
    rounding: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lowest: float = math.nan  # these two more exactly than the rounded accuracies tell them, where a summary does
    median: float = math.nan
    epochs: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def diverged(self) -> int:
        return int((~np.isfinite(self.loss)).sum())


def bounds(accuracy: np.ndarray, rounding: float) -> tuple[int, int]:
    """The least and the most of these accuracies that are truly at 94%, each known to within `rounding`."""
    slack = 1e-12  # of binary fractions
    return int((accuracy - rounding >= GOAL - slack).sum()), int((accuracy + rounding >= GOAL - slack).sum())


def decimals(texts: list[str]) -> int:
    return max(len(text.partition(".")[2]) for text in texts)


def losses(rows: Iterable[Mapping[str, str]]) -> np.ndarray:
    """Of validation; NaN where a run diverged."""
    return np.array([math.nan if diverged(row) else float(row["validation_loss"]) for row in rows])


def read_bounded(source: str) -> bytes:
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise Refusal(f"{source}: cannot be read ({error})") from error
    if len(content) > LARGEST:
        raise Refusal(f"{source}: larger than {LARGEST >> 20} MiB, so no log or table of runs: name another file")
    return content
