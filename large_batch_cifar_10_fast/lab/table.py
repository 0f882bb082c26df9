"""The columns of tables: what a run's row says, and the conditions that the runs of a campaign share."""

import math
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from ..core.clock import PARTS

Row = dict[str, str]

GOAL = 0.94  # accuracy
OPTION = "hyp."  # before the name of an option of the recipe, so that it cannot be taken for another column
TIMES = (*PARTS, "seconds", "cpu_seconds", "last_validation", "peak_memory", "goal_seconds")
NUMBERS = (
    *("run", "seed", "train_accuracy", "train_loss", "validation_accuracy", "validation_count", "validation_images"),
    *("validation_loss", "goal_epoch", *TIMES),
)
EPOCHS = (
    *("campaign", "run", "epoch", "seconds"),
    *("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"),
)


def diverged(row: Mapping[str, object]) -> bool:
    return not all(math.isfinite(float(str(row[name]))) for name in ("train_loss", "validation_loss"))


def reached_goal(row: Mapping[str, object]) -> bool:
    """Return whether a run reached 94%, by its number of correct images. A diverged run did not."""
    return not diverged(row) and int(str(row["validation_count"])) >= GOAL * int(str(row["validation_images"]))


# ---- Conditions


def differences(one: Mapping[str, str], other: Mapping[str, str], names: Iterable[str]) -> str:
    """Return where two rows differ, as `precision (bf16, not fp32), --epochs (9, not 8)`, or "".

    A value that one side lacks is no difference.
    """
    pairs = {name.replace(OPTION, "--"): (one.get(name), other.get(name)) for name in names}
    found = [f"{name} ({a}, not {b})" for name, (a, b) in pairs.items() if a and b and a != b]
    return ", ".join(found)


def must_agree(name: str) -> bool:
    """Return whether all runs of a campaign must have the same value of this column."""
    return name not in ("campaign", "commit", "version", "data", "images", "launch", "driver", "clocks")


def new_name() -> str:
    """Return a name that no other launch has, not even one in another container in the same second."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
