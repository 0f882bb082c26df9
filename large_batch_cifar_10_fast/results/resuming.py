"""The campaign to go on with: after an end with --resume, after a failure by itself."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from ..settings.settings import Refusal, Settings, count_from, restarts
from ..training.process import told_by_the_first
from .tables import Row, read_rows

CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # the variable by which the launcher tells its processes the campaign's name


def campaign_of_this_launch() -> str:
    """A name of its own, by which the rows of one campaign are told from others'; the launcher gives it."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def finished_rows(settings: Settings) -> list[Row]:
    """The rows of the campaign to go on with: with --resume the last in --out, after a restart this launch's own.

    Of several machines only the first reads them; its first process tells all others, which may have no such folder.
    """
    if not settings.resume:
        return rows_of(settings.out, campaign_of_this_launch()) if restarts(os.environ) else []
    if is_told_later(settings):
        return []
    rank = os.environ.get("RANK")
    if count_from(os.environ, "NNODES", 1) == 1 or rank is None:
        return rows_of(settings.out)
    return json.loads(told_by_the_first("finished rows", json.dumps(rows_of(settings.out)) if rank == "0" else ""))


def is_told_later(settings: Settings) -> bool:
    """Whether this is the launcher of another machine than the first: what to go on with is told to its processes."""
    others = count_from(os.environ, "NNODES", 1) > 1 and os.environ.get("NODE_RANK") != "0"
    return settings.resume and others and "RANK" not in os.environ


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """The rows of a campaign in a folder, the last one's unless it is named."""
    path = Path(out) / "runs.tsv"
    rows = read_rows(path) if path.exists() else []
    return [row for row in rows if row["campaign"] == (campaign or rows[-1]["campaign"])]


def changes(row: Row, **now: object) -> list[str]:
    """What a row tells otherwise than it is now, in words."""
    return [f"{name} ({row[name]} then, {value} now)" for name, value in now.items() if row[name] != str(value)]


def refuse_other(row: Row, differing: list[str]) -> None:
    """Raise Refusal if anything differs from the campaign that a row belongs to."""
    if differing:
        raise Refusal(f"--resume: campaign {row['campaign']} had other {', '.join(differing)}: start without --resume")
