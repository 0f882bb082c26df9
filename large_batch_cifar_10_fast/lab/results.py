"""Read the results of campaigns from runs.tsv and the epochs.tsv beside it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from .. import PACKAGE, ConfigError, first_line
from .table import EPOCHS, NUMBERS

PUBLISHED = PACKAGE / "published" / "runs.tsv"
FIGURES = ("validation_accuracy", "validation_count", "validation_images", "seconds")


@dataclass(frozen=True)
class Results:
    """The results of a campaign.

    `runs` has a row per run that did not diverge: seed, accuracy (a fraction) and seconds, NaN where unknown. `epochs`
    has a row per epoch: epoch and accuracy.
    """

    name: str  # its source
    campaign: str
    runs: pd.DataFrame
    conditions: dict[str, str]  # what may explain a difference, each option by itself
    epochs: pd.DataFrame
    diverged: int  # runs, which `runs` does not have


def find_file(source: str) -> tuple[Path, str]:
    """Return the path and the campaign of FILE or FILE:CAMPAIGN. FILE is ours for `published`."""
    for path, campaign in ((source, ""), source.rpartition(":")[::2]):
        if path == "published":
            return PUBLISHED, campaign or "published"
        if os.path.exists(path):
            return Path(path), campaign
    raise ConfigError(f"{source}: there is no such file")


def each_campaign(source: str) -> list[str]:
    """Return `FILE:CAMPAIGN` for each campaign of `FILE:*`. Return any other source as it is."""
    path, campaign = find_file(source)
    return [f"{path}:{name}" for name in read_tables(path)[0]["campaign"].unique()] if campaign == "*" else [source]


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

    Raise ConfigError for a damaged file.
    """
    path, campaign = find_file(source)
    try:
        rows, epochs = read_tables(path)
        known = [*rows["campaign"].unique()]
        campaign = campaign or "".join(known[-1:])
        if campaign not in known:
            raise ConfigError(f"{path} has no campaign {campaign}, only {', '.join(known)}")
        own = [table[table["campaign"] == campaign] for table in (rows, epochs)]
        return make_results(source, campaign, *own)
    except (ValueError, KeyError) as error:  # a text instead of a number, too many columns or too few
        raise ConfigError(f"{source} cannot be read ({first_line(error)})") from error


def make_results(source: str, campaign: str, rows: pd.DataFrame, epochs: pd.DataFrame) -> Results:
    figures = rows.reindex(columns=FIGURES, fill_value="").map(as_number).astype(float)
    exact = figures["validation_count"] / figures["validation_images"]
    seeds = rows["seed"].where(rows["seed"] != "")  # texts: numbers above 2**53 would be rounded
    runs = figures.assign(seed=seeds, accuracy=exact.fillna(figures["validation_accuracy"]))
    has_diverged = rows[["train_loss", "validation_loss"]].isin(["nan", "inf", "-inf"]).any(axis=1)
    curves = epochs[["epoch", "validation_accuracy"]].set_axis(["epoch", "accuracy"], axis=1).map(as_number)
    return Results(source, campaign, runs[~has_diverged], conditions_of(rows), curves, int(has_diverged.sum()))


def conditions_of(rows: pd.DataFrame) -> dict[str, str]:
    """Return the conditions of a campaign's rows that are known. Its runs may have different devices."""
    named = rows.drop(columns=[*NUMBERS, "campaign", "data", "epoch", "launch"], errors="ignore")
    named["test_images"] = rows["validation_images"]
    texts = {str(name): " and ".join(column[column != ""].unique()) for name, column in named.items()}
    return {name: text for name, text in texts.items() if text}


def as_number(text: str) -> float:
    return float(text or "nan")


def names_of(results: Sequence[Results]) -> list[str]:
    """Return the campaigns' names. If two are equal, return numbers and sources."""
    names = [each.campaign for each in results]
    if len({*names}) == len(names):
        return names
    return [f"{number}: {each.name}" for number, each in enumerate(results, 1)]
