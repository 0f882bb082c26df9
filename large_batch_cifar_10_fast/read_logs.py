"""Read the results of a campaign into one `Log`: runs.tsv (several are taken together), the lines on STDOUT (ours and
the published ones), and DAWNBench's tables, such as timing_log.tsv. A spreadsheet may have saved the tables."""

import glob
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from . import ConfigError
from .data.cifar10 import CIFAR_10
from .runs import CONDITIONS, GOAL, PLACE, differences, from_pairs

PUBLISHED = Path(__file__).parent / "published"
OF_PUBLISHED = {"images": CIFAR_10, "recipe": "apple2019", "epochs": "18", "workers": "8", "precision": "fp16"}
OF_PUBLISHED |= {"device": "8 x Tesla V100-SXM2-32GB", "processes": "8", "clock": "upload and training alone"}
RUN_LINE = r"^Train acc \S+ loss (?P<train_loss>\S+), validation acc (?P<accuracy>\S+) "
RUN_LINE += r"loss (?P<validation_loss>\S+) wall time (?P<seconds>\S+)s\s*$"
HEAD_LINE = r"^# (?:large_batch_cifar_10_fast .*, code (?P<code>\w+),.*|Python .*, torch (?P<torch>[^,+]+).*"
HEAD_LINE += r"|(?P<workers>\d+) workers on (?P<processes>\d+) process(?:es)?, (?P<device>.*)"
HEAD_LINE += r"|data (?P<images>.*): .* images, SHA-256 (?P<digest>\w+)"
HEAD_LINE += r"|recipe (?P<recipe>\w+) (?P<options>.*)|(?:settings|computation) (?P<settings>.*))$"
SUMMARY = r"(?m)^(\d+) runs reached 0\.94 out of (\d+)\s*$"
LOSSES = dict.fromkeys(("train_loss", "validation_loss"), (-np.inf, np.inf, "nan"))  # limits, and a text for NaN
SECONDS = {"seconds": (1e-9, 1e9)}
Curve = tuple[np.ndarray, ...]  # seconds, and the median, lowest and highest accuracy, by epoch


@dataclass(frozen=True)
class Log:
    """The results of a campaign. `runs` has a row per run: accuracy (a fraction), validation_loss, seconds, and
    goal_seconds, the time to 94%; NaN where the log does not say, or the run diverged. `reached` counts the runs at
    94%; None if rounded accuracies do not tell."""

    name: str
    runs: pd.DataFrame
    reached: int | None
    conditions: dict[str, str]
    notes: list[str]
    curve: Curve | None


def read_log(source: str, campaign: str = "") -> Log:
    """Read `published`, a file by its content, or several runs.tsv (`a/runs.tsv,b/runs.tsv` or `*/runs.tsv`) as one;
    `campaign` names the one to read from a runs.tsv. Raise ConfigError for a damaged file."""
    found = [path for part in source.split(",") for path in sorted(glob.glob(part)) or [part]]
    paths = [source] if os.path.exists(source) else [*dict.fromkeys(found)]
    try:
        if source == "published":
            text, summary = (read_text(PUBLISHED / f"apple_8xv100_{name}") for name in ("50_runs.tsv", "summary.txt"))
            columns = {"valid_acc": "accuracy", "valid_loss": "validation_loss"}
            return from_rounded(source, parse_table(source, text).rename(columns=columns), summary, OF_PUBLISHED)
        texts = {path: read_text(Path(path)) for path in paths}
        if len(paths) == 1 and "\nTrain acc " in f"\n{texts[paths[0]]}" and not campaign:
            return from_lines(paths[0], texts[paths[0]])
        tables = {path: parse_table(path, text) for path, text in texts.items()}
        if len(paths) == 1 and "hours" in tables[paths[0]]:
            return from_epochs(paths[0], tables[paths[0]])
        if all("campaign" in table for table in tables.values()):
            return from_runs(source, tables, campaign)
    except (OSError, ValueError, KeyError) as error:  # a folder, a picture; errors of pandas name the line
        raise ConfigError(f"{source}: cannot be read ({error})") from error
    raise ConfigError(f"{source}, line 1: neither run log, nor runs.tsv, nor DAWNBench table")


def read_text(path: Path) -> str:
    """Decode UTF-8, or a spreadsheet's UTF-16; drop the `0: ` that `srun -l` puts before each line."""
    content = path.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return re.sub(r"(?m)^ *\d+: |\r$", "", content.decode(encoding, errors="replace"))


def parse_table(path: str, text: str) -> pd.DataFrame:
    """Return a table of text, indexed by `path, line N`. Leave out a last row that is still being written."""
    head, last = text.partition("\n")[0], text.rpartition("\n")[2]
    separator = max("\t,;", key=head.count)
    text = text.removesuffix(last if last.count(separator) < head.count(separator) else "")
    how: dict[str, Any] = {"header": None, "dtype": str, "na_filter": False, "skip_blank_lines": False}
    table = pd.read_csv(io.StringIO(text), sep=separator, **how).replace({"TRUE": "True", "FALSE": "False"})
    table = table.rename(index=lambda i: f"{path}, line {i + 1}").set_axis(table.iloc[0], axis=1).iloc[1:]
    table = table.loc[(table != "").any(axis=1), ~table.columns.duplicated()]
    if table.empty:
        raise ConfigError(f"{path}, line 1: no rows below the header")
    return table


def numbers(table: pd.DataFrame, limits: Mapping[str, tuple]) -> pd.DataFrame:
    """Return columns as float64; raise ConfigError, naming file and line, for a value outside its limits."""
    found = pd.DataFrame(index=table.index)
    for name, (low, high, *words) in limits.items():
        texts = table.get(name, pd.Series("", table.index)).str.strip()
        found[name] = values = pd.to_numeric(texts, errors="coerce").astype(float)
        for line, text in texts[~(values.between(low, high) | texts.str.lower().isin(words))].items():
            raise ConfigError(f"{line}: {name} is {text[:40]!r}, not a number of {low:g} to {high:g}")
    return found


def make_log(name: str, runs: pd.DataFrame, conditions: dict[str, str], curve: Curve | None = None) -> Log:
    """Return a log of numbers, and count the runs at 94%. A run whose loss is not finite has diverged."""
    finite = runs.filter([*LOSSES]).abs().lt(np.inf).all(axis=1)
    runs = runs.reindex(columns=["accuracy", "validation_loss", "seconds", "goal_seconds"])
    runs.loc[~finite, ["validation_loss", "goal_seconds"]] = np.nan
    notes = [] if finite.all() else [f"{name}: {(~finite).sum()} runs diverged"]
    return Log(name, runs, int(((runs["accuracy"] >= GOAL) & finite).sum()), conditions, notes, curve)


def from_runs(source: str, tables: Mapping[str, pd.DataFrame], campaign: str) -> Log:
    """Read the named or the last campaign of each table. Raise ConfigError if conditions differ or a seed recurs."""
    parts = {path: t[t["campaign"] == (campaign or t["campaign"].iloc[-1])] for path, t in tables.items()}
    for path in [path for path, part in parts.items() if part.empty]:
        raise ConfigError(f"{path}: no campaign {campaign}, only {', '.join(tables[path]['campaign'].unique())}")
    rows = pd.concat(parts.values()).fillna("")
    alike = rows.reindex(columns=["images", *CONDITIONS, *PLACE], fill_value="").drop_duplicates()
    conditions: dict[str, str] = {}  # an earlier row's, so that what one table does not say, another may
    for line, row in alike.to_dict("index").items():
        other = conditions_of(row)
        if differing := differences(other, conditions, [n for n in other if n not in (*PLACE, "images")]):
            raise ConfigError(f"{line} differs from {alike.index[0]} in {differing}: they cannot be taken together")
        conditions = other | conditions
    for seed, lines in rows.groupby("seed").groups.items():
        if len(lines) > 1:
            raise ConfigError(f"seed {seed} is in {lines[0]} and in {lines[1]}: leave out one")
    runs = numbers(rows, {"validation_images": (1, 1e9), **SECONDS, "goal_seconds": (1e-9, 1e9, ""), **LOSSES})
    count = numbers(rows, {"validation_count": (0, runs["validation_images"].max())})["validation_count"]
    runs["accuracy"] = count / runs["validation_images"]
    log = make_log(source, runs, conditions, curve_of(parts))
    for name in [name for name in PLACE if alike[name].nunique() > 1]:
        log.notes.append(f"{source} has more than one {name}: {', '.join(alike[name].unique())}")
        log.conditions.pop(name, None)
    return log


def curve_of(parts: Mapping[str, pd.DataFrame]) -> Curve | None:
    """Return the median over the runs by epoch, and the range of accuracies, from the epochs.tsv beside each table."""
    found = []
    for path, rows in parts.items():
        if (beside := Path(path).with_name("epochs.tsv")).exists():
            table = parse_table(str(beside), read_text(beside))
            found.append(table[(table["campaign"] == rows["campaign"].iloc[0]) & table["run"].isin(rows["run"])])
    if not any(map(len, found)):
        return None
    limits = {"epoch": (1, 1e9), **SECONDS, "validation_accuracy": (0, 1)}
    epochs = numbers(pd.concat(found), limits).groupby("epoch")
    accuracy = epochs["validation_accuracy"].agg(["median", "min", "max"])
    return epochs["seconds"].median().to_numpy(), *accuracy.to_numpy().T


def from_epochs(path: str, table: pd.DataFrame) -> Log:
    """Read a DAWNBench table: the epochs of one run."""
    epochs = numbers(table, {"hours": (0, 1e6), "top1Accuracy": (0, 100)})
    seconds, accuracy = 3600 * epochs["hours"].to_numpy(), epochs["top1Accuracy"].to_numpy() / 100
    goal = next(iter(seconds[accuracy >= GOAL]), np.nan)
    run = pd.DataFrame({"accuracy": accuracy[-1:], "seconds": seconds[-1:], "goal_seconds": goal})
    return make_log(path, run, {"epochs": str(len(accuracy))}, curve=(seconds, accuracy, accuracy, accuracy))


def from_lines(path: str, text: str) -> Log:
    """Read a run log. If several launches were appended to it, the last one with runs counts."""
    lines = pd.Series(text.splitlines()).rename(lambda i: f"{path}, line {i + 1}")
    launch, is_run = lines.str.startswith("# large_batch_cifar_10_fast").cumsum(), lines.str.startswith("Train acc ")
    last = lines[launch == launch[is_run].iloc[-1]]
    runs = last[is_run].str.extract(RUN_LINE).fillna("")
    if not text.endswith("\n") and not runs["seconds"].iloc[-1] and len(runs) > 1:
        runs = runs[:-1]  # the last line is still being written
    heads = last.str.extract(HEAD_LINE)
    head, settings = heads.ffill().iloc[-1].dropna().to_dict(), " ".join(heads["settings"].dropna())
    return from_rounded(path, runs, "\n".join(last), conditions_of(from_pairs(settings) | head))


def from_rounded(path: str, table: pd.DataFrame, summary: str, conditions: dict[str, str]) -> Log:
    """Return the log of printed runs. By accuracies of three decimals only a summary can count the runs at 94%."""
    runs = numbers(table, {"accuracy": (0, 1), **SECONDS, **LOSSES})
    if table["accuracy"].str.partition(".")[2].str.len().max() >= 4:
        return make_log(path, runs, conditions)
    known = [int(reached) for reached, of in re.findall(SUMMARY, summary) if int(of) == len(runs)]
    return replace(make_log(path, runs, conditions), reached=known[0] if known else None)


def conditions_of(found: Mapping[Any, str]) -> dict[str, str]:
    """Select what may explain a difference, each option of the recipe by itself."""
    names = [name for name in ("images", *CONDITIONS, *PLACE) if found.get(name) and name != "options"]
    options = from_pairs(found.get("options", ""))
    return {name: found[name] for name in names} | options | {"clock": "set-up and training, not validation"}
