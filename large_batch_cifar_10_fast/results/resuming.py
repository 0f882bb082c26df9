"""The campaign to go on with: after an end with --resume, after a failure by itself."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..settings.settings import Refusal, Settings, is_first_machine, restarts
from ..training.meeting import has_other_machines, store_of_all
from .provenance import code_digest
from .tables import Row, read_rows, rows_of_campaign

CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # the variable by which the launcher tells its processes the campaign's name


def campaign_of_this_launch() -> str:
    """A name of its own, by which the rows of one campaign are told from others'; the launcher gives it."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def finished_rows(settings: Settings) -> list[Row]:
    """The rows of the campaign to go on with: with --resume the last in --out, after a restart this launch's own.
    Raises Refusal if they are of other code: it may not even have their recipe's options."""
    if has_other_machines():
        rows = _rows_of_the_first_machine(settings)
    elif settings.resume:
        rows = [] if is_told_later(settings) else rows_of(settings.out)
    else:
        rows = rows_of(settings.out, campaign_of_this_launch()) if restarts(os.environ) else []
    for row in rows[-1:]:
        refuse_other(row, code=code_digest(), torch=version("torch"))
    return rows


def _rows_of_the_first_machine(settings: Settings) -> list[Row]:
    """Its first process reads them and tells all others, which need not have its folder."""
    store = store_of_all()
    if os.environ["RANK"] == "0":
        store.set("finished", json.dumps(rows_of(settings.out) if settings.resume else None))
    if not settings.resume:
        return []
    rows = json.loads(store.get("finished"))
    if rows is None:
        raise Refusal("--resume: the first machine was not asked to go on with a campaign: ask all for the same")
    return rows


def is_told_later(settings: Settings) -> bool:
    """Whether this is the launcher of another machine than the first: what to go on with is told to its processes."""
    return settings.resume and not is_first_machine(os.environ) and not has_other_machines()


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """The rows of a campaign in a folder, the last one's unless it is named."""
    path = Path(out) / "runs.tsv"
    try:
        return rows_of_campaign(read_rows(path), campaign)
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder, or one that may not be read, or too long a name
        raise Refusal(f"{path} cannot be read ({error.strerror}): give another --out") from error


def refuse_other(row: Mapping[str, object], **now: object) -> None:
    """Raise Refusal if a campaign's row, of words or of what they mean, tells anything otherwise than it is now."""
    differing = {name: value for name, value in now.items() if row[name] not in (value, str(value))}
    if differing:
        said = ", ".join(f"{name} ({row[name]} then, {value} now)" for name, value in differing.items())
        raise Refusal(f"--resume: campaign {row['campaign']} had other {said}: start without --resume")
