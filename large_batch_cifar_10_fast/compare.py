"""Compare a campaign with a reference: what differs, means with 99% confidence intervals, and what they show.

    python -m large_batch_cifar_10_fast.compare MINE [REFERENCE]

MINE and REFERENCE are a run log, a runs.tsv (FILE:CAMPAIGN for another campaign than its last, FILE:* for all), several
of them that are taken together (`a/runs.tsv,b/runs.tsv` or the pattern '*/runs.tsv'), a DAWNBench table, or
`published`: Apple's 50 runs, the default for apple2019 on CIFAR-10. Exit status: 0 mine is not shown to be worse, 1
mine is worse (in accuracy, or in time on the same devices), 2 unreadable, or no reference.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from . import ConfigError, exit_on_config_error
from .core.images import CIFAR_10
from .core.program import hyp_class
from .core.source import changed_lines
from .core.table import PLACE, differences
from .loading import decode
from .results import Log, compare_means, find_files, in_columns, read_log, verdict, wilson

TIME_MARGIN = 0.05  # times within 5% of the reference's are equivalent
BUSY = 0.95  # of the other side's CPU seconds a second: less is no equal share of the machine
QUANTITIES = {"accuracy": "accuracy, %", "validation_loss": "loss", "seconds": "seconds"}
QUANTITIES |= {"cpu_seconds": "CPU seconds", "goal_seconds": "seconds to 94%"}
MEANINGS = {"code": "the program or core/ was changed", "digest": "the images differ"}
LOOKING = "p holds for a number of runs chosen before looking. Adding runs until p is small finds chance differences."


def read_both(mine: str, reference: str) -> tuple[Log, Log]:
    """Return both logs, with their label smoothing. Raise ConfigError if there is no reference for mine."""
    log = read_log(mine)
    made = log.conditions.get("recipe"), log.conditions.get("images")
    if not reference and (made != ("apple2019", CIFAR_10) or log.name == "published"):
        raise ConfigError(f"{mine} needs a REFERENCE: only runs of apple2019 on {CIFAR_10} have one by default")
    logs = log, read_log(reference or "published")
    for log in logs:
        hyp = hyp_class(log.conditions.get("recipe", ""))
        if hyp:  # not every recipe has the option
            log.conditions.setdefault("label_smoothing", str(getattr(hyp, "label_smoothing", 0.0)))
    return logs


def differing_conditions(mine: Log, reference: Log) -> list[str]:
    """List where the conditions of the two sides differ or are unknown, and what else is to be known of them."""
    found = []
    for name in {**mine.conditions, **reference.conditions}:
        if text := differences(mine.conditions, reference.conditions, [name]):
            found.append(text + (f": {MEANINGS[name]}" if name in MEANINGS else ""))
    found += mine.notes + reference.notes
    for side, log in (("mine", mine), ("the reference", reference)):
        unknown = [n for n in ("recipe", "images", "code", "precision", *PLACE) if n not in log.conditions]
        unknown += [] if len(values(log, "cpu_seconds")) else ["CPU seconds"]
        found += [f"{side}, {log.name}: unknown {', '.join(unknown)}"] if unknown else []
    return found


def differing_lines(mine: tuple[str, Log], reference: tuple[str, Log]) -> list[str]:
    """Return the lines in which the programs of two campaigns differ, from the texts stored beside their tables."""
    old, new = (program_text(source, log.conditions.get("code", "")) for source, log in (reference, mine))
    if not old or not new:
        return []
    return changed_lines(old, new)


def program_text(source: str, code: str) -> list[str]:
    """Return the lines of the program with this digest, which its campaign stored; none if it did not."""
    for path, _ in find_files(source):
        text = Path(path).with_name(f"source-{code}.py")
        if code and text.exists():
            return decode(text.read_bytes()).splitlines()
    return []


def differing_place(mine: Log, reference: Log) -> str:
    """Return how device or number of processes differ, or that they are unknown; "" if they are known and equal."""
    pairs = [(name, *(log.conditions.get(name, "unknown") for log in (mine, reference))) for name in PLACE]
    return ", ".join(f"{name} {a} (mine) and {b} (reference)" for name, a, b in pairs if a != b or a == "unknown")


def busy_machine(mine: Log, reference: Log) -> str:
    """Return how one side had less of the CPU than the other, or "". On a GPU this says little about times."""
    if not mine.conditions.get("device", "").startswith("CPU"):
        return ""
    a, b = ((log.runs["cpu_seconds"] / log.runs["seconds"]).mean() for log in (mine, reference))
    shares = f"{a:.2f} (mine) and {b:.2f} (reference) CPU seconds a second"
    return f"{shares}: the machine was busy, or one side waits more" if min(a, b) < BUSY * max(a, b) else ""


def values(log: Log, name: str) -> pd.Series:
    """Return a quantity of all runs that have it, by seed, accuracies in percent."""
    return (100 if name == "accuracy" else 1) * log.runs.set_index("seed")[name].dropna()


def mean_and_deviation(numbers: pd.Series) -> str:
    deviation = f" ± {numbers.std():.3f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():.3f}{deviation}, n = {len(numbers)}" if len(numbers) else "unknown"


def runs_at_goal(log: Log) -> str:
    """Return the number of runs at 94%, with the 99% confidence interval of their share."""
    if log.reached is None:
        return f"unknown of {len(log.runs)}, accuracies are rounded"
    return "{} of {}, [{:.0%}, {:.0%}]".format(log.reached, len(log.runs), *wilson(log.reached, len(log.runs)))


def as_table(mine: Log, reference: Log, not_compared: Mapping[str, object]) -> str:
    """Return the table as text. A quantity for which `not_compared` is true has no difference."""
    cells = [("", "mine", "reference", "difference", "99% confidence interval", "p")]
    for name, title in QUANTITIES.items():
        a = values(mine, name)
        b = values(reference, name)
        if not len(a) + len(b):
            continue
        last = ("-", "-", "-")
        found = None if not_compared.get(name) else compare_means(a, b)
        if found:
            last = (f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}")
        cells.append((title, mean_and_deviation(a), mean_and_deviation(b), *last))
    cells.append(("runs at 94%", runs_at_goal(mine), runs_at_goal(reference), *"---"))
    return in_columns(cells)


def judge(mine: Log, reference: Log, name: str, unit: str, margin: float) -> tuple[str, str]:
    """Return the verdict on a quantity, and a sentence with its figures."""
    a, b = values(mine, name), values(reference, name)
    found = compare_means(a, b)
    word = verdict(found, more_is_better=name == "accuracy", margin=margin)
    if not found:
        return word, f"{word}: a single run has no spread."
    sentence = f"mine is {word}" if word in ("better", "worse") else word
    sentence += f" within {margin:.3g} {unit}" if word == "equivalent" else ""
    sentence += f": {found.difference:+.3f} {unit}, 99% interval [{found.low:+.3f}, {found.high:+.3f}]"
    sentence += f", p = {found.p:.2g}"
    sentence += f", in {found.pairs} pairs of the same seed" if found.pairs else ""
    if word == "no difference shown":
        runs = "these pairs" if found.pairs else f"{len(a)} and {len(b)} runs"
        sentence += f"; with {runs} a difference of {found.detectable:.3g} {unit} would be found four times in five"
    return word, sentence + "."


@exit_on_config_error("compare")
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mine")
    parser.add_argument("reference", nargs="?", default="")
    parser.add_argument("--margin", type=float, default=0.10, help="points of accuracy that are equivalent (0.10)")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    mine, reference = read_both(options.mine, options.reference)
    notes = differing_conditions(mine, reference) or ["nothing: code, options and machine are the same"]
    print("What differs (mine, not the reference's) or is unknown:", *notes, sep="\n  ", end="\n\n")
    if lines := differing_lines((options.mine, mine), (options.reference, reference)):
        print("Lines of the programs that differ (- reference, + mine):", *lines, sep="\n", end="\n\n")
    place, times = differing_place(mine, reference), values(reference, "seconds")
    diverged = "" if len(values(mine, "seconds")) and len(times) else "all runs of a side diverged"
    why_not = place or diverged or busy_machine(mine, reference)
    other_loss = differences(mine.conditions, reference.conditions, ["label_smoothing"])
    not_compared = {"goal_seconds": True, "validation_loss": other_loss, "seconds": why_not, "cpu_seconds": place}
    print(as_table(mine, reference, not_compared), end="\n\n")
    of_accuracy, sentence = judge(mine, reference, "accuracy", "points", options.margin)
    print(f"Accuracy: {sentence}")
    if differences(mine.conditions, reference.conditions, ["images", "digest"]):
        print("Images may differ: these intervals are of chance over runs, not of how hard the images are.")
    if other_loss:
        print(f"Loss: not compared: {other_loss}.")
    elif len(values(mine, "validation_loss")) and len(values(reference, "validation_loss")):
        of_loss, sentence = judge(mine, reference, "validation_loss", "in loss", margin=0)
        if of_loss in ("better", "worse"):
            print(f"Loss: {sentence}")
    of_time, sentence = "", f"not compared: {why_not}."
    if not why_not:
        of_time, sentence = judge(mine, reference, "seconds", "seconds", TIME_MARGIN * times.mean())
    print(f"Time: {sentence}\n\n{LOOKING}")
    return int("worse" in (of_accuracy, of_time))


if __name__ == "__main__":
    sys.exit(main())
