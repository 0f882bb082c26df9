"""Many runs in one launch: which of them are still to be made, and whether they may be.

Torch is not imported here, so that a campaign that cannot be resumed is refused before anything has started.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import get_type_hints

from .images import load_images
from .settings import Refusal, Settings, given, read_settings
from .tables import METHOD_COLUMNS, Row, read_rows

RECORDED = (*METHOD_COLUMNS, "runs", "workers", "no_warmup")  # settings that a row tells as they were


def read_request(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings asked for; with --resume those of the last unfinished campaign in --out.

    Raises Refusal if there is none, or if settings given anew, or the code, differ from the campaign's.
    """
    settings = read_settings(arguments, environment)
    if not settings.resume:
        return settings
    rows = finished_rows(settings)
    if not rows:
        raise Refusal(f"--resume: there is no campaign in {settings.out}: start one without --resume")
    row = rows[-1]
    if len(rows) >= int(row["runs"]):
        raise Refusal(
            f"--resume: the last campaign in {settings.out}, {row['campaign']}, has all its {row['runs']} runs"
        )
    kinds = get_type_hints(Settings)
    campaign = {name: row[name] == "True" if kinds[name] is bool else kinds[name](row[name]) for name in RECORDED}
    campaign["seed"] = int(row["seed"]) - int(row["run"])
    campaign["no_compile"] = not campaign["compile"]
    asked = given(arguments, environment)
    differing = [
        f"{name} ({campaign[name]} then, {getattr(settings, name)} now)"
        for name in campaign
        if name in asked and getattr(settings, name) != campaign[name]
    ]
    refuse_other(row, differing + changes(row, code=code_digest(), torch=version("torch")))
    data = settings.data if "data" in asked else row["data"]
    return replace(settings, **campaign, data=data)


def finished_rows(settings: Settings) -> list[Row]:
    """With --resume, the rows of the last campaign in --out; otherwise none."""
    path = Path(settings.out) / "runs.tsv"
    if not settings.resume or not path.exists():
        return []
    rows = read_rows(path)
    return [row for row in rows if row["campaign"] == rows[-1]["campaign"]]


def check_resumable(settings: Settings, processes: int) -> None:
    """Refuse to go on with other images, or spread over another number of processes."""
    for row in finished_rows(settings)[-1:]:
        refuse_other(row, changes(row, processes=processes, digest=load_images(settings.data).digest()))


def changes(row: Row, **now: object) -> list[str]:
    """What a row tells otherwise than it is now, in words."""
    return [f"{name} ({row[name]} then, {value} now)" for name, value in now.items() if row[name] != str(value)]


def refuse_other(row: Row, differing: list[str]) -> None:
    """Raise Refusal if anything differs from the campaign that a row belongs to."""
    if differing:
        raise Refusal(f"--resume: campaign {row['campaign']} had other {', '.join(differing)}: start without --resume")


def code_digest() -> str:
    """The first 12 hexadecimal digits of the SHA-256 over this package's source, committed or not."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
