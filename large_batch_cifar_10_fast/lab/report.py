"""Compare campaigns with a reference: conditions, means with 99% confidence intervals, and verdicts."""

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from .results import Results
from .statistics import FOUND, MARGIN, Comparison, compare_means, in_columns, in_markdown, mean_and_std, verdict
from .table import OPTION

# Conditions that are always listed.
MAIN = ("recipe", "images", "test_images", "precision", "pflop", "device", "processes")
HEAD = ("accuracy, %", "n", "mean ± std", "difference", "99% interval", "p", "verdict")
NO_SPREAD = "a single run, or all differences are equal"
Cells = list[tuple[str, ...]]  # a table, line by line; the first line is its head


class Verdict(NamedTuple):
    """The verdict on a campaign's accuracy, compared with the reference's."""

    word: str  # better, worse, equivalent, no difference shown; "-" if they are not compared
    found: Comparison | None = None
    why_not: str = ""  # the reason if they are not compared


class Report(NamedTuple):
    """A comparison as text, and its verdicts on accuracy by campaign."""

    text: str
    verdicts: dict[str, Verdict]


def compare(campaigns: Mapping[str, Results], reference: str, markdown: bool = False) -> Report:
    """Compare the accuracies of campaigns with the reference's. Bonferroni's correction counts all sides."""
    base = campaigns[reference]
    sides = {name: each for name, each in campaigns.items() if name != reference}
    verdicts = {name: judge(side, base, len(sides)) for name, side in sides.items()}
    as_text = in_markdown if markdown else in_columns
    tables = [as_text(conditions_table(campaigns)), as_text(accuracy_table(campaigns, verdicts))]
    return Report("\n\n".join([*tables, *notes_on(verdicts), legend(len(sides))]), verdicts)


def accuracies(campaign: Results) -> pd.Series:
    """Return the accuracy of each run in percent, by seed."""
    return 100 * campaign.runs.set_index("seed")["accuracy"]


def judge(mine: Results, reference: Results, tests: int) -> Verdict:
    """Compare the accuracies of two campaigns. Runs that diverged forbid it: the others are no fair sample."""
    for each in (mine, reference):
        if each.diverged:
            return Verdict("-", why_not=f"runs of {each.name} diverged ({each.diverged})")
    found = compare_means(accuracies(mine), accuracies(reference), tests)
    return Verdict(verdict(found), found) if found else Verdict("-", why_not=NO_SPREAD)


# ---- Tables and notes


def conditions_table(campaigns: Mapping[str, Results]) -> Cells:
    """Return the main conditions of each campaign, and all that differ between campaigns.

    Add seconds, unless devices differ and one of them is a CPU.
    """
    table = pd.DataFrame({name: pd.Series(each.conditions, dtype=str) for name, each in campaigns.items()})
    differing = table.index[table.nunique(axis=1) > 1]
    shown = table.reindex([*dict.fromkeys([*MAIN, *differing])]).fillna("unknown")
    rows = [(name.replace(OPTION, "--"), *texts) for name, *texts in shown.itertuples()]
    lines = [("conditions", *campaigns), *rows]
    devices = shown.loc["device"]
    if devices.nunique() == 1 or not devices.str.startswith("CPU").any():
        lines.append(("seconds", *(mean_and_std(each.runs["seconds"].dropna()) for each in campaigns.values())))
    return lines


def accuracy_table(campaigns: Mapping[str, Results], verdicts: Mapping[str, Verdict]) -> Cells:
    """Return the table of accuracies. A line with a paired difference has the mean of the paired runs."""
    cells: Cells = [HEAD]
    for name, each in campaigns.items():
        word, found, _ = verdicts.get(name, Verdict("reference"))
        compared = ("-", "-", "-")
        if found:
            compared = (f"{found.difference:+.3f}", f"[{found.low:+.3f}, {found.high:+.3f}]", f"{found.p:.2g}")
        own = found.sample if found else accuracies(each)
        cells.append((name, str(len(own)), mean_and_std(own), *compared, word))
    return cells


def notes_on(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return why campaigns are not compared, and how many runs find half a point."""
    notes = [f"{name}: not compared: {each.why_not}." for name, each in verdicts.items() if each.why_not]
    unclear = [each.found.runs for each in verdicts.values() if each.found and each.word.startswith("no ")]
    if unclear:
        notes.append(f"No difference shown: to find {FOUND} points four times in five, use --runs {max(unclear)}.")
    return notes


def legend(tests: int) -> str:
    return (
        f"±: standard deviation over runs; equivalent: within {MARGIN:g} points; "
        f"intervals and p hold for {tests} comparison(s) together."
    )
