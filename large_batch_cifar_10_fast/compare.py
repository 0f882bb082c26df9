"""Is my campaign as good as the reference? A table, and in words what may be concluded from it.

    python -m large_batch_cifar_10_fast.compare MINE [REFERENCE]

Exit status: 0 no shortfall shown, 1 mine is shown to be worse (in accuracy, or on the same hardware in time),
2 unreadable.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from .results.logs import Log, read_log
from .results.stats import Conclusion, finite, judge, judge_goal, newcombe, resampled_interval, welch_interval, wilson
from .results.tables import GOAL
from .settings.settings import REPO, refusals_end

DEFAULT = str(REPO / "run_log.txt")
TIME_MARGIN = 0.05  # times within 5% count as equivalent


@dataclass(frozen=True)
class Row:
    """A line of the table. `difference` and `interval` are a ratio's where `ratio` is set."""

    name: str
    mine: str
    reference: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    ratio: bool = False


def table(mine: Log, reference: Log) -> list[Row]:
    """The rows of the comparison, accuracies in percent."""
    names = ("accuracy", "loss", "seconds", "goal_seconds")
    accuracy, loss, seconds, goal = ([finite(getattr(log, name)) for log in (mine, reference)] for name in names)
    accuracy = [100 * values for values in accuracy]
    medians, lowest = ([100 * getattr(log, name) for log in (mine, reference)] for name in ("median", "lowest"))
    rows = [
        Row("runs", str(len(mine.accuracy)), str(len(reference.accuracy))),
        _reached_row(mine, reference),
        _row("accuracy mean, %", accuracy, np.mean, welch_interval),
        _row("accuracy median, %", accuracy, np.median, resampled_interval, exact=medians),
        _row("accuracy lowest, %", accuracy, np.min, exact=lowest),
        _row("loss mean", loss, np.mean, welch_interval),
        _row("seconds median", seconds, np.median, resampled_interval, ratio=True),
        _row("seconds mean", seconds, np.mean, resampled_interval, ratio=True),
        _row("seconds longest", seconds, np.max, ratio=True),
        _row("seconds to 94%, mean", goal, np.mean, resampled_interval, ratio=True),
    ]
    if min(map(len, accuracy)) > 1:
        std = partial(np.std, ddof=1)
        rows.insert(5, _row("accuracy standard deviation, points", accuracy, std, resampled_interval))
    return rows


def _row(name: str, pair: list, statistic, interval_of=None, ratio: bool = False, exact=(math.nan, math.nan)) -> Row:
    """A statistic of both sides, unless it is known more exactly, with their difference or ratio and its interval."""

    def between(a: np.ndarray, b: np.ndarray) -> float:
        return statistic(a) / statistic(b) if ratio else statistic(a) - statistic(b)

    known = [statistic(x) if len(x) and not math.isfinite(e) else e for x, e in zip(pair, exact, strict=True)]
    shown = [f"{value:.3f}" if math.isfinite(value) else "unknown" for value in known]
    difference = known[0] / known[1] if ratio else known[0] - known[1]
    interval = None
    if interval_of:
        interval = interval_of(*pair) if interval_of is welch_interval else interval_of(*pair, between)
    return Row(name, *shown, float(difference) if math.isfinite(difference) else None, interval, ratio)


def _reached_row(*logs: Log) -> Row:
    shown, counts = [], []
    for log in logs:
        (least, most), total = log.reached, len(log.accuracy)
        counts += [least, total]
        low, high = wilson(least, total)
        exactly = f"{least} of {total}, {least / total:.0%} ({low:.0%} to {high:.0%})"
        shown.append(exactly if least == most else f"{least} to {most} of {total} (hidden by rounding)")
    if any(least < most for least, most in (log.reached for log in logs)):
        return Row("reached 94%", *shown)
    difference = 100 * (counts[0] / counts[1] - counts[2] / counts[3])
    return Row("reached 94%", *shown, difference, tuple(100 * bound for bound in newcombe(*counts)))


def conclude(mine: Log, reference: Log, margin: float) -> dict[str, Conclusion]:
    """What may be said of accuracy (margin in points), of time (margin as a share), and of mine against the goal."""
    a, b = (100 * log.accuracy for log in (mine, reference))
    # Times are compared as ratios, so through their logarithms.
    c, d = (np.log(log.seconds) for log in (mine, reference))
    ratio_margin = math.log1p(TIME_MARGIN)
    accuracy = judge(a, b, margin, "Accuracy", lambda x: f"{x:+.3f} points", more_is_better=True)
    for side, log, verdict in (("the reference", reference, "open"), ("mine", mine, "worse")):
        if log.diverged == len(log.accuracy):
            accuracy = Conclusion(verdict, f"Accuracy: all {log.diverged} runs of {side} diverged.")
    return {
        "accuracy": accuracy,
        "time": judge(c, d, ratio_margin, "Time", lambda x: f"{100 * math.expm1(x):+.1f}%", more_is_better=False),
        "goal": judge_goal(a, 100 * GOAL),
    }


def differing_conditions(mine: Log, reference: Log) -> list[str]:
    """Where the two sides were not made under the same conditions, or do not say so."""
    found = list(mine.notes + reference.notes)
    for name in dict.fromkeys([*mine.facts, *reference.facts]):
        a, b = mine.facts.get(name), reference.facts.get(name)
        if a is not None and b is not None and not _same(a, b):
            found.append(f"{name}: {a} (mine), {b} (reference)")
    for side, log in (("mine", mine), ("the reference", reference)):
        silent = [name for name in ("images", "device") if name not in log.facts]
        if silent:
            found.append(f"{side} ({log.name}) does not say on which {' and '.join(silent)}")
        if "clock" not in log.facts:
            found.append(f"{side} ({log.name}) does not say what its clock counts")
        if log.rounding:
            found.append(f"{side} ({log.name}) rounds accuracies, to within {100 * log.rounding:g} points")
        if 0 < log.diverged < len(log.loss):
            found.append(f"{side} ({log.name}) has {log.diverged} runs without a finite loss, left out of its mean")
    return found


def _same(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def status(mine: Log, reference: Log, conclusions: dict[str, Conclusion]) -> int:
    """1 if mine is worse: in accuracy, or in time on hardware that both sides name alike."""
    comparable = "device" in mine.facts and mine.facts["device"] == reference.facts.get("device")
    slower = comparable and conclusions["time"].verdict == "worse"
    return int(conclusions["accuracy"].verdict == "worse" or slower)


def as_text(notes: list[str], rows: list[Row], conclusions: dict[str, Conclusion]) -> str:
    cells = [("", "mine", "reference", "difference or ratio", "95% interval")]
    for row in rows:
        sign = "x {:.3f}" if row.ratio else "{:+.3f}"
        difference = sign.format(row.difference) if row.difference is not None else "unknown"
        interval = " to ".join(sign.format(x).lstrip("x ") for x in row.interval) if row.interval else "-"
        if row.name == "runs":
            difference = interval = ""
        cells.append((row.name, row.mine, row.reference, difference, interval))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    head = ["Made under other conditions, or not said to be under the same:", *(f"  {n}" for n in notes), ""]
    return "\n".join([*(head if notes else []), *lines, "", *(c.text for c in conclusions.values())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mine", help="a run log, runs.tsv, timing_log.tsv or other DAWNBench table, or `published`")
    parser.add_argument("reference", nargs="?", default=DEFAULT, help="the same (default: run_log.txt)")
    parser.add_argument("--margin", type=float, default=0.10, help="points that count as equivalent (0.10)")
    parser.add_argument("--campaign", help="which campaign of a runs.tsv given as MINE (default its last)")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    with refusals_end("compare"):
        mine, reference = read_log(options.mine, options.campaign), read_log(options.reference)
    notes, rows = differing_conditions(mine, reference), table(mine, reference)
    conclusions = conclude(mine, reference, options.margin)
    result = status(mine, reference, conclusions)
    if options.json:
        summary = {"mine": mine.name, "reference": reference.name, "goal": GOAL, "margin": options.margin}
        summary["rows"] = [asdict(row) for row in rows]
        summary["conclusions"] = {name: asdict(conclusion) for name, conclusion in conclusions.items()}
        print(json.dumps(summary | {"notes": notes, "status": result}, indent=2))
    else:
        print(as_text(notes, rows, conclusions))
    return result


if __name__ == "__main__":
    sys.exit(main())
