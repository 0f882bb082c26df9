"""Read the results of a campaign into one `Log`.

A campaign's results are its runs.tsv (several are taken together), the lines on STDOUT (ours and the published ones),
or a DAWNBench table, such as timing_log.tsv.
"""

import csv
import glob
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import PACKAGE, ConfigError, first_line
from ..images.cifar import CIFAR_10
from .options import as_pairs
from .program import hyp_class
from .table import CONDITIONS, GOAL, PLACE, SIZES, differences, from_pairs

# ---- Reading

PUBLISHED = PACKAGE / "published"
OF_PUBLISHED = {"images": CIFAR_10, "training_images": "50000", "test_images": "10000", "recipe": "apple2019"}
OF_PUBLISHED |= {"device": "8 x Tesla V100-SXM2-32GB", "processes": "8", "precision": "fp16"}
OF_PUBLISHED |= {"clock": "upload and training"}
RUN_LINE = r"^Train acc \S+ loss (?P<train_loss>\S+), validation acc (?P<accuracy>\S+) "
RUN_LINE += r"loss (?P<validation_loss>\S+) wall time (?P<seconds>\S+)s\s*$"
HEAD_LINE = (
    r"^# (?:large_batch_cifar_10_fast .*, commit (?P<commit>\S+), code (?P<code>\w+)(?:, core (?P<core>\w+))?,.*"
)
HEAD_LINE += r"|Python .*, torch (?P<torch>[^,+]+).*"
HEAD_LINE += r"|(?P<workers>\d+) workers on (?P<processes>\d+) process(?:es)?, (?P<device>.*)"
HEAD_LINE += r"|data (?P<images>.*): (?P<training_images>\d+) training and (?P<validation_images>\d+) test images"
HEAD_LINE += r", SHA-256 (?P<digest>\w+)"
HEAD_LINE += r"|recipe (?P<recipe>\S+) (?P<options>.*)|(?:settings|computation) (?P<settings>.*))$"
SUMMARY = r"(?m)^(\d+) runs reached 0\.94 out of (\d+)\s*$"
LOSSES = dict.fromkeys(("train_loss", "validation_loss"), (-np.inf, np.inf, "nan"))  # limits, and a text for NaN
SECONDS = {"seconds": (1e-9, 1e9)}
MAY_DIFFER = (*PLACE, "commit")  # among the runs of a log


@dataclass(frozen=True)
class Log:
    """The results of a campaign.

    `runs` has a row per run that did not diverge: seed, accuracy (a fraction), validation_loss, seconds, cpu_seconds,
    goal_seconds (the time to 94%), NaN where the log does not say, and launch. `reached` counts the runs at 94%; None
    if rounded accuracies do not tell. `epochs` has a row per run and epoch: epoch, seconds, accuracy, and losses if
    known. `left_out` names tables without any run.
    """

    name: str
    runs: pd.DataFrame
    reached: int | None
    conditions: dict[str, str]
    notes: list[str]
    epochs: pd.DataFrame | None
    campaign: str = ""  # of a runs.tsv
    left_out: list[str] = field(default_factory=list)
    diverged: int = 0  # runs, which `runs` does not have

    @property
    def count(self) -> int:
        """The number of finished runs."""
        return len(self.runs) + self.diverged


def find_files(source: str) -> list[tuple[str, str]]:
    """Return path and campaign of each file of FILE or FILE:CAMPAIGN, where FILE may be a pattern.

    Both may contain colons: the longest FILE that exists counts.
    """
    path = source
    campaign = ""
    while path:
        paths = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if paths and "," not in campaign:
            return [(path, campaign) for path in paths]
        path = path.rpartition(":")[0]
        campaign = source[len(path) + 1 :]
    return []


def each_campaign(source: str) -> list[str]:
    """Return `FILE:CAMPAIGN` for each campaign of `FILE:*`, also unfinished ones. Return any other source as it is."""
    files = find_files(source)
    if not files or files[0][1] != "*":
        return [source]
    found = []
    for path, _ in files:
        names = campaigns_in(Path(path).with_name("epochs.tsv")) + campaigns_in(Path(path))
        found += [f"{path}:{name}" for name in dict.fromkeys(names)] or [f"{path}:*"]
    return found


def campaigns_in(path: Path) -> list[str]:
    """Return the campaign of each row of a runs.tsv or epochs.tsv; [] for another or missing file."""
    text = read_text(path) if path.is_file() else ""
    if not text.startswith("campaign\t"):
        return []
    rows = text[: text.rfind("\n") + 1].splitlines()[1:]
    return [row.partition("\t")[0] for row in rows if row]


def read_log(source: str, unfinished: bool = False) -> Log:
    """Read `published`, a file by its content, or several runs.tsv (`a/runs.tsv,b/runs.tsv` or `*/runs.tsv`) as one.

    `FILE` reads the last campaign of a runs.tsv, `FILE:CAMPAIGN` another, and `FILE:*` all as one. With `unfinished`
    epochs of unfinished runs count, and a runs.tsv may have no finished run. Raise ConfigError for a damaged file.
    """
    several = [file for part in source.split(",") for file in find_files(part) or [(part, "")]]
    files = find_files(source) or [*dict.fromkeys(several)]
    try:
        if source == "published":
            text, summary = (read_text(PUBLISHED / f"apple_8xv100_{name}") for name in ("50_runs.tsv", "summary.txt"))
            columns = {"valid_acc": "accuracy", "valid_loss": "validation_loss"}
            conditions = from_pairs(as_pairs(hyp_class("apple2019")())) | OF_PUBLISHED  # the recipe as published
            return from_rounded(source, parse_table(source, text).rename(columns=columns), summary, conditions)
        texts = {file: read_text(Path(file[0])) for file in files}
        (path, campaign), text = next(iter(texts.items()))
        if len(files) == 1 and "\nTrain acc " in f"\n{text}" and not campaign:
            return from_lines(path, text)
        tables = {file: parse_table(file[0], text, may_be_empty=unfinished) for file, text in texts.items()}
        if len(files) == 1 and "hours" in tables[files[0]]:
            return from_epochs(path, tables[files[0]])
        if all("campaign" in table for table in tables.values()):
            return from_runs(source, tables, unfinished)
    except (OSError, ValueError, KeyError) as error:  # a folder, a picture; errors of pandas name the line
        raise ConfigError(f"{source}: cannot be read ({first_line(error)})") from error
    raise ConfigError(f"{source}, line 1: it is not a run log, a runs.tsv or a DAWNBench table")


def read_text(path: Path) -> str:
    return path.read_text("utf-8-sig", errors="replace")


def parse_table(path: str, text: str, may_be_empty: bool = False) -> pd.DataFrame:
    """Return a table of text with tabs, indexed by `path, line N`. A half-written last row of ours is left out.

    Raise ConfigError if it is empty, unless it is ours and `may_be_empty`.
    """
    if text.startswith("campaign\t"):
        text = text[: text.rfind("\n") + 1]
    how: dict[str, Any] = {"header": None, "dtype": str, "na_filter": False, "skip_blank_lines": False}
    table = pd.read_csv(io.StringIO(text), sep="\t", quoting=csv.QUOTE_NONE, **how)
    table = table.rename(index=lambda i: f"{path}, line {i + 1}").set_axis(table.iloc[0], axis=1).iloc[1:]
    table = table.loc[(table != "").any(axis=1), ~table.columns.duplicated()]
    if table.empty and not (may_be_empty and "campaign" in table):
        raise ConfigError(f"{path}, line 1: no rows below the header")
    return table


def numbers(table: pd.DataFrame, limits: Mapping[str, tuple]) -> pd.DataFrame:
    """Return columns as float64; raise ConfigError, naming file and line, for a value outside its limits."""
    found = pd.DataFrame(index=table.index)
    for name, (low, high, *words) in limits.items():
        texts = table.get(name, pd.Series("", table.index)).str.strip()
        found[name] = values = pd.to_numeric(texts, errors="coerce").astype(float)
        wrong = texts[~(values.between(low, high) | texts.str.lower().isin(words))]
        if len(wrong):
            text = f"{name} is {wrong.iloc[0][:40]!r}, not a number of {low:g} to {high:g}"
            raise ConfigError(f"{wrong.index[0]}: {text}")
    return found


def make_log(name: str, runs: pd.DataFrame, conditions: dict[str, str], epochs: pd.DataFrame | None = None) -> Log:
    """Return a log of numbers. A run whose loss is not finite has diverged."""
    finite = runs.filter([*LOSSES]).abs().lt(np.inf).all(axis=1)
    names = ["seed", "accuracy", "validation_loss", "seconds", "cpu_seconds", "goal_seconds", "launch"]
    if "launch" not in runs:
        runs = runs.assign(launch="")
    kept = runs[finite].reindex(columns=names)
    reached = int((kept["accuracy"] >= GOAL).sum())
    return Log(name, kept, reached, conditions, [], epochs, diverged=int((~finite).sum()))


def from_runs(source: str, tables: Mapping[tuple[str, str], pd.DataFrame], unfinished: bool) -> Log:
    """Read the named, the last or all (`*`) campaigns of each table, as one.

    Raise ConfigError if conditions differ or a seed occurs twice. Without `unfinished`, also raise it for a campaign
    without runs.
    """
    parts: dict[tuple[str, str], pd.DataFrame] = {}
    left_out = []
    for (path, campaign), table in tables.items():
        started = campaigns_in(Path(path).with_name("epochs.tsv")) if unfinished else []
        known = [*started, *table["campaign"]]  # one name per row
        names = known[-1:]
        if campaign == "*":
            names = [*dict.fromkeys(known)]
        elif campaign:
            names = [campaign] if campaign in known else []
        if not (names or unfinished):
            raise ConfigError(f"{path}: no campaign {campaign}, only {', '.join(table['campaign'].unique())}")
        parts |= {(path, name): table[table["campaign"] == name] for name in names}
        left_out += [] if names else [f"{path}:{campaign}".rstrip(":*")]
    rows = pd.concat([*parts.values(), table[:0]]).fillna("")
    columns = ["images", *SIZES, "validation_images", *CONDITIONS, *MAY_DIFFER]
    alike = rows.reindex(columns=columns, fill_value="").drop_duplicates()
    conditions: dict[str, str] = {}  # of earlier rows: one table may have what another lacks
    for line, row in alike.to_dict("index").items():
        other = conditions_of(row)
        if differing := differences(other, conditions, [n for n in other if n not in (*MAY_DIFFER, "images")]):
            raise ConfigError(
                f"{line} differs from {alike.index[0]} in {differing}: they cannot be read as one campaign"
            )
        conditions = other | conditions
    for seed, lines in rows.groupby("seed").groups.items():
        if len(lines) > 1:
            raise ConfigError(f"seed {seed} is in {lines[0]} and in {lines[1]}: leave out one")
    limits = {"seed": (0, 2**63), "validation_images": (1, 1e9), **SECONDS, "goal_seconds": (1e-9, 1e9, "")}
    runs = numbers(rows, limits | {"cpu_seconds": (0, 1e12, "")} | LOSSES)
    count = numbers(rows, {"validation_count": (0, runs["validation_images"].max())})["validation_count"]
    runs["accuracy"] = count / runs["validation_images"]
    if "launch" in rows:
        runs["launch"] = rows["launch"].str.replace(r"\..*", "", regex=True)  # without the number of the team
    log = make_log(source, runs, conditions, epochs_of(parts, unfinished))
    for name in [name for name in MAY_DIFFER if alike[name].nunique() > 1]:
        log.notes.append(f"{source} has more than one {name}: {', '.join(alike[name].unique())}")
        log.conditions.pop(name, None)
    return replace(log, campaign=" + ".join(dict.fromkeys(name for _, name in parts)), left_out=left_out)


def epochs_of(parts: Mapping[tuple[str, str], pd.DataFrame], unfinished: bool) -> pd.DataFrame | None:
    """Return the epochs of all runs from the epochs.tsv beside each table, or those of one run from timing_log.tsv.

    Without `unfinished`, only those of finished runs.
    """
    found: list[Any] = []
    limits: dict[str, tuple] = {"epoch": (1, 1e9), **SECONDS, "validation_accuracy": (0, 1)}
    limits |= dict.fromkeys(LOSSES, (-np.inf, np.inf, "nan", ""))
    for (path, campaign), rows in parts.items():
        beside, curve = (Path(path).with_name(name) for name in ("epochs.tsv", "timing_log.tsv"))
        text = read_text(beside) if beside.exists() else ""
        if text.count("\n") > 1:  # it has rows
            table = parse_table(str(beside), text)
            table = table[(table["campaign"] == campaign) & (unfinished | table["run"].isin(rows["run"]))]
            if "launch" in table and "launch" in rows:  # keep the launch that wrote the run's row, or the last
                made = pd.concat([table, rows]).drop_duplicates("run", keep="last").set_index(["run", "launch"])
                table = table[table.set_index(["run", "launch"]).index.isin(made.index)]
            table = table.drop_duplicates(["run", "epoch"], keep="last")  # earlier versions did not write the launch
            found.append(numbers(table, limits).rename(columns={"validation_accuracy": "accuracy"}))
        elif curve.exists():
            log = from_epochs(str(curve), parse_table(str(curve), read_text(curve)))
            if np.isclose(rows["seconds"].astype(float), log.runs["seconds"]).any():  # a run of this campaign
                found.append(log.epochs)
    return pd.concat(found) if any(map(len, found)) else None


def from_epochs(path: str, table: pd.DataFrame) -> Log:
    """Read a DAWNBench table: the epochs of one run, a row each."""
    epochs = numbers(table, {"hours": (0, 1e6), "top1Accuracy": (0, 100)})
    epochs["seconds"], epochs["accuracy"] = 3600 * epochs.pop("hours"), epochs.pop("top1Accuracy") / 100
    epochs["epoch"] = np.arange(1.0, len(epochs) + 1)
    run = epochs[-1:].assign(goal_seconds=epochs["seconds"][epochs["accuracy"] >= GOAL].min())
    return make_log(path, run, {"epochs": str(len(epochs))}, epochs)


def from_lines(path: str, text: str) -> Log:
    """Read a run log. If several launches were appended to it, the last one with runs counts."""
    lines = pd.Series(text.splitlines()).rename(lambda i: f"{path}, line {i + 1}")
    launch = lines.str.startswith("# large_batch_cifar_10_fast").cumsum()
    is_run = lines.str.startswith("Train acc ")
    last = lines[launch == launch[is_run].iloc[-1]]
    runs = last[is_run].str.extract(RUN_LINE).fillna("")
    if not text.endswith("\n") and not runs["seconds"].iloc[-1] and len(runs) > 1:
        runs = runs[:-1]  # the last line is still being written
    heads = last.str.extract(HEAD_LINE)
    head = heads.ffill().iloc[-1].dropna().to_dict()
    settings = " ".join(heads["settings"].dropna())
    return from_rounded(path, runs, "\n".join(last), conditions_of(from_pairs(settings) | head))


def from_rounded(path: str, table: pd.DataFrame, summary: str, conditions: dict[str, str]) -> Log:
    """Return the log of printed runs. If accuracies have three decimals, only the summary tells the runs at 94%."""
    runs = numbers(table, {"accuracy": (0, 1), **SECONDS, **LOSSES})
    if table["accuracy"].str.partition(".")[2].str.len().max() >= 4:
        return make_log(path, runs, conditions)
    known = [int(reached) for reached, of in re.findall(SUMMARY, summary) if int(of) == len(runs)]
    return replace(make_log(path, runs, conditions), reached=known[0] if known else None)


def conditions_of(found: Mapping[Any, str]) -> dict[str, str]:
    """Select the conditions that may explain a difference. Each option of the recipe is one condition."""
    names = [name for name in ("images", *SIZES, *CONDITIONS, *MAY_DIFFER) if found.get(name) and name != "options"]
    options = from_pairs(found.get("options", ""))
    tests = {"test_images": found["validation_images"]} if found.get("validation_images") else {}
    return {name: found[name] for name in names} | tests | options | {"clock": "all parts"}


# ---- Names

SEPARATORS = "/:+"
AUTOMATIC = r"\d{8}T\d{6}-[0-9a-f]+"  # a campaign's name that no one gave


def short_names(logs: Sequence[Log]) -> list[str]:
    """Return the part of each log's name in which they differ, between characters of SEPARATORS.

    A campaign whose name is automatic is named by its recipe, and the options in which the logs differ.
    """
    names = [log.name for log in logs]
    start = end = 0
    if len(names) > 1:
        start = end_of_common_part(names)
        end = end_of_common_part([name[::-1] for name in names])
    return [name_of(log, log.name[start : len(log.name) - end] or log.name, logs) for log in logs]


def end_of_common_part(names: Sequence[str]) -> int:
    """Return the position after the last separator in the common beginning of all names; 0 if there is none."""
    end = 0
    for place, letters in enumerate(zip(*names, strict=False), 1):
        if len({*letters}) > 1:
            break
        if letters[0] in SEPARATORS:
            end = place
    return end


def name_of(log: Log, name: str, logs: Sequence[Log]) -> str:
    if not re.fullmatch(AUTOMATIC, log.campaign) or log.campaign not in name or "recipe" not in log.conditions:
        return name
    known = {*CONDITIONS, *SIZES, *MAY_DIFFER, "images", "test_images", "clock"}
    options = [option for option in log.conditions if option not in known]
    differing = [option for option in options if len({each.conditions.get(option) for each in logs}) > 1]
    return " ".join([log.conditions["recipe"], *(f"{each}={log.conditions[each]}" for each in differing[:3])])
