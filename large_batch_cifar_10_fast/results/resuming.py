"""The campaign to go on with: after an end with --resume, after a failure by itself."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..distributed import DistContext
from ..settings.settings import ConfigError, Settings
from .provenance import code_digest, utc_now
from .tables import Row, read_rows, rows_of_campaign

CAMPAIGN = "LARGE_BATCH_CAMPAIGN"  # the variable with the campaign's name, from the launcher to its processes
STARTED = "LARGE_BATCH_STARTED"  # and the time at which it started
SUPERVISED = "LARGE_BATCH_SUPERVISED"  # set by the launcher of several teams, or with --restarts, in theirs


def campaign_of_this_launch() -> str:
    """A name of its own, by which the rows of one campaign are told from others'; the launcher gives it."""
    return os.environ.get(CAMPAIGN) or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"


def started() -> str:
    """Return when this launch's campaign started."""
    return os.environ.get(STARTED) or utc_now()


def is_restart() -> bool:
    """Return whether another launcher started this launch, and checked before that there are runs to make."""
    return SUPERVISED in os.environ


def finished_rows(settings: Settings) -> list[Row]:
    """Return the campaign's rows: with --resume the last one's in --out, after a restart this launch's own.

    Raise ConfigError if they are of other code: it may not even have their recipe's options.
    """
    if not settings.resume and not is_restart():
        return []
    rows = rows_of(settings.out, "" if settings.resume else campaign_of_this_launch())
    for row in rows[-1:]:
        check_unchanged(row, code=code_digest(), torch=version("torch"))
    return rows


def rows_from_main(settings: Settings, ctx: DistContext) -> list[Row]:
    """Return the campaign's rows as rank 0 reads them, on all processes: other machines need not have its folder."""
    mine = json.dumps(finished_rows(settings)) if ctx.is_main else ""
    return json.loads(ctx.all_gather_words("finished", mine)[0])


def rows_of(out: str, campaign: str = "") -> list[Row]:
    """The rows of a campaign in a folder, the last one's unless it is named."""
    path = Path(out) / "runs.tsv"
    try:
        return rows_of_campaign(read_rows(path), campaign)
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder, or one that may not be read, or too long a name
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give another --out") from error


def check_unchanged(row: Mapping[str, object], **now: object) -> None:
    """Raise ConfigError if a campaign's row, of words or of what they mean, tells anything otherwise than it is now."""
    differing = {name: value for name, value in now.items() if row[name] not in (value, str(value))}
    if differing:
        said = ", ".join(f"{name} ({row[name]} then, {value} now)" for name, value in differing.items())
        raise ConfigError(f"--resume: campaign {row['campaign']} had other {said}: start without --resume")
