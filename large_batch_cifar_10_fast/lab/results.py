"""Read the results of campaigns from runs.tsv and the epochs.tsv beside it, into one `Log`."""

import csv
import glob
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .. import PACKAGE, ConfigError, first_line
from .table import CONDITIONS, EPOCHS, GOAL, OPTION, PLACE, SIZES

PUBLISHED = PACKAGE / "published" / "runs.tsv"
MAY_DIFFER = (*PLACE, "commit")  # among the runs of a log
LOSSES = ("train_loss", "validation_loss")
FIGURES = (
    *("seed", "validation_accuracy", "validation_count", "validation_images"),
    *LOSSES,
    *("seconds", "cpu_seconds", "goal_seconds"),
)


@dataclass(frozen=True)
class Log:
    """The results of a campaign.

    `runs` has a row per run that did not diverge: seed, accuracy (a fraction), validation_loss, seconds, cpu_seconds,
    goal_seconds (the time to 94%), NaN where unknown, and launch. `reached` counts the runs at 94%; None if accuracies
    are rounded. `epochs` has a row per epoch, also of unfinished runs: epoch, seconds, accuracy and losses.
    """

    name: str
    campaign: str
    runs: pd.DataFrame
    reached: int | None
    conditions: dict[str, str]
    notes: list[str]
    epochs: pd.DataFrame
    diverged: int  # runs, which `runs` does not have

    @property
    def count(self) -> int:
        """The number of finished runs."""
        return len(self.runs) + self.diverged


def find_files(source: str) -> list[tuple[Path, str]]:
    """Return path and campaign of each file of FILE or FILE:CAMPAIGN, where FILE may be a pattern.

    Both may contain colons: the longest FILE that exists counts. FILE is ours for `published`.
    """
    path = source
    campaign = ""
    while path:
        if path == "published":
            return [(PUBLISHED, campaign or "published")]
        paths = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if paths:
            return [(Path(each), campaign) for each in paths]
        path = path.rpartition(":")[0]
        campaign = source[len(path) + 1 :]
    raise ConfigError(f"{source}: there is no such file")


def each_campaign(source: str) -> list[str]:
    """Return `FILE:CAMPAIGN` for each campaign of `FILE:*`, also unfinished ones. Return any other source as it is."""
    found = []
    for path, campaign in find_files(source):
        if campaign != "*":
            return [source]
        found += [f"{path}:{name}" for name in dict.fromkeys(campaigns_in(path))]
    return found


def campaigns_in(path: Path) -> list[str]:
    """Return the campaign of each epoch, then of each finished run."""
    return [*read_epochs(path)["campaign"], *read_table(path)["campaign"]]


def read_table(path: Path) -> pd.DataFrame:
    """Return a table of ours as texts. A last row without a line end is still being written, and is left out."""
    text = path.read_text("utf-8-sig", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    how: dict[str, Any] = {"sep": "\t", "dtype": str, "na_filter": False, "quoting": csv.QUOTE_NONE, "index_col": False}
    try:
        with warnings.catch_warnings(action="error"):  # a row may have too many cells
            table = pd.read_csv(io.StringIO(complete), **how)
    except (ValueError, pd.errors.ParserWarning) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)})") from error
    if "campaign" not in table:
        raise ConfigError(f"{path} is no table of runs: name a runs.tsv")
    return table


def read_epochs(path: Path) -> pd.DataFrame:
    """Return the epochs.tsv beside a runs.tsv, or an empty one."""
    beside = path.with_name("epochs.tsv")
    return read_table(beside) if beside.exists() else pd.DataFrame(columns=[*EPOCHS], dtype=str)


def read_log(source: str) -> Log:
    """Read `FILE` (the last campaign of a runs.tsv), `FILE:CAMPAIGN`, `FILE:*` (all as one), or `published`.

    FILE may be a pattern; its files are read as one campaign. Raise ConfigError if conditions differ, if a seed occurs
    twice, or for a damaged file.
    """
    tables = []
    curves = []
    names: dict[str, None] = {}
    for path, asked in find_files(source):
        known = campaigns_in(path)
        wanted = [asked]
        if asked in ("", "*"):
            wanted = [*dict.fromkeys(known)] if asked else known[-1:]
        if not {*wanted} <= {*known}:
            raise ConfigError(f"{path} has no campaign {asked}, only {', '.join(dict.fromkeys(known))}")
        rows = read_table(path)
        rows = rows[rows["campaign"].isin(wanted)]
        tables.append(rows)
        curves.append(epochs_of(read_epochs(path), rows, wanted))
        names |= dict.fromkeys(wanted)
    try:
        return make_log(source, " + ".join(names), pd.concat(tables).fillna(""), pd.concat(curves))
    except (ValueError, KeyError) as error:  # a text instead of a number, or too few columns
        raise ConfigError(f"{source} cannot be read ({first_line(error)})") from error


def make_log(source: str, campaign: str, rows: pd.DataFrame, epochs: pd.DataFrame) -> Log:
    figures = rows.reindex(columns=FIGURES, fill_value="").map(as_number).astype(float)
    seeds = rows["seed"][rows["seed"] != ""]
    if seeds.duplicated().any():
        raise ConfigError(f"{source} has seed {seeds[seeds.duplicated()].iloc[0]} twice: leave out one run")
    exact = figures["validation_count"] / figures["validation_images"]
    runs = figures.assign(accuracy=exact.fillna(figures["validation_accuracy"]))
    runs["launch"] = rows.get("launch", "")
    runs["launch"] = runs["launch"].str.replace(r"\..*", "", regex=True)  # without the number of the team
    has_diverged = rows[[*LOSSES]].isin(["nan", "inf", "-inf"]).any(axis=1)
    kept = runs[~has_diverged]
    reached = {"published": 41}.get(campaign)  # of its unrounded accuracies, by the last line of its log
    if exact.notna().all():
        reached = int((kept["accuracy"] >= GOAL).sum())
    conditions, notes = conditions_of(source, rows)
    return Log(source, campaign, kept, reached, conditions, notes, epochs, int(has_diverged.sum()))


def conditions_of(source: str, rows: pd.DataFrame) -> tuple[dict[str, str], list[str]]:
    """Return what may explain a difference, each option by itself, and notes on what varies among the runs.

    Raise ConfigError if conditions differ. A missing value equals all values.
    """
    options = [name for name in rows if name.startswith(OPTION)]
    columns = ["images", *SIZES, *CONDITIONS, *options, *MAY_DIFFER, "validation_images"]
    named = rows.reindex(columns=columns, fill_value="").rename(columns={"validation_images": "test_images"})
    conditions = {}
    notes = []
    for name, column in named.items():
        values = [*dict.fromkeys(column[column != ""])]
        if len(values) == 1:
            conditions[str(name)] = values[0]
        elif name in MAY_DIFFER and values:
            notes.append(f"{source} has more than one {name}: {', '.join(values)}")
        elif values:
            raise ConfigError(
                f"{source} has runs with {name} {values[0]} and {values[1]}: they cannot be read as one campaign"
            )
    return conditions, notes


def epochs_of(epochs: pd.DataFrame, rows: pd.DataFrame, campaigns: Sequence[str]) -> pd.DataFrame:
    """Return the epochs of campaigns as numbers. Of a run that was made again, the launch of its row counts, or the
    last one.
    """
    own = epochs[epochs["campaign"].isin(campaigns)]
    if "launch" in own:
        made = pd.concat([own, rows])[["campaign", "run", "launch"]].drop_duplicates(["campaign", "run"], keep="last")
        own = own.merge(made)
    own = own.drop_duplicates(["campaign", "run", "epoch"], keep="last")
    named = own.reindex(columns=["epoch", "seconds", *LOSSES, "validation_accuracy"], fill_value="")
    numbers = named.map(as_number).astype(float)
    return numbers.rename(columns={"validation_accuracy": "accuracy"})


def as_number(text: str) -> float:
    return float(text or "nan")


def names_of(logs: Sequence[Log]) -> list[str]:
    """Return the campaigns' names. If two are equal, return where the logs are from."""
    names = [log.campaign for log in logs]
    if len({*names}) < len(names):
        names = [log.name for log in logs]
    return [f"{place}: {name}" for place, name in enumerate(names, 1)] if len({*names}) < len(names) else names
