"""Read the results of a campaign, whoever wrote them, into one `Log`.

Forms: our runs.tsv (also several shares of one campaign), the lines on STDOUT (ours and the published ones),
timing_log.tsv and other DAWNBench tables, and the published table. A spreadsheet may have saved the tables.
"""

import contextlib
import glob
import io
import math
import os
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from .campaign import ALIKE, CONDITIONS, GOAL, merged
from .options import CIFAR_10, REPO, ConfigError, RunConfig

PUBLISHED = REPO / "published"
OUR_CLOCK = "set-up and training, not validation"
CLOCKS = {  # of DAWNBench entries, where it is known
    "basenet.tsv": "training and validation, not set-up",
    "fastai_pytorch.tsv": "validation, too",
    "fastai_pytorch_single_volta.tsv": "validation, too",
}
CONDITIONS_READ = ("images", "digest", "device", "recipe", "workers", "processes", *CONDITIONS)
REMOVED_OPTIONS = {"tail_epochs": "0.0", "brightness": "0.0", "contrast": "0.0", "activation": "gelu"}  # when inactive
LONGEST = 1e9  # seconds or hours; sums and ratios of longer times could overflow
RUN = re.compile(
    r"Train acc (?P<train_accuracy>\S+) loss (?P<train_loss>\S+), validation acc (?P<accuracy>\S+) "
    r"loss (?P<loss>\S+) wall time (?P<seconds>\S+)s\s*"
)
HEAD = re.compile(
    r"# (?:(?P<workers>\d+) workers on (?P<processes>\d+) process(?:es)?, (?P<device>.*)"
    r"|data (?P<images>.*): \d+ training and (?P<test>\d{1,9}) test images, SHA-256 (?P<digest>\w+)"
    r"|recipe (?P<recipe>\w+) (?P<options>.*)|settings (?P<settings>.*)|campaign (?P<campaign>\S+), .*)\s*"
)
LOWEST = re.compile(r"Lowest accuracy (\d\.\d+) median (\d\.\d+)\s*")
REACHED = re.compile(r"(\d{1,9}) runs reached 0\.94 out of (\d{1,9})\s*")


@dataclass(frozen=True)
class Log:
    """The results of a campaign, one entry per run; NaN where the log does not say.

    Accuracies are fractions, each within `rounding` of the true one (0: exact). `loss` is of validation, NaN where a
    run diverged, empty where the log has no losses. `reached` bounds the number of runs that reached 94%.
    `conditions` are settings, images and hardware. `epochs` is a curve, seconds and
    accuracies: the first run's, or the median over the runs, whose range is `spread`.
    """

    name: str
    accuracy: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    goal_seconds: np.ndarray
    reached: tuple[int, int]
    rounding: float = 0.0
    conditions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lowest: float = math.nan  # from a summary, more exact than the rounded accuracies
    median: float = math.nan
    epochs: tuple[np.ndarray, np.ndarray] | None = None
    spread: tuple[np.ndarray, np.ndarray] | None = None  # least and greatest accuracy after each epoch, over the runs

    @property
    def diverged(self) -> int:
        return int((~np.isfinite(self.loss)).sum())


def read_log(source: str, campaign: str | None = None) -> Log:
    """Read a file by its content, `published`, or the shares of a campaign: `share0/runs.tsv,share1/runs.tsv` or a
    pattern like `share*/runs.tsv`. Raise ConfigError for a damaged file."""
    if source == "published":
        log = read_log(str(PUBLISHED / "apple_8xv100_50_runs.tsv"))
        summary = (PUBLISHED / "apple_8xv100_summary.txt").read_text().splitlines()
        conditions = {"images": CIFAR_10, "device": "8 x Tesla V100-SXM2-32GB", "recipe": "apple2019", "workers": "8"}
        conditions |= {"clock": "upload and training alone", "epochs": "18"}
        return replace(_with_summary(log, summary), name="published", conditions=conditions)
    paths = [path for part in source.split(",") for path in sorted(glob.glob(part)) or [part]]
    if os.path.exists(source) or len(paths) == 1:
        return _read_file(source if os.path.exists(source) else paths[0], campaign)
    tables = {path: _last_campaign(path, read_table(path, _text(path)), campaign) for path in paths}
    for path, table in tables.items():
        columns = {name: _column(path, table, name) for name in (*ALIKE, "seed", "run")}
        for name, column in ((name, columns[name]) for name in ("seed", "run")):
            for line, text in column[~column.str.fullmatch("[0-9]{1,19}")].items():
                raise ConfigError(f"{path}, line {line}: {name} is {text[:40]!r}, not a whole number")
    if len(tables) < len(paths):
        raise ConfigError(f"{source}: the same file is named twice: leave out one of them")
    rows = merged({path: table.to_dict("records") for path, table in tables.items()})
    return _from_runs(source, pd.DataFrame(rows, index=range(2, len(rows) + 2)))


def _read_file(path: str, campaign: str | None) -> Log:
    text = _text(path)
    lines = text.splitlines()
    if any(line.startswith("Train acc ") for line in lines) and not campaign:
        return _from_lines(path, lines)
    table = read_table(path, text)
    if "validation_count" in table:
        return _from_runs(path, _last_campaign(path, table, campaign))
    if campaign:
        raise ConfigError(f"{path}: --campaign is for a runs.tsv, which this is not")
    if "valid_acc" in table:
        return _from_rounded(path, table.rename(columns={"valid_acc": "accuracy", "valid_loss": "loss"}))
    if table.columns[0] in ("epoch", "epochs"):
        return _with_conditions_beside(Path(path), _from_epochs(path, table))
    raise ConfigError(f"{path}, line 1: neither run log, nor runs.tsv, nor DAWNBench table")


def _text(path: str) -> str:
    try:
        return (content := Path(path).read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: cannot be read ({error.reason}, byte {error.start})") from None


def read_table(path: str, text: str) -> pd.DataFrame:
    """Return a table of text, indexed by line number. A last row that is still being written is left out."""
    lines = text.splitlines()
    separator = max("\t,;", key=lines[0].count) if lines else "\t"
    if len(lines) > 2 and not text.endswith("\n") and lines[-1].count(separator) < lines[0].count(separator):
        lines.pop()
    how = {"sep": separator, "dtype": str, "keep_default_na": False, "skip_blank_lines": False, "header": None}
    try:
        table = pd.read_csv(io.StringIO("\n".join([*lines, ""])), **how).set_axis(range(1, len(lines) + 1))
    except ValueError as error:  # of pandas: fields beyond the header's, a quote without its end
        place = re.search(r"(line|row) (\d+)", str(error))  # rows count from 0
        line = int(place[2]) + (place[1] == "row") if place else 1
        raise ConfigError(f"{path}, line {line}: neither run log nor table ({' '.join(str(error).split())})") from None
    table = table.set_axis(table.iloc[0], axis=1).iloc[1:].replace({"TRUE": "True", "FALSE": "False"})
    return table[(table != "").any(axis=1)]


def _column(path: str, table: pd.DataFrame, name: str) -> pd.Series:
    if list(table.columns).count(name) != 1:
        raise ConfigError(f"{path}, line 1: {'more than one' if name in table else 'no'} column {name}")
    if table.empty:
        raise ConfigError(f"{path}, line 1: a header and nothing below it")
    return table[name]


def _numbers(path: str, table: pd.DataFrame, name: str, low=-math.inf, high=math.inf, nan: str = "-") -> np.ndarray:
    """Return a column as floats; raise ConfigError, naming the line, for one outside [low, high] that is not `nan`."""
    texts = _column(path, table, name)
    values = pd.to_numeric(texts, errors="coerce").to_numpy(float)
    wrong = ~((values >= low) & (values <= high)) & (texts.str.strip().str.lower() != nan)
    for line, text in texts[wrong].items():
        what = f"a number of {low:g} to {high:g}" if math.isfinite(high) else "a number"
        raise ConfigError(f"{path}, line {line}: {name} is {text[:40]!r}, not {what}")
    return values


def _losses(path: str, table: pd.DataFrame, train: str, validation: str) -> np.ndarray:
    """Return the validation losses, NaN where a run diverged."""
    both = [_numbers(path, table, name, nan="nan") for name in (train, validation)]
    return np.where(np.isfinite(both).all(axis=0), both[1], math.nan)


def _last_campaign(path: str, table: pd.DataFrame, campaign: str | None) -> pd.DataFrame:
    """Return the rows of the named campaign of a runs.tsv, or of the last one."""
    names = _column(path, table, "campaign")
    if campaign and campaign not in set(names):
        raise ConfigError(f"{path}: no campaign {campaign}, only {', '.join(names.unique())}")
    return table[names == (campaign or names.iloc[-1])]


def _from_runs(path: str, rows: pd.DataFrame) -> Log:
    images = _numbers(path, rows, "validation_images", 1, LONGEST)
    count = _numbers(path, rows, "validation_count", 0, images.max())
    run, planned = _numbers(path, rows, "run", 0, LONGEST), int(_numbers(path, rows, "runs", 1, LONGEST)[-1])
    for line in rows.index[pd.Series(run).duplicated()]:
        raise ConfigError(f"{path}, line {line}: run {rows['run'][line]} is there a second time: take one of them out")
    loss = _losses(path, rows, "train_loss", "validation_loss")
    seconds = _numbers(path, rows, "seconds", 1 / LONGEST, LONGEST)
    goal = np.where(np.isfinite(loss), _numbers(path, rows, "goal_seconds", 1 / LONGEST, LONGEST, nan=""), math.nan)
    reached = int((np.isfinite(loss) & (count >= GOAL * images)).sum())
    notes = (f"{path} holds {len(rows)} of the campaign's {planned} runs",) if len(rows) < planned else ()
    hardware = {name: " and ".join(rows[name].unique()) for name in ("device", "processes") if name in rows}
    conditions = _conditions(rows.iloc[-1].to_dict() | hardware)
    more = {"conditions": conditions, "notes": notes} | _epochs_beside(Path(path), rows["campaign"].iloc[-1])
    return Log(path, count / images, loss, seconds, goal, (reached, reached), **more)


def _epochs_beside(path: Path, campaign: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the median curve of a campaign's runs and its range, from the epochs.tsv beside a runs.tsv, if any."""
    beside = path.with_name("epochs.tsv")
    if not beside.is_file():
        return {}
    name = str(beside)
    table = read_table(name, _text(name))
    limits = {"run": LONGEST, "epoch": LONGEST, "seconds": LONGEST, "validation_accuracy": 1}
    numbers = pd.DataFrame({column: _numbers(name, table, column, 0, high) for column, high in limits.items()})
    mine = numbers[(_column(name, table, "campaign") == campaign).to_numpy()].drop_duplicates(
        ["run", "epoch"], keep="last"
    )
    if mine.empty:
        return {}
    seconds, accuracy = (mine.groupby("epoch")[column] for column in ("seconds", "validation_accuracy"))
    curve = seconds.median().to_numpy(), accuracy.median().to_numpy()
    return {"epochs": curve, "spread": (accuracy.min().to_numpy(), accuracy.max().to_numpy())}


def _from_epochs(path: str, table: pd.DataFrame) -> Log:
    """Read a DAWNBench table: the epochs of one run."""
    seconds = 3600 * _numbers(path, table, "hours", 0, LONGEST)
    accuracy = _numbers(path, table, "top1Accuracy", 0, 100) / 100
    if not seconds[-1] > 0:
        raise ConfigError(f"{path}, line {table.index[-1]}: hours of the last epoch is 0")
    # Not more digits than float64 holds: some entries print 12.839999999999998 for 12.84.
    rounding = 0.5 * 10.0 ** -(min(_decimals(f"{100 * value:.10g}" for value in accuracy), 10) + 2)
    goal = next(iter(seconds[(accuracy >= GOAL - 1e-12) & (seconds > 0)]), math.nan)
    conditions = {"epochs": str(len(accuracy))}
    if (name := Path(path).name) in CLOCKS:
        conditions |= {"images": CIFAR_10, "clock": CLOCKS[name]}
    last, none = accuracy[-1:], np.array([])
    times, reached = (seconds[-1:], np.array([goal])), _bounds(last, rounding)
    return Log(path, last, none, *times, reached, rounding, conditions, epochs=(seconds, accuracy))


def _with_conditions_beside(path: Path, log: Log) -> Log:
    """Add the conditions that a timing_log.tsv lacks, from the row of the same run in the runs.tsv beside it."""
    with contextlib.suppress(ConfigError):
        beside = str(path.with_name("runs.tsv"))
        rows = read_table(beside, _text(beside))
        for i in np.flatnonzero(np.isclose(_numbers(beside, rows, "seconds"), log.seconds[-1], rtol=1e-9, atol=0)):
            return replace(log, conditions=_conditions(rows.iloc[i].to_dict()))
    return log


def _from_rounded(path: str, runs: pd.DataFrame, images: int = 0, **more) -> Log:
    """Return the log of runs whose accuracies are rounded, unless the number of test images tells them exactly."""
    accuracy = _numbers(path, runs, "accuracy", 0, 1)
    seconds, loss = _numbers(path, runs, "seconds", 1 / LONGEST, LONGEST), _losses(path, runs, "train_loss", "loss")
    rounding = 0.5 * 10.0 ** -_decimals(runs["accuracy"])
    if images and images * 2 * rounding <= 1:  # every count of images prints differently
        accuracy, rounding = np.rint(accuracy * images) / images, 0.0
    reached, unknown = _bounds(accuracy[np.isfinite(loss)], rounding), np.full(len(accuracy), math.nan)
    return Log(path, accuracy, loss, seconds, unknown, reached, rounding, **more)


def _from_lines(path: str, lines: list[str]) -> Log:
    """Read a run log. Each launch begins with a head and a resumed one repeats all runs, so the last launch counts."""
    heads = [i for i, line in enumerate(lines) if line.startswith("# large_batch_cifar_10_fast")]
    launches = [range(*ends) for ends in pairwise([0, *heads, len(lines)])]
    launches = [launch for launch in launches if any(lines[i].startswith("Train acc ") for i in launch)]
    by_launch = [_head(lines[i] for i in launch) for launch in launches]
    runs = {i + 1: RUN.fullmatch(lines[i]) for i in launches[-1] if lines[i].startswith("Train acc ")}
    for number in (number for number, run in runs.items() if not run):
        raise ConfigError(f"{path}, line {number}: not a whole run line: {lines[number - 1][:60]!r}")
    table = pd.DataFrame([run.groupdict() for run in runs.values()], index=[*runs])
    _numbers(path, table, "train_accuracy", 0, 1)
    found, notes = by_launch[-1], _other_campaigns(path, by_launch)
    conditions = _conditions(_pairs(found.get("settings", "")) | found)
    log = _from_rounded(path, table, int(found.get("test", 0)), conditions=conditions, notes=notes)
    return _with_summary(log, [lines[i] for i in launches[-1]])


def _head(launch) -> dict[str, str]:
    matches = filter(None, map(HEAD.fullmatch, launch))
    return {name: value for match in matches for name, value in match.groupdict().items() if value is not None}


def _other_campaigns(path: str, by_launch: list[dict[str, str]]) -> tuple[str, ...]:
    """Return a note on the campaigns before the last; a launch without a name is a campaign of its own."""
    others = len({found.get("campaign", str(i)) for i, found in enumerate(by_launch)}) - 1
    unlike = [name for name in ("images", "digest", "recipe") if len({found.get(name) for found in by_launch}) > 1]
    differ = f", with different {' and '.join(unlike)}" if unlike else ""
    return (f"{path} holds {others} other campaigns{differ}: only the last one's runs are read",) if others else ()


def _with_summary(log: Log, lines: list[str]) -> Log:
    """Add what the closing lines say more exactly than the rounded lines above, if they agree with these runs."""
    if not (total := next(filter(None, map(REACHED.fullmatch, lines)), None)):
        return replace(log, notes=(*log.notes, f"{log.name} has no summary: its campaign did not finish"))
    (reached, runs), (least, most) = map(int, total.groups()), log.reached
    if runs != len(log.accuracy) or not least <= reached <= most:
        note = f"{log.name}: its summary ({total[0].strip()}) contradicts its {len(log.accuracy)} runs: not used"
        return replace(log, notes=(*log.notes, note))
    log = replace(log, reached=(reached, reached))
    if match := next(filter(None, map(LOWEST.fullmatch, lines)), None):
        log = replace(log, lowest=float(match[1]), median=float(match[2]))
    return log


def _pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", text))


def _conditions(found: dict[str, str]) -> dict[str, str]:
    """Select what may explain a difference: CONDITIONS_READ and the recipe's options (once among the settings)."""
    options = _pairs(found.get("options", found.get("settings", ""))).items() - REMOVED_OPTIONS.items()
    options = {name: value for name, value in sorted(options) if name not in RunConfig.__dataclass_fields__}
    ours = {"clock": OUR_CLOCK} if "recipe" in found or "digest" in found else {}
    return {name: found[name] for name in CONDITIONS_READ if name in found} | options | ours


def _bounds(accuracy: np.ndarray, rounding: float) -> tuple[int, int]:
    """Return the least and the most of these accuracies that are at 94%, each known to within `rounding`."""
    slack = 1e-12  # of binary fractions
    return int((accuracy - rounding >= GOAL - slack).sum()), int((accuracy + rounding >= GOAL - slack).sum())


def _decimals(texts) -> int:
    return max(len(text.strip().partition(".")[2]) for text in texts)
