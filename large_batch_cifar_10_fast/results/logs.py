"""Reading what campaigns left behind: run logs (ours and the published form), runs.tsv, DAWNBench's tables.

Rounded figures stay what they are: how far each may be off is kept beside it, and a count that rounding hides
is given as bounds.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..settings.settings import CIFAR_10, REPO, Refusal, Settings
from . import lines
from .campaign import Log, bounds, decimals, losses, read_bounded
from .dawnbench import read_epochs, read_published_table
from .fields import COUNT, DURATION, FRACTION
from .tables import COLUMNS, CONDITIONS, OLDER, reached_goal, read_rows, rows_of_campaign

PUBLISHED = REPO / "published"
PUBLISHED_FACTS = {"images": CIFAR_10, "device": "8 x Tesla V100-SXM2-32GB", "workers": "8"}
PUBLISHED_FACTS |= {"clock": "upload and training alone", "epochs": "18"}
OUR_CLOCK = "set-up and training, not validation"
FACTS = ("images", "digest", "device", "recipe", "workers", "processes", *CONDITIONS)  # what may explain a difference
HEAD, RUN = (line.template.partition("{")[0].strip() for line in (lines.HEAD, lines.RUN))  # how these lines begin


def read_log(source: str, campaign: str | None = None) -> Log:
    """Read a file by what is in it, or the word `published`. Raises Refusal."""
    if source == "published":
        log = read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv"))
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text().splitlines()
        return replace(_with_summary(log, summary), name="published", facts=PUBLISHED_FACTS)
    path, content = Path(source), read_bounded(source)
    try:
        text = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise Refusal(f"{source}: cannot be read ({error})") from error
    head = text[0].split("\t") if text else []
    if campaign and head not in (COLUMNS, OLDER):
        raise Refusal(f"{source}: --campaign is for a runs.tsv, which this is not")
    if head in (COLUMNS, OLDER):
        return _read_runs(path, content, campaign)
    if head[:1] in (["epoch"], ["epochs"]):
        return _with_facts_beside(path, read_epochs(path, text))
    if head == ["run", "train_acc", "train_loss", "valid_acc", "valid_loss", "seconds"]:
        return read_published_table(path, text)
    if any(line.startswith(RUN) for line in text):
        return _read_run_log(path, text)
    raise Refusal(f"{source}, line 1: neither a run log with finished runs, nor runs.tsv, nor a DAWNBench table")


def _with_facts_beside(path: Path, log: Log) -> Log:
    """A timing_log.tsv names no images, device or clock: its run's row does, in the runs.tsv beside it."""
    with contextlib.suppress(OSError, Refusal):
        beside = path.with_name("runs.tsv")
        for row in read_rows(beside, read_bounded(str(beside))):
            if math.isclose(float(row["seconds"]), log.seconds[-1], rel_tol=1e-9):
                return replace(log, facts=_conditions(row))
    return log


def _read_runs(path: Path, content: bytes, campaign: str | None) -> Log:
    rows = read_rows(path, content)
    if not rows:
        raise Refusal(f"{path}, line 1: a header and nothing below it")
    known = dict.fromkeys(row["campaign"] for row in rows)
    if campaign and campaign not in known:
        raise Refusal(f"{path}: no campaign {campaign}, only {', '.join(known)}")
    rows = rows_of_campaign(rows, campaign or "")
    figures = ("validation_count", "validation_images", "seconds")
    count, images, seconds = np.array([[row[name] for row in rows] for name in figures], float)
    loss = losses(rows)
    goal = np.where(np.isfinite(loss), np.array([row["goal_seconds"] or "nan" for row in rows], float), math.nan)
    reached, planned = sum(map(reached_goal, rows)), int(rows[-1]["runs"])
    notes = (f"{path} holds {len(rows)} of the campaign's {planned} runs",) if len(rows) < planned else ()
    machines = {name: " and ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "processes")}
    facts = _conditions(rows[-1] | machines)
    return Log(str(path), count / images, loss, seconds, goal, (reached, reached), facts=facts, notes=notes)


def _read_run_log(path: Path, text: list[str]) -> Log:
    """Ours, whose `#` lines tell on what, or the published form, which does not.

    Each launch begins with a head, and one that resumes a campaign tells all its runs again: the last launch counts.
    """
    heads = [i for i, line in enumerate(text) if line.startswith(HEAD)]
    launches = [range(*ends) for ends in pairwise([0, *heads, len(text)])]
    launches = [launch for launch in launches if any(text[i].startswith(RUN) for i in launch)]
    by_launch = [_head_of(text[i] for i in launch) for launch in launches]
    facts, runs = by_launch[-1], []
    for i in launches[-1]:
        if text[i].startswith(RUN):
            where = f"{path}, line {i + 1}"
            if not (run := lines.RUN.read(text[i])):
                raise Refusal(f"{where}: not a whole run line: {text[i][:60]!r}")
            FRACTION.read(run["train_accuracy"], f"{where}: train acc")
            FRACTION.read(run["validation_accuracy"], f"{where}: validation acc")
            DURATION.read(run["seconds"], f"{where}: wall time")
            runs.append(run)
    accuracy, seconds = np.array([[run[name] for run in runs] for name in ("validation_accuracy", "seconds")], float)
    rounding = 0.5 * 10.0 ** -decimals([run["validation_accuracy"] for run in runs])
    test_images = COUNT.read(facts.get("test", "0"), f"{path}: number of test images")
    if test_images and test_images * 2 * rounding <= 1:  # every count of images prints differently
        accuracy, rounding = np.rint(accuracy * test_images) / test_images, 0.0
    notes = _other_campaigns(path, by_launch)
    facts = _conditions(lines.from_pairs(facts.get("settings", "")) | facts)
    loss, unknown = losses(runs), np.full(len(runs), math.nan)
    reached = bounds(accuracy[np.isfinite(loss)], rounding)
    log = Log(str(path), accuracy, loss, seconds, unknown, reached, rounding, facts, notes)
    return _with_summary(log, [text[i] for i in launches[-1]])


def _head_of(launch: Iterable[str]) -> dict[str, str]:
    facts = {}
    for line in launch:
        if line.startswith("#"):
            for form in (lines.DATA, lines.WORLD, lines.RECIPE, lines.SETTINGS, lines.CAMPAIGN):
                facts |= form.read(line) or {}
    return facts


def _other_campaigns(path: Path, by_launch: list[dict[str, str]]) -> tuple[str, ...]:
    """A note on the campaigns in a log besides the last; a launch that gives no name is one of its own."""
    names = [facts.get("campaign", str(i)) for i, facts in enumerate(by_launch)]
    others = len(set(names)) - 1
    unlike = [name for name in ("images", "digest", "recipe") if len({facts.get(name) for facts in by_launch}) > 1]
    said = f", not all of the same {' and '.join(unlike)}" if unlike else ""
    return (f"{path} holds {others} other campaigns{said}: only the last one's runs are read",) if others else ()


def _conditions(facts: Mapping[str, str]) -> dict[str, str]:
    """Of what a log says, what may explain a difference: FACTS, and the recipe's options (once among the settings)."""
    options = lines.from_pairs(facts.get("options", facts.get("settings", "")))
    options = {name: value for name, value in options.items() if name not in Settings.__dataclass_fields__}
    ours = {"clock": OUR_CLOCK} if "recipe" in facts or "digest" in facts else {}
    return {name: facts[name] for name in FACTS if name in facts} | options | ours


def _with_summary(log: Log, text: list[str]) -> Log:
    """What the closing lines tell more exactly than the rounded lines above them, if they are of these runs."""
    total = next(filter(None, map(lines.REACHED.read, text)), None)
    if not total:
        return replace(log, notes=(*log.notes, f"{log.name} has no summary: its campaign did not finish"))
    if total["total"] != str(len(log.accuracy)):
        note = f"{log.name} holds {len(log.accuracy)} runs, its summary speaks of {total['total']}: not used"
        return replace(log, notes=(*log.notes, note))
    reached, (least, most) = int(COUNT.read(total["reached"], f"{log.name}: runs at 94%")), log.reached
    if not least <= reached <= most:
        note = f"{log.name}: by its runs {least} to {most} reached 94%, its summary speaks of {reached}: not used"
        return replace(log, notes=(*log.notes, note))
    log = replace(log, reached=(reached, reached))
    if figures := next(filter(None, map(lines.LOWEST.read, text)), None):
        log = replace(log, lowest=float(figures["lowest"]), median=float(figures["median"]))
    return log
