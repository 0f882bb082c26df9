"""Conditions of a campaign, and how two campaigns differ in them."""

from collections.abc import Mapping, Sequence

GOAL = 0.94  # accuracy
CONDITIONS = (  # what may show in a result
    *("recipe", "options", "workers", "digest", "code", "torch"),
    *("precision", "compile", "no_graph", "micro_batches", "environment"),
)
PLACE = ("device", "processes")  # where it was made, which decides the seconds alone


def differences(one: Mapping[str, str], other: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the conditions in which the two differ; an absent or empty value is unknown, and agrees with any."""
    both = [(name, one.get(name), other.get(name)) for name in names]
    return ", ".join(f"{name} ({a}, not {b})" for name, a, b in both if a and b and a != b)
