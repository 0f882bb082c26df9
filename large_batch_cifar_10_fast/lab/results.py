"""Read the results of campaigns from runs.tsv and the epochs.tsv beside it."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from .. import PACKAGE, ConfigError, first_line
from .table import CONDITIONS, EPOCHS, GOAL, OPTION, PLACE, SIZES

PUBLISHED = PACKAGE / "published" / "runs.tsv"
MAY_DIFFER = (*PLACE, "commit")  # among the runs of a campaign
LOSSES = ("train_loss", "validation_loss")
FIGURES = ("seed", "validation_accuracy", "validation_count", "validation_images", *LOSSES, "seconds")


@dataclass(frozen=True)
class Results:
    """The results of a campaign.

    `runs` has a row per run that did not diverge: seed, accuracy (a fraction), validation_loss and seconds, NaN where
    unknown, and launch. `reached` counts the runs at 94%. `epochs` has a row per epoch, also of unfinished runs: epoch,
    seconds, accuracy and losses.
    """

    name: str  # its source
    campaign: str
    runs: pd.DataFrame
    reached: int
    conditions: dict[str, str]  # what may explain a difference, each option by itself
    epochs: pd.DataFrame
    diverged: int  # runs, which `runs` does not have

    @property
    def count(self) -> int:
        """The number of finished runs."""
        return len(self.runs) + self.diverged


def find_files(source: str) -> list[tuple[Path, str]]:
    """Return path and campaign of each file of FILE or FILE:CAMPAIGN, where FILE may be a pattern.

    FILE is ours for `published`.
    """
    for path, campaign in ((source, ""), source.rpartition(":")[::2]):
        if path == "published":
            return [(PUBLISHED, campaign or "published")]
        paths = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if paths:
            return [(Path(each), campaign) for each in paths]
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
    rows, epochs = read_tables(path)
    return [*epochs["campaign"], *rows["campaign"]]


def read_tables(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a runs.tsv and the epochs.tsv beside it, or an empty one, as texts."""
    beside = path.with_name("epochs.tsv")
    empty = pd.DataFrame(columns=[*EPOCHS], dtype=str)
    epochs = parse_table(beside, beside.stat().st_mtime_ns) if beside.exists() else empty
    return parse_table(path, path.stat().st_mtime_ns), epochs


@cache
def parse_table(path: Path, changed: int) -> pd.DataFrame:
    """Return a table of ours as texts. A last row without a line end is still being written, and is left out."""
    lines = path.read_text("utf-8-sig", errors="replace").split("\n")[:-1]
    head, *rows = [line.split("\t") for line in lines or [""]]
    if "campaign" not in head:
        raise ConfigError(f"{path} is no table of runs: name a runs.tsv")
    return pd.DataFrame(rows, columns=head).fillna("")


def read_results(source: str) -> Results:
    """Read `FILE` (the last campaign of a runs.tsv), `FILE:CAMPAIGN`, or `published`.

    FILE may be a pattern; its files are read as one campaign. Raise ConfigError if conditions differ, if a seed occurs
    twice, or for a damaged file.
    """
    try:
        return make_results(source, *find_rows(source))
    except (ValueError, KeyError) as error:  # a text instead of a number, too many columns or too few
        raise ConfigError(f"{source} cannot be read ({first_line(error)})") from error


def find_rows(source: str) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Return the name of a campaign, its rows, and its epochs."""
    tables = []
    curves = []
    for path, asked in find_files(source):
        known = campaigns_in(path)
        campaign = asked or "".join(known[-1:])
        if campaign not in known:
            raise ConfigError(f"{path} has no campaign {campaign}, only {', '.join(dict.fromkeys(known))}")
        rows, epochs = (table[table["campaign"] == campaign] for table in read_tables(path))
        tables.append(rows)
        curves.append(epochs_of(epochs, rows))
    return campaign, pd.concat(tables).fillna(""), pd.concat(curves)


def make_results(source: str, campaign: str, rows: pd.DataFrame, epochs: pd.DataFrame) -> Results:
    figures = rows.reindex(columns=FIGURES, fill_value="").map(as_number).astype(float)
    seeds = rows["seed"][rows["seed"] != ""]
    if seeds.duplicated().any():
        raise ConfigError(f"{source} has seed {seeds[seeds.duplicated()].iloc[0]} twice: leave out one run")
    exact = figures["validation_count"] / figures["validation_images"]
    runs = figures.assign(accuracy=exact.fillna(figures["validation_accuracy"]))
    runs["launch"] = rows.get("launch", "")
    has_diverged = rows[[*LOSSES]].isin(["nan", "inf", "-inf"]).any(axis=1)
    kept = runs[~has_diverged]
    reached = int((kept["accuracy"] >= GOAL).sum())
    if campaign == "published":
        reached = 41  # of its unrounded accuracies, by the last line of its log
    return Results(source, campaign, kept, reached, conditions_of(source, rows), epochs, int(has_diverged.sum()))


def conditions_of(source: str, rows: pd.DataFrame) -> dict[str, str]:
    """Return the conditions of a campaign's rows. Raise ConfigError if they differ. A missing value equals all values.

    Of those that MAY_DIFFER among the rows, return all values.
    """
    options = [name for name in rows if name.startswith(OPTION)]
    columns = ["images", *SIZES, *CONDITIONS, *options, *MAY_DIFFER, "validation_images"]
    named = rows.reindex(columns=columns, fill_value="").rename(columns={"validation_images": "test_images"})
    conditions = {}
    for name, column in named.items():
        values = [*dict.fromkeys(column[column != ""])]
        if len(values) > 1 and name not in MAY_DIFFER:
            raise ConfigError(
                f"{source} has runs with {name} {values[0]} and {values[1]}: they cannot be read as one campaign"
            )
        if values:
            conditions[str(name)] = " and ".join(values)
    return conditions


def epochs_of(epochs: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return a campaign's epochs as numbers. Of a run that was made again, the launch of its row counts, or the last
    one.
    """
    own = epochs
    if "launch" in own:
        made = pd.concat([own, rows])[["run", "launch"]].drop_duplicates("run", keep="last")
        own = own.merge(made)
    own = own.drop_duplicates(["run", "epoch"], keep="last")
    named = own.reindex(columns=["epoch", "seconds", *LOSSES, "validation_accuracy"], fill_value="")
    numbers = named.map(as_number).astype(float)
    return numbers.rename(columns={"validation_accuracy": "accuracy"})


def as_number(text: str) -> float:
    return float(text or "nan")


def names_of(results: Sequence[Results]) -> list[str]:
    """Return the campaigns' names. If two are equal, return numbers and sources."""
    names = [each.campaign for each in results]
    if len({*names}) == len(names):
        return names
    return [f"{number}: {each.name}" for number, each in enumerate(results, 1)]
