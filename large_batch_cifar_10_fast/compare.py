"""Compare a campaign with a reference: a table with 95% confidence intervals, and what follows from them.

    python -m large_batch_cifar_10_fast.compare MINE [REFERENCE]

MINE and REFERENCE are a run log, a runs.tsv, shares of a campaign (`share0/runs.tsv,share1/runs.tsv` or the pattern
'share*/runs.tsv'), a timing_log.tsv or other DAWNBench table, or `published`. Without REFERENCE a log of the same
recipe on the same images is taken. Exit status: 0 mine is not shown to be worse, 1 mine is worse (in accuracy, or
on the same hardware in time), 2 unreadable, or no reference.
"""

import argparse
import json
import math
import operator
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from .campaign import CONDITIONS, GOAL
from .options import CIFAR_10, REPO, SYNTHETIC, ConfigError, exit_on_config_error
from .read_logs import Log, read_log
from .stats import Conclusion, finite, judge, judge_goal, newcombe, resampled_interval, welch_interval, wilson

LOGS = REPO / "logs"
ENVIRONMENT = {"images", "device", "processes", "clock", *CONDITIONS}  # may differ between a run and its reference
TIME_MARGIN = 0.05  # times within 5% count as equivalent


@dataclass(frozen=True)
class TableRow:
    """A line of the table. `difference` and `interval` are a ratio's if `ratio` is set."""

    name: str
    mine: str
    reference: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    ratio: bool = False


def pick_reference(mine: Log) -> tuple[Log, str]:
    """Return the reference made under the same conditions, and why it was taken. Raise ConfigError if there is none."""
    recipe, images = mine.conditions.get("recipe"), mine.conditions.get("images")
    if not recipe or not images:
        raise ConfigError(f"{mine.name} does not say its recipe and images: name a REFERENCE, for instance `published`")
    if (recipe, images) == ("apple2019", CIFAR_10):
        return read_log("published"), "apple2019 on CIFAR-10, the 50 published runs"
    logs = [read_log(str(path)) for path in sorted(LOGS.rglob("runs*.tsv"))]
    logs = [log for log in logs if _decisive(log) == _decisive(mine)]
    if not logs:
        raise ConfigError(f"no log in {LOGS} has the options and images of {mine.name}: name a REFERENCE")

    def rank(log: Log) -> tuple:
        alike = [log.conditions.get(name) == mine.conditions.get(name) for name in ("precision", "device")]
        return os.path.realpath(log.name) != os.path.realpath(mine.name), *alike, len(log.accuracy)

    return max(logs, key=rank), f"{recipe} with the same options on the same images, {images}"


def _decisive(log: Log) -> dict[str, object]:
    """Return the conditions that decide the weights: the images' digest, the recipe and its options."""
    decisive = {name: _number(value) for name, value in log.conditions.items() if name not in ENVIRONMENT}
    if log.conditions.get("images") == SYNTHETIC:
        decisive.pop("digest", None)  # it differs between CPUs: NumPy's sine differs in its last bit
    return decisive


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def table(*logs: Log) -> list[TableRow]:
    """Return the rows of the comparison, accuracies in percent."""
    accuracy, medians, lowest = ([100 * getattr(log, key) for log in logs] for key in ("accuracy", "median", "lowest"))
    loss, goal = ([finite(getattr(log, key)) for log in logs] for key in ("loss", "goal_seconds"))
    seconds, std = [log.seconds for log in logs], partial(np.std, ddof=1)
    several = min(map(len, accuracy)) > 1
    return [
        TableRow("runs", *(str(len(log.accuracy)) for log in logs)),
        _reached_row(*logs),
        _row("accuracy mean, %", accuracy, np.mean, welch_interval),
        _row("accuracy median, %", accuracy, np.median, exact=medians),
        _row("accuracy lowest, %", accuracy, np.min, None, exact=lowest),
        *([_row("accuracy standard deviation, points", accuracy, std)] if several else []),
        _row("loss mean", loss, np.mean, welch_interval),
        _row("seconds median", seconds, np.median, ratio=True),
        _row("seconds mean", seconds, np.mean, ratio=True),
        _row("seconds longest", seconds, np.max, None, ratio=True),
        _row("seconds to 94%, mean", goal, np.mean, ratio=True),
    ]


def _row(name, pair, statistic, interval_of=resampled_interval, ratio=False, exact=(math.nan, math.nan)) -> TableRow:
    """Return a statistic of both sides, `exact` where it is known, with the difference or ratio and its interval."""
    compare = operator.truediv if ratio else operator.sub
    known = [statistic(x) if len(x) and not math.isfinite(e) else e for x, e in zip(pair, exact, strict=True)]
    texts = [f"{value:.3f}" if math.isfinite(value) else "unknown" for value in known]
    difference = float(compare(*known))
    interval = interval_of(*pair) if interval_of is welch_interval else None
    if interval_of is resampled_interval:
        interval = resampled_interval(*pair, lambda a, b: compare(statistic(a), statistic(b)))
    return TableRow(name, *texts, difference if math.isfinite(difference) else None, interval, ratio)


def _reached_row(*logs: Log) -> TableRow:
    bounds, texts = [(*log.reached, len(log.accuracy)) for log in logs], []
    for count, most, n in bounds:
        exactly = "{} of {}, {:.0%} [{:.0%}, {:.0%}]".format(count, n, count / n, *wilson(count, n))
        texts.append(exactly if count == most else f"{count} to {most} of {n} (rounded)")
    (a, a_most, m), (b, b_most, n) = bounds
    if (a, b) != (a_most, b_most):
        return TableRow("reached 94%", *texts)
    return TableRow("reached 94%", *texts, 100 * (a / m - b / n), tuple(100 * bound for bound in newcombe(a, m, b, n)))


def conclude(mine: Log, reference: Log, margin: float) -> dict[str, Conclusion]:
    """Conclude on accuracy (margin in points), on time (through logarithms, as ratios), and on mine at the goal."""
    (a, c), (b, d) = ((100 * log.accuracy, np.log(log.seconds)) for log in (mine, reference))
    accuracy = judge(a, b, margin, "Accuracy", lambda x: f"{x:+.3f} points", more_is_better=True)
    for side, log, verdict in (("the reference", reference, "open"), ("mine", mine, "worse")):
        if log.diverged == len(log.accuracy):
            accuracy = Conclusion(verdict, f"Accuracy: all {log.diverged} runs of {side} diverged.")
    time = judge(c, d, math.log1p(TIME_MARGIN), "Time", lambda x: f"{100 * math.expm1(x):+.1f}%", more_is_better=False)
    return {"accuracy": accuracy, "time": time, "goal": judge_goal(a, 100 * GOAL)}


def differing_conditions(mine: Log, reference: Log) -> list[str]:
    """List where the conditions of the two sides differ, or are unknown."""
    found, a, b = [*mine.notes, *reference.notes], mine.conditions, reference.conditions
    differing = [name for name in a if name in b and _number(a[name]) != _number(b[name])]
    found += [f"{name}: {a[name]} (mine), {b[name]} (reference)" for name in differing]
    for side, log in ((f"mine ({mine.name})", mine), (f"the reference ({reference.name})", reference)):
        if unknown := [name for name in ("images", "device", "clock") if name not in log.conditions]:
            found.append(f"{side}: unknown {', '.join(unknown)}")
        if log.rounding:
            found.append(f"{side} rounds accuracies, to within {100 * log.rounding:g} points")
        if 0 < log.diverged < len(log.loss):
            found.append(f"{side}: {log.diverged} runs diverged, left out of the mean loss")
    return found


def as_text(notes: list[str], rows: list[TableRow], conclusions: dict[str, Conclusion]) -> str:
    cells = [("", "mine", "reference", "difference or ratio", "95% confidence interval")]
    for row in rows:
        form, sign = ("{:.3f}", "x ") if row.ratio else ("{:+.3f}", "")
        difference = "unknown" if row.difference is None else sign + form.format(row.difference)
        interval = f"[{form}, {form}]".format(*row.interval) if row.interval else "-"
        cells.append((row.name, row.mine, row.reference, difference, interval))
    cells[1] = (*cells[1][:3], "", "")  # of the number of runs
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    head = ["Conditions that differ or are unknown:", *(f"  {note}" for note in notes), ""] if notes else []
    return "\n".join([*head, *lines, "", *(conclusion.text for conclusion in conclusions.values())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mine")
    parser.add_argument("reference", nargs="?")
    parser.add_argument("--margin", type=float, default=0.10, help="points that count as equivalent (0.10)")
    parser.add_argument("--campaign", help="which campaign of a runs.tsv given as MINE (default its last)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    with exit_on_config_error("compare"):
        mine = read_log(options.mine, options.campaign)
        reference, why = (read_log(options.reference), "named") if options.reference else pick_reference(mine)
    notes, rows = differing_conditions(mine, reference), table(mine, reference)
    conclusions = conclude(mine, reference, options.margin)
    same_device = mine.conditions.get("device", "mine") == reference.conditions.get("device", "reference")
    status = int("worse" in (conclusions["accuracy"].verdict, conclusions["time"].verdict if same_device else ""))
    if options.json:
        found = {"mine": mine.name, "reference": reference.name, "why": why, "goal": GOAL, "margin": options.margin}
        found |= {"rows": rows, "conclusions": conclusions, "notes": notes, "status": status}
        print(json.dumps(found, indent=2, default=asdict))
    else:
        print(f"Reference: {reference.name} ({why})\n\n" * (not options.reference) + as_text(notes, rows, conclusions))
    return status


if __name__ == "__main__":
    sys.exit(main())
