"""List the campaigns of a runs.tsv: results so far, and whether they are running."""

import contextlib
import json
from pathlib import Path

from ..files import is_running
from .results import Log, campaigns_in, find_files, read_log

HEAD = ("campaign", "runs", "accuracy, %", "best", "worst", "seconds", "CPU seconds", "state")


def status_of(source: str) -> list[tuple[str, ...]]:
    """Return HEAD and a line of cells for each campaign of a source. Raise ConfigError."""
    lines: list[tuple[str, ...]] = [HEAD]
    for path, asked in find_files(source):
        names = dict.fromkeys(campaigns_in(path)) if asked in ("", "*") else [asked]
        lines += [line_of(read_log(f"{path}:{name}"), path) for name in names]
    return lines


def line_of(log: Log, path: Path) -> tuple[str, ...]:
    planned, is_live = plan_of(path, log.campaign)
    state = "running" if is_live else "not running"
    if 0 < planned <= log.count:
        state = "complete"
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
    return log.campaign, count, *figures, state


def plan_of(table: Path, campaign: str) -> tuple[int, bool]:
    """Return the --runs of the last launch (0: unknown), and whether a launch is running."""
    folder = table.parent / "runs" / campaign
    planned = 0
    is_live = False
    with contextlib.suppress(OSError, ValueError):  # it was deleted, or may not be opened, or is being written
        planned = json.loads((folder / "campaign.json").read_text())["runs"]
        is_live = is_running(folder)
    return planned, is_live
