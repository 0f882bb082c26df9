"""Compare campaigns with a reference: differences in conditions, means with 99% confidence intervals, and verdicts.

    cifar10-fast compare night/runs.tsv day/runs.tsv published

The reference is the last campaign, or the one that --reference names. A single runs.tsv is not compared: the command
lists its campaigns and their progress. A campaign is one of
  FILE             the last campaign of a runs.tsv
  FILE:CAMPAIGN    a campaign of a runs.tsv; FILE:* is all of them as one
  '*/runs.tsv'     several tables as one
  published        Apple's 50 runs of apple2019 on CIFAR-10; published:NAME is an entry to DAWNBench
docs/experiments.md explains the intervals and verdicts.

Exit status: 0 none is worse, 1 one is worse (in accuracy, or in time on the same devices), 2 unreadable.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from .. import PACKAGE, PROGRAMS, ConfigError
from .options import command_parser
from .results import Log, find_files, names_of, read_log
from .snapshot import Place, changed_lines
from .statistics import Comparison, compare_means, in_columns, in_markdown, verdict, wilson
from .status import status_of
from .table import OPTION, PLACE, SIZES, differences

MARGIN = 0.1  # points of accuracy that are equivalent
TIME_MARGIN = 0.05  # times within 5% of the reference's are equivalent
BUSY = 0.95  # of the other side's CPU seconds per second: a side below this had less of the machine
HEAD = ("n", "mean ± std", "difference", "99% interval", "p", "verdict")


class Verdict(NamedTuple):
    """The verdict on a campaign in one quantity, compared with the reference."""

    word: str  # better, worse, equivalent, no difference shown; "-" if they are not compared
    found: Comparison | None = None
    why_not: str = ""  # the reason if they are not compared


class Report(NamedTuple):
    """A comparison as text, and its verdicts by campaign."""

    text: str
    accuracy: dict[str, Verdict]
    seconds: dict[str, Verdict]


def compare(
    logs: Mapping[str, Log], reference: str, margin: float = MARGIN, tests: int = 0, markdown: bool = False
) -> Report:
    """Compare logs with the reference log, all by name. Bonferroni's correction counts `tests`, or one per log if 0."""
    as_table = in_markdown if markdown else in_columns
    base = logs[reference]
    sides = {name: log for name, log in logs.items() if name != reference}
    tests = max(tests, len(sides))
    limits = {ACCURACY: margin, LOSS: 0, TIME: TIME_MARGIN * seconds_of(base).mean()}
    verdicts: dict[str, dict[str, Verdict]] = {title: {} for title in QUANTITIES}
    for name, log in sides.items():
        for title, (values_of, more_is_better, forbids) in QUANTITIES.items():
            why_not = why_diverged(log, base) or forbids(log, base)
            verdicts[title][name] = judge(
                values_of(log), values_of(base), more_is_better, limits[title], tests, why_not
            )
    tables = []
    for title, (values_of, _, _) in QUANTITIES.items():
        samples = {name: values_of(log) for name, log in logs.items()}
        if any(map(len, samples.values())):
            tables.append(as_table(table_of(title, samples, verdicts[title], reference)))
    texts = [differing_conditions(sides, base, reference), same_conditions(logs), differing_lines(sides, base)]
    if markdown:
        texts = [f"```\n{text}\n```" for text in texts if text]
    notes = [*notes_on(verdicts), *best_and_equals(logs), legend(margin, tests)]
    separator = "\n\n" if markdown else "\n"
    parts = [*texts, *tables, as_table(other_figures(logs)), separator.join(notes)]
    return Report("\n\n".join(part for part in parts if part), verdicts[ACCURACY], verdicts[TIME])


# ---- Values


def accuracies(log: Log) -> pd.Series:
    return 100 * values(log, "accuracy")


def losses(log: Log) -> pd.Series:
    return values(log, "validation_loss")


def values(log: Log, name: str) -> pd.Series:
    """Return a quantity of all runs that have it, by seed."""
    return log.runs.set_index("seed")[name].dropna()


def seconds_of(log: Log) -> pd.Series:
    """Return the mean seconds of each launch, by its first seed.

    A launch is one measurement: its runs share compiled code, the choice of kernels and the state of the device.
    """
    launches = log.runs.dropna(subset="seconds").groupby("launch")
    return pd.Series(launches["seconds"].mean().to_numpy(), launches["seed"].min().to_numpy(), dtype=float)


# ---- What may forbid a comparison


def other_loss(mine: Log, reference: Log) -> str:
    """Return how the label smoothing differs, or that there is no effect. Recipes without this option have none."""
    a, b = (float(log.conditions.get(f"{OPTION}label_smoothing", 0)) for log in (mine, reference))
    return f"label_smoothing {a:g}, the reference's {b:g}" if a != b else has_no_effect(mine, reference)


def why_no_time(mine: Log, reference: Log) -> str:
    return differing_place(mine, reference) or few_launches(mine, reference) or busy_machine(mine, reference)


def why_diverged(mine: Log, reference: Log) -> str:
    for log in (mine, reference):
        if log.diverged:
            return f"{log.diverged} of {log.count} runs of {log.name} diverged"
    return ""


def has_no_effect(mine: Log, reference: Log) -> str:
    """Return a text if all runs with common seeds are equal, bit for bit, or ""."""
    both = mine.runs.merge(reference.runs, on="seed")
    alike = [name for name in ("accuracy", "validation_loss") if both[f"{name}_x"].equals(both[f"{name}_y"])]
    is_same = mine.name != reference.name and len(both) and len(alike) == 2 and both["validation_loss_x"].notna().all()
    return f"its {len(both)} runs equal the reference's, bit for bit: the change has no effect" if is_same else ""


def differing_place(mine: Log, reference: Log) -> str:
    """Return how device or number of processes differ, or that they are unknown; "" if they are known and equal."""
    pairs = [(name, *(log.conditions.get(name, "unknown") for log in (mine, reference))) for name in PLACE]
    return ", ".join(f"{name} {a}, the reference's {b}" for name, a, b in pairs if a != b or a == "unknown")


def few_launches(mine: Log, reference: Log) -> str:
    counts = len(seconds_of(mine)), len(seconds_of(reference))
    if min(counts) > 1:
        return ""
    return "{} and {} launches: a launch is one measurement, and each side needs two".format(*counts)


def busy_machine(mine: Log, reference: Log) -> str:
    """Return a text if one side had less of the CPU than the other, or "". On a GPU this says little about times."""
    if not mine.conditions.get("device", "").startswith("CPU"):
        return ""
    a, b = ((log.runs["cpu_seconds"] / log.runs["seconds"]).mean() for log in (mine, reference))
    shares = f"{a:.2f} CPU seconds per second, the reference {b:.2f}"
    return f"{shares}: the machine was busy, or one side waits more" if min(a, b) < BUSY * max(a, b) else ""


def judge(
    mine: pd.Series, reference: pd.Series, more_is_better: bool, margin: float, tests: int, why_not: str
) -> Verdict:
    """Compare two samples, unless something forbids it."""
    found = None if why_not else compare_means(mine, reference, tests)
    if found and found.low == found.high != 0:
        return Verdict("-", why_not="all differences are equal, which can be chance with few runs or images")
    if not found:
        return Verdict("-", why_not=why_not or "a single run has no spread")
    return Verdict(verdict(found, more_is_better, margin), found)


# Quantities by the title of their table: their values, whether more is better, and what forbids to compare them.
ACCURACY = "accuracy, %"
LOSS = "loss"
TIME = "seconds, by launch"
QUANTITIES: dict[str, tuple[Callable[[Log], pd.Series], bool, Callable[[Log, Log], str]]] = {
    ACCURACY: (accuracies, True, has_no_effect),
    LOSS: (losses, False, other_loss),
    TIME: (seconds_of, False, why_no_time),
}

# ---- Texts


def differing_conditions(sides: Mapping[str, Log], base: Log, reference: str) -> str:
    """List where the conditions of each side differ from the reference's, and what is unknown."""
    lines = []
    for name, log in sides.items():
        found = []
        for condition in {**log.conditions, **base.conditions}:
            text = differences(log.conditions, base.conditions, [condition])
            if text:
                found.append(text)
        found = found or ["nothing: code, options and machine are the same"]
        lines += [f"  {name}: {text}" for text in [*found, *log.notes]]
    for name, log in [*sides.items(), (reference, base)]:
        unknown = [each for each in ("recipe", "images", "code", "precision", *PLACE) if each not in log.conditions]
        if unknown:
            lines.append(f"  {name}: unknown {', '.join(unknown)}")
    lines += [f"  {reference}: {text}" for text in base.notes]
    return "\n".join([f"What differs from {reference}, or is unknown:", *lines])


def same_conditions(logs: Mapping[str, Log]) -> str:
    """List the conditions that are known and alike."""
    names = ("recipe", "images", *SIZES, "test_images", "precision", "torch", *PLACE, "commit")
    found = {name: {log.conditions.get(name) for log in logs.values()} for name in names}
    alike = [
        f"{name} {next(iter(values))}" for name, values in found.items() if len(values) == 1 and None not in values
    ]
    return f"The same for all: {', '.join(alike)}" if alike and len(logs) > 1 else ""


def differing_lines(sides: Mapping[str, Log], base: Log) -> str:
    """Return the lines in which programs differ from the reference's, by the texts stored beside their tables."""
    parts = []
    old = program_text(base)
    for name, log in sides.items():
        new = program_text(log)
        lines = changed_lines(old, new) if old.exists() and new.exists() else []
        if lines:
            parts.append("\n".join([f"Lines of {name} that differ (- reference, + {name}):", *lines]))
    return "\n\n".join(parts)


def program_text(log: Log) -> Path:
    """Return the file of the program that the campaign kept, if it did."""
    out = find_files(log.name)[0][0].parent
    recipe = log.conditions.get("recipe", "")
    place = Place(out, log.campaign, f"{recipe}.py")
    if recipe in PROGRAMS and place.source:
        return place.source / PACKAGE.name / f"{PROGRAMS[recipe]}.py"
    return place.program


def table_of(
    title: str, samples: Mapping[str, pd.Series], verdicts: Mapping[str, Verdict], reference: str
) -> list[tuple[str, ...]]:
    """Return the table of a quantity as cells. A line with a paired difference has the mean of the paired runs."""
    cells: list[tuple[str, ...]] = [(title, *HEAD)]
    for name, sample in samples.items():
        verdict = verdicts.get(name)
        if verdict and verdict.found and verdict.found.pairs:
            found = verdict.found
            count, mean, spread = found.pairs, found.mine, found.spread
        else:
            count, mean, spread = len(sample), sample.mean(), sample.std()
        shown = f"{mean:.3f} ± {spread:.3f}" if count > 1 else f"{mean:.3f}"
        label = f"{name} (reference)" if name == reference else name
        cells.append((label, str(count), shown if count else "unknown", *cells_of(verdict)))
    return cells


def cells_of(given: Verdict | None) -> tuple[str, str, str, str]:
    if not given or not given.found:
        return "-", "-", "-", given.word if given else "-"
    found = given.found
    return f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}", given.word


def other_figures(logs: Mapping[str, Log]) -> list[tuple[str, ...]]:
    """Return figures that are not compared, as cells."""
    head = ("not compared", "seeds", "parameters", "PFLOP", "CPU seconds", "seconds to 94%", "runs at 94%")
    cells: list[tuple[str, ...]] = [head]
    for name, log in logs.items():
        times = [values(log, quantity) for quantity in ("cpu_seconds", "goal_seconds")]
        shown = [f"{each.mean():.3f}, n = {len(each)}" if len(each) else "unknown" for each in times]
        sizes = [log.conditions.get(size, "unknown") for size in ("parameters", "pflop")]
        cells.append((name, seeds_of(log), *sizes, *shown, runs_at_goal(log)))
    return cells


def seeds_of(log: Log) -> str:
    """Return the first and the last seed of a log's runs."""
    seeds = log.runs["seed"].dropna().astype(int)
    return f"{seeds.min()} to {seeds.max()}" if len(seeds) else "unknown"


def runs_at_goal(log: Log) -> str:
    """Return the number of runs at 94%, with the 99% confidence interval of their share."""
    if log.reached is None:
        return f"unknown of {log.count}, accuracies are rounded"
    return "{} of {}, [{:.0%}, {:.0%}]".format(log.reached, log.count, *wilson(log.reached, log.count))


def notes_on(verdicts: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """Return why quantities are not compared, and which difference of accuracy these runs find."""
    notes = []
    for title, of_sides in verdicts.items():
        quantity = title.partition(",")[0].capitalize()
        for why in dict.fromkeys(each.why_not for each in of_sides.values() if each.why_not):
            names = [name for name, each in of_sides.items() if each.why_not == why]
            notes.append(f"{quantity} of {', '.join(names)}: not compared: {why}.")
    unclear = [each.found for each in verdicts[ACCURACY].values() if each.found and each.word.startswith("no ")]
    if unclear:
        largest = max(found.detectable for found in unclear)
        found = f"these runs find a difference of {largest:.2g} points of accuracy four times in five"
        notes.append(f"No difference shown: {found}.")
    return notes


def best_and_equals(logs: Mapping[str, Log]) -> list[str]:
    """Return which campaign has the highest mean, and which are within noise of it; [] for fewer than three."""
    compared = {name: accuracies(log) for name, log in logs.items() if not log.diverged}
    if len(compared) < 3:
        return []
    best = max(compared, key=lambda name: compared[name].mean())
    near = []
    for name, sample in compared.items():
        found = compare_means(sample, compared[best], len(compared) - 1)
        if name != best and (not found or found.high >= 0):
            near.append(name)
    within = f"Within noise of it: {', '.join(near)}" if near else "None is within noise of it"
    together = f"99% intervals, all {len(compared) - 1} together"
    return [f"Highest mean: {best} (likely too high, because the same runs chose it). {within} ({together})."]


def legend(margin: float, tests: int) -> str:
    equivalent = f"equivalent: within {margin:g} points of accuracy, or {TIME_MARGIN:.0%} of the seconds"
    return f"±: standard deviation over runs; {equivalent}; intervals and p: corrected for {tests} comparison(s)."


# ---- The command


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("campaigns", nargs="+", metavar="CAMPAIGN")
    parser.add_argument(
        "--reference", default="", metavar="CAMPAIGN", help="campaign to compare with (default: the last)"
    )
    parser.add_argument("--margin", type=float, default=MARGIN, help="points of accuracy that are equivalent (0.1)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    sources = options.campaigns
    if options.reference:
        sources = [each for each in sources if each != options.reference] + [options.reference]
    if len(sources) == 1:
        print((in_markdown if options.markdown else in_columns)(status_of(sources[0])))
        return 0
    logs = [read_log(source) for source in sources]
    for log in logs:
        if not log.count:
            raise ConfigError(f"{log.name} has no finished run: wait for one, or name another FILE:CAMPAIGN")
    names = names_of(logs)
    report = compare(dict(zip(names, logs, strict=True)), names[-1], options.margin, markdown=options.markdown)
    print(report.text)
    words = [verdict.word for verdict in [*report.accuracy.values(), *report.seconds.values()]]
    return int("worse" in words)
