"""Compare campaigns with a reference: conditions, means with 99% confidence intervals, and verdicts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from .. import PACKAGE, PROGRAMS
from .results import Results, find_files
from .snapshot import Place, changed_lines
from .statistics import Comparison, compare_means, in_columns, in_markdown, verdict, wilson
from .table import OPTION, PLACE

MARGIN = 0.1  # points of accuracy that are equivalent
TIME_MARGIN = 0.05  # times within 5% of the reference's are equivalent
BUSY = 0.95  # of the other side's CPU seconds per second: a side below this had less of the machine
MAIN = ("recipe", "images", "test_images", "precision", *PLACE)  # conditions that are always listed
HEAD = ("n", "mean ± std", "difference", "99% interval", "p", "verdict")
OTHERS = ("not compared", "seeds", "parameters", "PFLOP", "CPU seconds", "seconds to 94%", "runs at 94%")
Cells = list[tuple[str, ...]]  # of a table, line by line; the first is its head


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
    campaigns: Mapping[str, Results], reference: str, margin: float = MARGIN, tests: int = 0, markdown: bool = False
) -> Report:
    """Compare campaigns with the reference, all by name. Bonferroni's correction counts `tests`, or all sides if 0."""
    as_table = in_markdown if markdown else in_columns
    base = campaigns[reference]
    sides = {name: each for name, each in campaigns.items() if name != reference}
    tests = max(tests, len(sides))
    margins = {ACCURACY: margin, LOSS: 0, TIME: TIME_MARGIN * seconds_of(base).mean()}
    verdicts: dict[str, dict[str, Verdict]] = {}
    tables = [conditions_table(campaigns)]
    for title, (values_of, more_is_better, forbids) in QUANTITIES.items():
        samples = {name: values_of(each) for name, each in campaigns.items()}
        verdicts[title] = {}
        for name, side in sides.items():
            why_not = why_diverged(side, base) or forbids(side, base)
            verdicts[title][name] = judge(
                samples[name], samples[reference], more_is_better, margins[title], tests, why_not
            )
        if any(map(len, samples.values())):
            tables.append(table_of(title, samples, verdicts[title], reference))
    texts = changes(sides, base)
    if markdown:
        texts = [f"```\n{text}\n```" for text in texts]
    notes = [*notes_on(verdicts), *best_and_equals(campaigns), legend(margin, tests)]
    separator = "\n\n" if markdown else "\n"
    parts = [*texts, *map(as_table, [*tables, other_figures(campaigns)]), separator.join(notes)]
    return Report("\n\n".join(parts), verdicts[ACCURACY], verdicts[TIME])


# ---- Quantities


def accuracies(campaign: Results) -> pd.Series:
    return 100 * values(campaign, "accuracy")


def values(campaign: Results, name: str) -> pd.Series:
    """Return a quantity of all runs that have it, by seed."""
    return campaign.runs.set_index("seed")[name].dropna()


def seconds_of(campaign: Results) -> pd.Series:
    """Return the mean seconds of each launch, by its first seed.

    A launch is one measurement: its runs share compiled code, the choice of kernels and the state of the device.
    """
    launches = campaign.runs.dropna(subset="seconds").groupby("launch")
    return pd.Series(launches["seconds"].mean().to_numpy(), launches["seed"].min().to_numpy(), dtype=float)


# ---- What forbids a verdict


def why_diverged(mine: Results, reference: Results) -> str:
    for each in (mine, reference):
        if each.diverged:
            return f"{each.diverged} of {each.count} runs of {each.name} diverged"
    return ""


def has_no_effect(mine: Results, reference: Results) -> str:
    """Return a text if all runs with common seeds are equal, bit for bit, or ""."""
    both = mine.runs.merge(reference.runs, on="seed")
    alike = [both[f"{name}_x"].equals(both[f"{name}_y"]) for name in ("accuracy", "validation_loss")]
    if mine.name == reference.name or both.empty or not all(alike) or both["validation_loss_x"].isna().any():
        return ""
    return f"its {len(both)} runs equal the reference's, bit for bit: the change has no effect"


def other_loss(mine: Results, reference: Results) -> str:
    """Return how the label smoothing differs, or that there is no effect. Recipes without this option have none."""
    a, b = (float(each.conditions.get(f"{OPTION}label_smoothing", 0)) for each in (mine, reference))
    return f"label_smoothing {a:g}, the reference's {b:g}" if a != b else has_no_effect(mine, reference)


def why_no_time(mine: Results, reference: Results) -> str:
    """Return why times say nothing: other devices, few launches, or a busy machine; otherwise ""."""
    for name in PLACE:
        a, b = (each.conditions.get(name, "unknown") for each in (mine, reference))
        if a != b or a == "unknown":
            return f"{name} {a}, the reference's {b}"
    counts = [len(seconds_of(each)) for each in (mine, reference)]
    if min(counts) < 2:
        return "{} and {} launches: a launch is one measurement, and each side needs two".format(*counts)
    # A process on a GPU uses the CPU little, and this says nothing about times.
    shares = [(each.runs["cpu_seconds"] / each.runs["seconds"]).mean() for each in (mine, reference)]
    if mine.conditions["device"].startswith("CPU") and min(shares) < BUSY * max(shares):
        text = "{:.2f} CPU seconds per second, the reference {:.2f}: the machine was busy, or one side waits more"
        return text.format(*shares)
    return ""


def judge(
    mine: pd.Series, reference: pd.Series, more_is_better: bool, margin: float, tests: int, why_not: str
) -> Verdict:
    """Compare two samples, unless something forbids it."""
    found = None if why_not else compare_means(mine, reference, tests)
    if not found:
        return Verdict("-", why_not=why_not or "a single run has no spread")
    if found.low == found.high != 0:
        return Verdict("-", why_not="all differences are equal, which can be chance with few runs or images")
    return Verdict(verdict(found, more_is_better, margin), found)


# Quantities by the title of their table: their values, whether more is better, and what forbids to compare them.
ACCURACY = "accuracy, %"
LOSS = "loss"
TIME = "seconds, by launch"
QUANTITIES: dict[str, tuple[Callable[[Results], pd.Series], bool, Callable[[Results, Results], str]]] = {
    ACCURACY: (accuracies, True, has_no_effect),
    LOSS: (lambda campaign: values(campaign, "validation_loss"), False, other_loss),
    TIME: (seconds_of, False, why_no_time),
}

# ---- Conditions


def conditions_table(campaigns: Mapping[str, Results]) -> Cells:
    """Return the main conditions of each campaign, and all that differ between campaigns."""
    table = pd.DataFrame({name: pd.Series(each.conditions, dtype=str) for name, each in campaigns.items()})
    others = table[(table.nunique(axis=1) > 1) & ~table.index.isin(MAIN)]
    shown = pd.concat([table.reindex([*MAIN]), others]).fillna("unknown")
    rows = [(name.removeprefix(OPTION), *texts) for name, *texts in shown.itertuples()]
    return [("conditions", *campaigns), *rows]


def changes(sides: Mapping[str, Results], base: Results) -> list[str]:
    """Return the lines in which programs differ from the reference's, by the copies beside their tables."""
    texts = []
    old = program_of(base)
    for name, side in sides.items():
        new = program_of(side)
        lines = changed_lines(old, new) if old.exists() and new.exists() else []
        if lines:
            texts.append("\n".join([f"Lines of {name} that differ (- reference, + {name}):", *lines]))
    return texts


def program_of(campaign: Results) -> Path:
    """Return the file of the program that the campaign kept, if it did."""
    out = find_files(campaign.name)[0][0].parent
    recipe = campaign.conditions.get("recipe", "")
    place = Place(out, campaign.campaign, f"{recipe}.py")
    if recipe in PROGRAMS and place.copies:
        return place.copies[0] / PACKAGE.name / f"{PROGRAMS[recipe]}.py"
    return place.program


# ---- Tables and notes


def table_of(title: str, samples: Mapping[str, pd.Series], verdicts: Mapping[str, Verdict], reference: str) -> Cells:
    """Return the table of a quantity. A line with a paired difference has the mean of the paired runs."""
    cells: Cells = [(title, *HEAD)]
    for name, sample in samples.items():
        word, found, _ = verdicts.get(name, Verdict("-"))
        count, mean, std = len(sample), sample.mean(), sample.std()
        compared = ("-", "-", "-")
        if found:
            compared = (f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}")
        if found and found.pairs:
            count, mean, std = found.pairs, found.mine, found.spread
        shown = f"{mean:.3f} ± {std:.3f}" if count > 1 else f"{mean:.3f}"
        label = f"{name} (reference)" if name == reference else name
        cells.append((label, str(count), shown if count else "unknown", *compared, word))
    return cells


def other_figures(campaigns: Mapping[str, Results]) -> Cells:
    """Return a table of figures that are not compared."""
    cells: Cells = [OTHERS]
    for name, each in campaigns.items():
        seeds = each.runs["seed"].dropna()
        shown = [f"{seeds.min():.0f} to {seeds.max():.0f}" if len(seeds) else "unknown"]
        shown += [each.conditions.get(size, "unknown") for size in ("parameters", "pflop")]
        for figures in (values(each, "cpu_seconds"), values(each, "goal_seconds")):
            shown.append(f"{figures.mean():.3f}, n = {len(figures)}" if len(figures) else "unknown")
        at_goal = f"unknown of {each.count}, accuracies are rounded"
        if each.reached is not None:
            low, high = wilson(each.reached, each.count)
            at_goal = f"{each.reached} of {each.count}, [{low:.0%}, {high:.0%}]"
        cells.append((name, *shown, at_goal))
    return cells


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


def best_and_equals(campaigns: Mapping[str, Results]) -> list[str]:
    """Return which campaign has the highest mean, and which are within noise of it; [] for fewer than three."""
    compared = {name: accuracies(each) for name, each in campaigns.items() if not each.diverged}
    if len(compared) < 3:
        return []
    best = max(compared, key=lambda name: compared[name].mean())
    near = []
    for name, sample in compared.items():
        found = compare_means(sample, compared[best], len(compared) - 1)
        if name != best and (not found or found.high >= 0):
            near.append(name)
    within = f"Within noise of it: {', '.join(near) or 'none'}"
    together = f"99% intervals, all {len(compared) - 1} together"
    return [f"Highest mean: {best} (likely too high, because the same runs chose it). {within} ({together})."]


def legend(margin: float, tests: int) -> str:
    equivalent = f"equivalent: within {margin:g} points of accuracy, or {TIME_MARGIN:.0%} of the seconds"
    return f"±: standard deviation over runs; {equivalent}; intervals and p: corrected for {tests} comparison(s)."
