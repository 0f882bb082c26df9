"""Compare a campaign with a reference: means with 95% confidence intervals, and what they show.

    python -m large_batch_cifar_10_fast.compare MINE [REFERENCE]

MINE and REFERENCE are a run log, a runs.tsv, several of them that are taken together (`a/runs.tsv,b/runs.tsv` or the
pattern '*/runs.tsv'), a timing_log.tsv or other DAWNBench table, or `published`: Apple's 50 runs, the default for
apple2019 on CIFAR-10. Exit status: 0 mine is not shown to be worse, 1 mine is worse (in accuracy, or in time on the
same devices), 2 unreadable, or no reference.
"""

import argparse
import sys

import numpy as np

if not __package__:  # started as a file, not with -m
    sys.path[0], __package__ = __file__.rsplit("/", 2)[0], "large_batch_cifar_10_fast"

from . import ConfigError, exit_on_config_error
from .data.cifar10 import CIFAR_10
from .read_logs import Log, read_log
from .runs import PLACE, differences
from .stats import verdict, welch, wilson

TIME_MARGIN = 0.05  # times within 5% of the reference's are equivalent
QUANTITIES = {"accuracy": "accuracy, %", "validation_loss": "loss", "seconds": "seconds"}
QUANTITIES |= {"goal_seconds": "seconds to 94%"}


def read_both(mine: str, reference: str, campaign: str) -> tuple[Log, Log]:
    """Return both logs. Without a reference take the published runs, or raise ConfigError if they are none for mine."""
    log = read_log(mine, campaign)
    made = log.conditions.get("recipe"), log.conditions.get("images")
    if not reference and (made != ("apple2019", CIFAR_10) or log.name == "published"):
        raise ConfigError(f"{mine} needs a REFERENCE: only runs of apple2019 on {CIFAR_10} have one by default")
    return log, read_log(reference or "published")


def differing_conditions(mine: Log, reference: Log) -> list[str]:
    """List where the conditions of the two sides differ or are unknown, and what else is to be known of them."""
    found = [*mine.notes, *reference.notes]
    for name in {**mine.conditions, **reference.conditions}:
        found.append(differences(mine.conditions, reference.conditions, [name]))
    for side, log in (("mine", mine), ("the reference", reference)):
        unknown = ", ".join(n for n in ("recipe", "images", "precision", *PLACE) if n not in log.conditions)
        found.append(f"{side}, {log.name}: unknown {unknown}" if unknown else "")
    return [line for line in found if line]


def why_times_are_not_compared(mine: Log, reference: Log) -> str:
    """Return how device or number of processes differ, or that they are unknown; "" if they are known and equal."""
    pairs = [(name, *(log.conditions.get(name, "unknown") for log in (mine, reference))) for name in PLACE]
    return ", ".join(f"{name} {a} (mine) and {b} (reference)" for name, a, b in pairs if a != b or a == "unknown")


def values(log: Log, name: str) -> np.ndarray:
    """Return a quantity of all runs that have it, accuracies in percent."""
    return (100 if name == "accuracy" else 1) * log.runs[name].dropna().to_numpy()


def mean_and_deviation(numbers: np.ndarray) -> str:
    deviation = f" ± {numbers.std(ddof=1):.3f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():.3f}{deviation}, n = {len(numbers)}" if len(numbers) else "unknown"


def runs_at_goal(log: Log) -> str:
    """Return the number of runs at 94%, with the 95% confidence interval of their share."""
    if log.reached is None:
        return f"unknown of {len(log.runs)}, accuracies are rounded"
    return "{} of {}, [{:.0%}, {:.0%}]".format(log.reached, len(log.runs), *wilson(log.reached, len(log.runs)))


def as_table(mine: Log, reference: Log, with_times: bool) -> str:
    """Return the table as text. Without `with_times` times have no difference."""
    cells = [("", "mine", "reference", "difference", "95% confidence interval", "p")]
    for name, title in QUANTITIES.items():
        a, b = values(mine, name), values(reference, name)
        found = welch(a, b) if with_times or "seconds" not in name else None
        last = (f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}") if found else ()
        cells.append((title, mean_and_deviation(a), mean_and_deviation(b), *(last or "---")))
    cells.append(("runs at 94%", runs_at_goal(mine), runs_at_goal(reference), *"---"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


@exit_on_config_error("compare")
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mine")
    parser.add_argument("reference", nargs="?", default="")
    parser.add_argument("--margin", type=float, default=0.10, help="points of accuracy that are equivalent (0.10)")
    parser.add_argument("--campaign", default="", help="which campaign of a runs.tsv given as MINE (default its last)")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    mine, reference = read_both(options.mine, options.reference, options.campaign)
    if notes := differing_conditions(mine, reference):
        print("Conditions that differ (mine, not the reference's) or are unknown:", *notes, sep="\n  ", end="\n\n")
    not_compared = why_times_are_not_compared(mine, reference)
    print(as_table(mine, reference, not not_compared), end="\n\n")
    accuracy = welch(values(mine, "accuracy"), values(reference, "accuracy"), options.margin)
    of_accuracy, of_time = verdict(accuracy, more_is_better=True), ""
    within = f" within {options.margin:g} points" if of_accuracy == "equivalent" else ""
    print(f"Accuracy: {of_accuracy}{within}; {accuracy or 'a single run has no spread'}.")
    if not_compared:
        print(f"Time: not compared: {not_compared}.")
    else:
        a, b = values(mine, "seconds"), values(reference, "seconds")
        time = welch(a, b, TIME_MARGIN * b.mean())
        of_time = verdict(time, more_is_better=False)
        within = f" within {TIME_MARGIN:.0%}" if of_time == "equivalent" else ""
        print(f"Time: {of_time}{within}; {time or 'a single run has no spread'}.")
    return int("worse" in (of_accuracy, of_time))


if __name__ == "__main__":
    sys.exit(main())
