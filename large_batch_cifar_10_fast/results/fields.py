"""The kinds of numbers that tables and logs hold, and the answer to whoever wrote something else."""

import contextlib
import math
from dataclasses import dataclass

from ..settings.settings import MOST, ConfigError


@dataclass(frozen=True)
class Number:
    words: str  # that say what it is
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    or_nan: bool = False

    def read(self, text: str, where: str) -> float:
        """Raises ConfigError: `where` is 'long', not a number."""
        with contextlib.suppress(ValueError, OverflowError):
            value = float(int(text) if self.whole else text)
            if self.least <= value <= self.most or (self.or_nan and math.isnan(value)):
                return value
        raise ConfigError(f"{where} is {text[:40]!r}, not {self.words}")


LONGEST = 1e9  # seconds or hours; beyond, sums and ratios could overflow
COUNT = Number("a whole number", 0, 2**63, whole=True)
FROM_ONE = Number("a whole number above 0", 1, 2**63, whole=True)
RUNS = Number(f"a whole number from 1 to {MOST}", 1, MOST, whole=True)
FRACTION = Number("a number from 0 to 1", 0, 1)
LOSS = Number("a number", or_nan=True)  # of a run that diverged
TIME = Number("a number from 0 up, and finite", 0, LONGEST)
DURATION = Number("a number above 0, and finite", 1 / LONGEST, LONGEST)
