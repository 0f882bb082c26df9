"""Compare campaigns with a reference: conditions, means with 99% confidence intervals, and verdicts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from .results import Results
from .statistics import Comparison, compare_means, in_columns, in_markdown, mean_and_std, verdict
from .table import OPTION, PLACE

MARGIN = 0.1  # points of accuracy that are equivalent
TIME_MARGIN = 0.05  # times within 5% of the reference's are equivalent
MAIN = ("recipe", "images", "test_images", "precision", "pflop", *PLACE)  # conditions that are always listed
HEAD = ("n", "mean ± std", "difference", "99% interval", "p", "verdict")
NO_SPREAD = "a single run, or all differences are equal, which can be chance or a change without effect"
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
    base = campaigns[reference]
    sides = {name: each for name, each in campaigns.items() if name != reference}
    tests = max(tests, len(sides))
    percents = {name: accuracies(each) for name, each in campaigns.items()}
    times = {name: seconds_of(each) for name, each in campaigns.items()}
    time_margin = TIME_MARGIN * times[reference].mean()
    of_accuracy = {}
    of_time = {}
    for name, side in sides.items():
        diverged = why_diverged(side, base)
        of_accuracy[name] = judge(percents[name], percents[reference], True, margin, tests, diverged)
        why_not = diverged or why_no_time(side, base)
        of_time[name] = judge(times[name], times[reference], False, time_margin, tests, why_not)
    tables = [
        conditions_table(campaigns),
        table_of("accuracy, %", percents, of_accuracy),
        table_of("seconds, by launch", times, of_time),
    ]
    notes = [*notes_on("Accuracy", of_accuracy), *notes_on("Seconds", of_time), legend(margin, tests)]
    texts = [in_markdown(table) if markdown else in_columns(table) for table in tables]
    return Report("\n\n".join([*texts, *notes]), of_accuracy, of_time)


# ---- Quantities


def accuracies(campaign: Results) -> pd.Series:
    """Return the accuracy of each run in percent, by seed."""
    return 100 * campaign.runs.set_index("seed")["accuracy"]


def seconds_of(campaign: Results) -> pd.Series:
    """Return the mean seconds of each launch, by its first seed.

    A launch is one measurement: its runs share compiled code, the choice of kernels and the state of the device.
    """
    launches = campaign.runs.dropna(subset="seconds").groupby("launch")
    return pd.Series(launches["seconds"].mean().to_numpy(), launches["seed"].min().to_numpy(), dtype=float)


# ---- Verdicts


def why_diverged(mine: Results, reference: Results) -> str:
    for each in (mine, reference):
        if each.diverged:
            return f"{each.diverged} of {each.count} runs of {each.name} diverged"
    return ""


def why_no_time(mine: Results, reference: Results) -> str:
    """Return why times say nothing: other devices, or few launches; otherwise ""."""
    for name in PLACE:
        a, b = (each.conditions.get(name, "unknown") for each in (mine, reference))
        if a != b or a == "unknown":
            return f"{name} {a}, the reference's {b}"
    if min(len(seconds_of(each)) for each in (mine, reference)) < 2:
        return "a launch is one measurement, and each side needs two"
    return ""


def judge(
    mine: pd.Series, reference: pd.Series, more_is_better: bool, margin: float, tests: int, why_not: str
) -> Verdict:
    """Compare two samples, unless something forbids it."""
    found = None if why_not else compare_means(mine, reference, tests)
    if not found:
        return Verdict("-", why_not=why_not or NO_SPREAD)
    return Verdict(verdict(found, more_is_better, margin), found)


# ---- Tables and notes


def conditions_table(campaigns: Mapping[str, Results]) -> Cells:
    """Return the main conditions of each campaign, all that differ between campaigns, and the runs at 94%."""
    table = pd.DataFrame({name: pd.Series(each.conditions, dtype=str) for name, each in campaigns.items()})
    differing = table.index[table.nunique(axis=1) > 1]
    shown = table.reindex([*dict.fromkeys([*MAIN, *differing])]).fillna("unknown")
    rows = [(name.removeprefix(OPTION), *texts) for name, *texts in shown.itertuples()]
    at_goal = [f"{each.reached} of {each.count}" for each in campaigns.values()]
    return [("conditions", *campaigns), *rows, ("runs at 94%", *at_goal)]


def table_of(title: str, samples: Mapping[str, pd.Series], verdicts: Mapping[str, Verdict]) -> Cells:
    """Return the table of a quantity. A line with a paired difference has the mean of the paired runs."""
    cells: Cells = [(title, *HEAD)]
    for name, sample in samples.items():
        word, found, _ = verdicts.get(name, Verdict("reference"))
        compared = ("-", "-", "-")
        if found:
            compared = (f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}")
        own = found.sample if found else sample
        cells.append((name, str(len(own)), mean_and_std(own), *compared, word))
    return cells


def notes_on(quantity: str, verdicts: Mapping[str, Verdict]) -> Sequence[str]:
    """Return why campaigns are not compared, and which difference these runs find."""
    notes = [f"{quantity} of {name}: not compared: {each.why_not}." for name, each in verdicts.items() if each.why_not]
    unclear = [each.found.detectable for each in verdicts.values() if each.found and each.word.startswith("no ")]
    if unclear:
        notes.append(f"{quantity}: these runs find a difference of {max(unclear):.2g} four times in five.")
    return notes


def legend(margin: float, tests: int) -> str:
    equivalent = f"equivalent: within {margin:g} points of accuracy, or {TIME_MARGIN:.0%} of the seconds"
    return f"±: standard deviation over runs; {equivalent}; intervals and p: corrected for {tests} comparison(s)."
