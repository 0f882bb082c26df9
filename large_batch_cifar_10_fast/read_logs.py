"""Read the results of a campaign, whoever wrote them, into one `Log`.

Forms: our runs.tsv (also several shares of one campaign), the lines on STDOUT (ours and the published ones),
timing_log.tsv and other DAWNBench tables, and the published table. A spreadsheet may have saved the tables.
"""

import glob
import io
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from .campaign import COLUMNS, CONDITIONS, GOAL, INTEGERS, epochs_beside, merged
from .options import CIFAR_10, REPO, ConfigError, RunConfig, from_pairs

PUBLISHED = REPO / "published"
CONDITIONS_READ = ("images", "digest", "device", "recipe", "workers", "processes", *CONDITIONS)
REMOVED_OPTIONS = {"tail_epochs": "0.0", "brightness": "0.0", "contrast": "0.0", "activation": "gelu"}  # when inactive
REMOVED_OPTIONS |= {"rescale_every": "1"}
RUN_LINE = (
    r"^Train acc (?P<train_accuracy>\S+) loss (?P<train_loss>\S+), validation acc (?P<accuracy>\S+) "
    r"loss (?P<validation_loss>\S+) wall time (?P<seconds>\S+)s\s*$"
)
HEAD_LINE = (
    r"^# (?:(?P<workers>\d+) workers on (?P<processes>\d+) process(?:es)?, (?P<device>.*)"
    r"|data (?P<images>.*): \d+ training and (?P<test>\d{1,9}) test images, SHA-256 (?P<digest>\w+)"
    r"|recipe (?P<recipe>\w+) (?P<options>.*)|settings (?P<settings>.*)|campaign (?P<campaign>\S+), .*)$"
)
SUMMARY = r"(?m)^Lowest accuracy (\d\.\d+) median (\d\.\d+)\s+(\d{1,9}) runs reached 0\.94 out of (\d{1,9})\s*$"
# The least and the greatest number of a column, and a text that stands for NaN.
ACCURACY, COUNT, TIME = (0, 1), (0, 1e19), (1e-9, 1e9)
LOSSES = dict.fromkeys(("train_loss", "validation_loss"), (-np.inf, np.inf, "nan"))
RUNS = {"run": COUNT, "runs": COUNT, "seed": COUNT, "seconds": TIME, "goal_seconds": (*TIME, ""), **LOSSES}
EPOCHS = {"run": COUNT, "epoch": COUNT, "seconds": COUNT, "validation_accuracy": ACCURACY}
REACHED = GOAL - 1e-12  # the least accuracy that counts as 94%, in binary fractions


@dataclass(frozen=True)
class Log:
    """The results of a campaign, one entry per run; NaN where the log does not say, or the run diverged.

    Accuracies are fractions, each within `rounding` of the true one (0: exact). `loss` is of validation. `reached`
    bounds the number of runs that reached 94%. `conditions` are settings, images and hardware. `epochs` is a curve,
    seconds and accuracies: of one run, or the median over the runs, whose range of accuracies is `spread`.
    """

    name: str
    accuracy: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    goal_seconds: np.ndarray
    reached: tuple[int, int]
    diverged: int  # number of runs
    rounding: float = 0.0
    conditions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lowest: float = np.nan  # from a summary, more exact than the rounded accuracies
    median: float = np.nan
    epochs: tuple[np.ndarray, np.ndarray] | None = None
    spread: tuple[np.ndarray, np.ndarray] | None = None


def read_log(source: str, campaign: str | None = None) -> Log:
    """Read `published`, a file by its content, or the shares of a campaign: `share0/runs.tsv,share1/runs.tsv` or a
    pattern like `share*/runs.tsv`. Raise ConfigError for a damaged file."""
    if source == "published":
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text()
        log = _with_summary(read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv")), summary)
        conditions = {"images": CIFAR_10, "device": "8 x Tesla V100-SXM2-32GB", "recipe": "apple2019", "workers": "8"}
        conditions |= {"clock": "upload and training alone", "epochs": "18"}
        return replace(log, name="published", conditions=conditions)
    found = [path for part in source.split(",") for path in sorted(glob.glob(part)) or [part]]
    paths = [source] if os.path.exists(source) else [*dict.fromkeys(found)]
    several, name = len(paths) > 1, source if len(paths) > 1 else paths[0]
    try:
        texts = [_text(Path(path).read_bytes()) for path in paths]
        if "\nTrain acc " in f"\n{texts[0]}" and not several and not campaign:
            return _from_lines(name, texts[0])
        tables = {path: _table(path, text) for path, text in zip(paths, texts, strict=True)}
        table = tables[paths[0]]
        if several or campaign or "validation_count" in table:
            return _from_runs(name, tables, campaign)
        if "valid_acc" in table:
            return _from_rounded(name, table.rename(columns={"valid_acc": "accuracy", "valid_loss": "validation_loss"}))
        if table.columns[0] in ("epoch", "epochs"):
            return _from_epochs(name, table)
    except (OSError, ValueError, KeyError) as error:  # a folder, a picture; errors of pandas name the line
        raise ConfigError(f"{source}: cannot be read ({error})") from error
    raise ConfigError(f"{name}, line 1: neither run log, nor runs.tsv, nor DAWNBench table")


def _text(content: bytes) -> str:
    """Decode UTF-8, or a spreadsheet's UTF-16; drop the `0: ` that `srun -l` puts before each line."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    lines = content.decode(encoding, errors="replace").replace("\r\n", "\n")
    return re.sub(r"(?m)^ *\d+: (?=#|Train acc|[A-Z])", "", lines)


def _table(path: str, text: str) -> pd.DataFrame:
    """Return a table of text, indexed by `path, line N`. Leave out a last row that is still being written."""
    head, last = text.partition("\n")[0], text.rpartition("\n")[2]
    separator = max("\t,;", key=head.count)
    text = text.removesuffix(last if last.count(separator) < head.count(separator) else "")
    how = {"dtype": str, "keep_default_na": False, "skip_blank_lines": False, "header": None}
    table = pd.read_csv(io.StringIO(text), sep=separator, **how).replace({"TRUE": "True", "FALSE": "False"})
    table = table.rename(index=lambda i: f"{path}, line {i + 1}").set_axis(table.iloc[0], axis=1).iloc[1:]
    table = table.loc[(table != "").any(axis=1), ~table.columns.duplicated()]
    if table.empty:
        raise ConfigError(f"{path}, line 1: nothing to read below the header")
    return table


def _numbers(table: pd.DataFrame, limits: dict[str, tuple]) -> pd.DataFrame:
    """Return columns as float64; raise ConfigError, naming file and line, for a value outside its limits."""
    numbers = pd.DataFrame(index=table.index)
    for name, (low, high, *none) in limits.items():
        pattern, kind = ("[0-9]+", "an integer") if name in INTEGERS else (".*", "a number")
        texts = table.get(name, pd.Series("", table.index)).str.strip()
        numbers[name] = values = pd.to_numeric(texts, errors="coerce").astype(float)
        valid = texts.str.fullmatch(pattern) & values.between(low, high) | texts.str.lower().isin(none)
        for line, text in texts[~valid].items():
            raise ConfigError(f"{line}: {name} is {text[:40]!r}, not {kind} of {low:g} to {high:g}")
    return numbers


def _log(name: str, runs: pd.DataFrame, rounding: float = 0.0, **more) -> Log:
    """Return a log of numbers: columns accuracy and seconds and, where known, losses and goal_seconds."""
    finite = np.isfinite(runs.filter([*LOSSES])).all(axis=1)
    runs = runs.reindex(columns=["accuracy", "validation_loss", "seconds", "goal_seconds"])
    runs.loc[~finite, ["validation_loss", "goal_seconds"]] = np.nan
    reached = tuple(int((runs["accuracy"][finite] + error >= REACHED).sum()) for error in (-rounding, rounding))
    arrays = (runs[column].to_numpy() for column in runs)
    return Log(name, *arrays, reached, int((~finite).sum()), rounding, **more)


def _from_runs(source: str, tables: dict[str, pd.DataFrame], campaign: str | None) -> Log:
    """Read the named or the last campaign of a runs.tsv, or of several that are shares of one campaign."""
    shares = {}
    for path, table in tables.items():
        if "campaign" not in table:
            raise ConfigError(f"{path}, line 1: no column campaign, so it is not a runs.tsv")
        names = table["campaign"]
        if campaign and campaign not in set(names):
            raise ConfigError(f"{path}: no campaign {campaign}, only {', '.join(names.unique())}")
        shares[path] = table[names == (campaign or names.iloc[-1])].reindex(columns=COLUMNS, fill_value="")
    rows = pd.concat(shares.values())
    runs, images = _numbers(rows, RUNS), _numbers(rows, {"validation_images": (1, 1e9)})["validation_images"]
    runs["accuracy"] = _numbers(rows, {"validation_count": (0, images.max())})["validation_count"] / images
    planned = int(runs["runs"].iloc[-1])
    merged({path: share.to_dict("records") for path, share in shares.items()})  # checks that they are one campaign
    notes = (f"{source} holds {len(runs)} of the campaign's {planned} runs",) if len(runs) < planned else ()
    hardware = {name: " and ".join(rows[name].unique()) for name in ("device", "processes")}
    conditions = _conditions(rows.iloc[-1].to_dict() | hardware)
    ordered = runs.sort_values("run") if len(shares) > 1 else runs  # a single table stays as its runs finished
    return _log(source, ordered, conditions=conditions, notes=notes, **_curve(source, shares))


def _curve(source: str, shares: dict[str, pd.DataFrame]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the median over all runs and its range, from each epochs.tsv; of a run made twice, the last rows count."""
    rows = [row for path, share in shares.items() for row in epochs_beside(Path(path), share["campaign"].iloc[0])]
    if not rows:
        return {}
    epochs = _numbers(pd.DataFrame(rows, [f"epochs.tsv beside {source}"] * len(rows)).fillna(""), EPOCHS)
    by_epoch = epochs.drop_duplicates(["run", "epoch"], keep="last").groupby("epoch")
    accuracy = by_epoch["validation_accuracy"].agg(["median", "min", "max"])
    median, low, high = (accuracy[name].to_numpy() for name in accuracy)
    return {"epochs": (by_epoch["seconds"].median().to_numpy(), median), "spread": (low, high)}


def _from_epochs(path: str, table: pd.DataFrame) -> Log:
    """Read a DAWNBench table: the epochs of one run."""
    epochs = _numbers(table, {"hours": COUNT, "top1Accuracy": (0, 100)})
    _numbers(table[-1:], {"hours": TIME})
    seconds, accuracy = 3600 * epochs["hours"].to_numpy(), epochs["top1Accuracy"].to_numpy() / 100
    rounding = _rounding(epochs["top1Accuracy"].map("{:.10g}".format)) / 100  # 12.839999999999998 stands for 12.84
    goal = next(iter(seconds[accuracy >= REACHED]), np.nan)
    run = pd.DataFrame({"accuracy": accuracy[-1:], "seconds": seconds[-1:], "goal_seconds": goal})
    return _log(path, run, rounding, conditions={"epochs": str(len(accuracy))}, epochs=(seconds, accuracy))


def _from_lines(path: str, text: str) -> Log:
    """Read a run log. A resumed launch repeats the runs of its campaign, so the last launch with runs counts."""
    lines = pd.Series(text.splitlines()).rename(lambda i: f"{path}, line {i + 1}")
    launch, is_run = lines.str.startswith("# large_batch_cifar_10_fast").cumsum(), lines.str.startswith("Train acc ")
    last = launch == launch[is_run].iloc[-1]
    runs, heads = lines[is_run & last].str.extract(RUN_LINE).fillna(""), lines.str.extract(HEAD_LINE)
    if not text.endswith("\n") and not runs["seconds"].iloc[-1] and len(runs) > 1:
        runs = runs[:-1]  # the last line is still being written
    found = heads[last].ffill().iloc[-1].dropna().to_dict()
    others = heads["campaign"][launch.isin(launch[is_run])].nunique() - 1
    notes = (f"{path} holds {others} other campaigns: only the last one's runs are read",) if others > 0 else ()
    conditions = _conditions(from_pairs(found.get("settings", "")) | found)
    log = _from_rounded(path, runs, int(found.get("test", 0)), conditions=conditions, notes=notes)
    return _with_summary(log, "\n".join(lines[last]))


def _from_rounded(path: str, table: pd.DataFrame, images: int = 0, **more) -> Log:
    """Return the log of runs whose accuracies are rounded, unless the number of test images makes them exact."""
    runs, rounding = _numbers(table, {"accuracy": ACCURACY, "seconds": TIME, **LOSSES}), _rounding(table["accuracy"])
    if images and images * 2 * rounding <= 1:  # every count of images prints differently
        runs["accuracy"], rounding = np.rint(runs["accuracy"] * images) / images, 0.0
    return _log(path, runs, rounding, **more)


def _rounding(numbers: pd.Series) -> float:
    """Return half of the last decimal of printed numbers."""
    return 0.5 * 10.0 ** -int(numbers.str.partition(".")[2].str.len().max())


def _with_summary(log: Log, text: str) -> Log:
    """Add the summary's numbers, more exact than the rounded ones of the runs, if they agree with the runs."""
    if not (summary := re.search(SUMMARY, text)):
        return replace(log, notes=(*log.notes, f"{log.name} has no summary: its campaign did not finish"))
    (reached, runs), (least, most) = map(int, summary.groups()[2:]), log.reached
    if runs != len(log.accuracy) or not least <= reached <= most:
        return replace(log, notes=(*log.notes, f"{log.name}: its summary contradicts its runs and is not used"))
    return replace(log, reached=(reached, reached), lowest=float(summary[1]), median=float(summary[2]))


def _conditions(found: dict[str, str]) -> dict[str, str]:
    """Select what may explain a difference: CONDITIONS_READ and the recipe's options (once among the settings)."""
    options = from_pairs(found.get("options", found.get("settings", ""))).items() - REMOVED_OPTIONS.items()
    options = {name: value for name, value in sorted(options) if name not in RunConfig.__dataclass_fields__}
    clock = {"clock": "set-up and training, not validation"} if found else {}
    return {name: found[name] for name in CONDITIONS_READ if found.get(name)} | options | clock
