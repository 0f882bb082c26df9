"""List the campaigns of a runs.tsv: results so far, whether they are running, and the remaining time."""

import contextlib
import csv
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from .. import ConfigError
from ..files import claim
from .campaign import LAUNCHES
from .results import Log, campaigns_in, each_campaign, find_files, read_log
from .table import from_pairs

HEAD = ("campaign", "runs", "accuracy, %", "best", "worst", "seconds", "CPU seconds", "state")


def status_of(source: str) -> list[tuple[str, ...]]:
    """Return HEAD and a line of cells for each campaign of a runs.tsv, or for another log. Raise ConfigError."""
    named = []
    for path, campaign in find_files(source) or [(source, "")]:
        if campaign not in ("", "*") or not campaigns_in(Path(path)):
            named.append(f"{path}:{campaign}".rstrip(":"))
        else:
            named += each_campaign(f"{path}:*")
    return [HEAD, *(line_of(read_log(each, unfinished=True)) for each in named)]


def line_of(log: Log) -> tuple[str, ...]:
    planned = 0
    state = "-"
    if log.campaign:
        path = Path(find_files(log.name)[0][0])
        planned, is_running = plan_of(path, log.campaign)
        state = state_of(log, planned, is_running)
    count = f"{log.count} of {planned}" if planned else str(log.count)
    if log.diverged:
        count += f", {log.diverged} diverged"
    runs = log.runs
    accuracies = 100 * runs["accuracy"]
    figures = ["-"] * 5
    if len(runs):
        spread = f" ± {accuracies.std():.3f}" if len(runs) > 1 else ""
        figures = [f"{accuracies.mean():.3f}{spread}", f"{accuracies.max():.2f}", f"{accuracies.min():.2f}"]
        figures += [f"{runs[name].mean():.3g}" for name in ("seconds", "cpu_seconds")]
        figures = [figure.replace("nan", "-") for figure in figures]
    return log.campaign or log.name, count, *figures, state


def plan_of(table: Path, campaign: str) -> tuple[int, bool]:
    """Return the --runs of the last launch (0: unknown), and whether a launch is running."""
    path = table.parent / ".campaigns" / f"{campaign}.json"
    planned = 0
    is_running = False
    with contextlib.suppress(OSError, ValueError):  # it was deleted, or may not be opened, or is being written
        planned = int(json.loads(path.read_text()).get("runs", 0))
        with path.open("rb+") as file:
            is_running = not claim(file.fileno(), LAUNCHES, path)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # in an experiment, its plan counts, too
        planned = max(planned, json.loads(table.with_name("experiment.json").read_text())["looks"][-1]["runs"])
    return planned, is_running


def state_of(log: Log, planned: int, is_running: bool) -> str:
    """Return whether a campaign is complete or running, and the remaining time from the speed of the last launch."""
    missing = planned - log.count
    if planned and missing <= 0:
        return "complete"
    if not is_running:
        return "not running"
    launches = log.runs["launch"].to_list()
    start = re.match(r"\d{8}T\d{6}", launches[-1]) if launches else None
    if not start:
        return "running"
    elapsed = datetime.now(UTC) - datetime.strptime(start.group(), "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    minutes = missing * elapsed.total_seconds() / launches.count(launches[-1]) / 60
    return f"running, about {minutes:.0f} minutes left"


def write_runs(sources: Sequence[str], path: Path) -> None:
    """Write all runs of tables to a .csv file, with a column for each option. Raise ConfigError."""
    tables = []
    for file, campaign in [each for source in sources for each in find_files(source)]:
        if campaigns_in(Path(file)):
            table = pd.read_csv(file, sep="\t", dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE)
            table = table[table["campaign"].isin([campaign]) | (campaign in ("", "*"))]
            options = pd.DataFrame([*map(from_pairs, table["options"])], index=table.index)
            new = [name for name in options if name not in table]
            tables.append(table.drop(columns="options").join(options[new]))
    if not any(map(len, tables)):
        raise ConfigError(f"--csv {path}: there are no finished runs in a runs.tsv: name one that has some")
    try:
        pd.concat(tables).to_csv(path, index=False)
    except OSError as error:
        raise ConfigError(f"--csv {path} cannot be written ({error.strerror or error}): choose another") from error
