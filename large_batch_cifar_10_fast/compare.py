"""Is my campaign as good as the reference? A table, and in words what may be concluded from it.

    python -m large_batch_cifar_10_fast.compare MINE [REFERENCE]

Exit status: 0 no shortfall shown, 1 mine is shown to be worse (in accuracy, or on the same hardware in time),
2 unreadable.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

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
    rows = [Row("runs", str(len(mine.accuracy)), str(len(reference.accuracy)))]
    known = mine.reached[0] == mine.reached[1] and reference.reached[0] == reference.reached[1]
    counts = mine.reached[0], len(mine.accuracy), reference.reached[0], len(reference.accuracy)
    rows.append(
        Row(
            "reached 94%",
            *(_reached(log) for log in (mine, reference)),
            100 * (counts[0] / counts[1] - counts[2] / counts[3]) if known else None,
            tuple(100 * bound for bound in newcombe(*counts)) if known else None,
        )
    )
    a, b = 100 * finite(mine.accuracy), 100 * finite(reference.accuracy)
    rows.append(_row("accuracy mean, %", a, b, np.mean, welch_interval(a, b)))
    exact = [(100 * log.median, 100 * log.lowest) for log in (mine, reference)]
    medians = [e[0] if math.isfinite(e[0]) else np.median(x) for e, x in zip(exact, (a, b), strict=True)]
    lowest = [e[1] if math.isfinite(e[1]) else x.min() for e, x in zip(exact, (a, b), strict=True)]
    rows.append(_figures("accuracy median, %", *medians, resampled_interval(a, b, _difference_of(np.median))))
    rows.append(_figures("accuracy lowest, %", *lowest))
    if min(len(a), len(b)) > 1:
        spread = resampled_interval(a, b, _difference_of(_std))
        rows.append(_figures("accuracy standard deviation, points", _std(a), _std(b), spread))
    a, b = finite(mine.loss), finite(reference.loss)
    rows.append(_row("loss mean", a, b, np.mean, welch_interval(a, b)))
    a, b = finite(mine.seconds), finite(reference.seconds)
    for name, statistic in (("median", np.median), ("mean", np.mean), ("longest", np.max)):
        interval = resampled_interval(a, b, _ratio_of(statistic)) if name != "longest" else None
        rows.append(_row(f"seconds {name}", a, b, statistic, interval, ratio=True))
    a, b = finite(mine.goal_seconds), finite(reference.goal_seconds)
    rows.append(_row("seconds to 94%, mean", a, b, np.mean, resampled_interval(a, b, _ratio_of(np.mean)), ratio=True))
    return rows


def _std(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1))


def _difference_of(statistic) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda a, b: statistic(a) - statistic(b)


def _ratio_of(statistic) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda a, b: statistic(a) / statistic(b)


def _row(name: str, a: np.ndarray, b: np.ndarray, statistic, interval, ratio: bool = False) -> Row:
    return _figures(name, *(statistic(x) if len(x) else math.nan for x in (a, b)), interval, ratio)


def _figures(name: str, mine: float, reference: float, interval=None, ratio: bool = False) -> Row:
    shown = (f"{value:.3f}" if math.isfinite(value) else "unknown" for value in (mine, reference))
    difference = mine / reference if ratio else mine - reference
    return Row(name, *shown, float(difference) if math.isfinite(difference) else None, interval, ratio)


def _reached(log: Log) -> str:
    (least, most), total = log.reached, len(log.accuracy)
    if least < most:
        return f"{least} to {most} of {total} (hidden by rounding)"
    low, high = wilson(least, total)
    return f"{least} of {total}, {least / total:.0%} ({low:.0%} to {high:.0%})"


def conclude(mine: Log, reference: Log, margin: float) -> dict[str, Conclusion]:
    """What may be said of accuracy (margin in points), of time (margin as a share), and of mine against the goal."""
    accuracy = judge(
        100 * finite(mine.accuracy),
        100 * finite(reference.accuracy),
        margin,
        "Accuracy",
        lambda x: f"{x:+.3f} points",
        more_is_better=True,
    )
    # Times are compared as ratios, so through their logarithms.
    time = judge(
        np.log(finite(mine.seconds)),
        np.log(finite(reference.seconds)),
        math.log1p(TIME_MARGIN),
        "Time",
        lambda x: f"{100 * math.expm1(x):+.1f}%",
        more_is_better=False,
    )
    goal = judge_goal(100 * finite(mine.accuracy), 100 * GOAL)
    return {"accuracy": accuracy, "time": time, "goal": goal}


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
        if log.rounding:
            found.append(f"{side} ({log.name}) rounds accuracies, to within {100 * log.rounding:g} points")
        diverged = len(log.accuracy) - len(finite(log.loss))
        if diverged and len(finite(log.loss)):
            found.append(f"{side} ({log.name}) has {diverged} runs without a finite loss, left out of its mean")
    return found


def _same(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def status(mine: Log, reference: Log, conclusions: dict[str, Conclusion]) -> int:
    """1 if mine is worse: in accuracy, or in time on hardware that both sides name alike."""
    device = mine.facts.get("device")
    comparable = device is not None and device == reference.facts.get("device")
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
    parser = argparse.ArgumentParser(
        prog="python -m large_batch_cifar_10_fast.compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
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
        told = {
            "mine": mine.name,
            "reference": reference.name,
            "goal": GOAL,
            "margin": options.margin,
            "notes": notes,
            "rows": [asdict(row) for row in rows],
            "conclusions": {name: asdict(conclusion) for name, conclusion in conclusions.items()},
            "status": result,
        }
        print(json.dumps(told, indent=2))
    else:
        print(as_text(notes, rows, conclusions))
    return result


if __name__ == "__main__":
    sys.exit(main())
