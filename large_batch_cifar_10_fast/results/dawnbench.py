"""Reading tables that others wrote: entries to DAWNBench, as our timing_log.tsv is one, and the published campaign."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..settings.settings import CIFAR_10, Refusal
from .campaign import Log, bounds, decimals, losses
from .fields import DURATION, FRACTION, LOSS, PERCENT, TIME, Number
from .tables import CURVE, GOAL

CLOCKS = {  # of DAWNBench's entries, where it is known
    "basenet.tsv": "training and validation, not set-up",
    "fastai_pytorch.tsv": "validation, too",
    "fastai_pytorch_single_volta.tsv": "validation, too",
}


def _columns(path: Path, text: list[str], kinds: Mapping[str, Number]) -> dict[str, list[str]]:
    """Of a tab-separated table the columns asked for, as text that was seen to be their kinds of numbers."""
    head = text[0].split("\t")
    for name in kinds:
        if head.count(name) != 1:
            raise Refusal(f"{path}, line 1: {'more than one' if name in head else 'no'} column {name}")
    columns = {name: [] for name in kinds}
    for number, row in ((number, line.split("\t")) for number, line in enumerate(text[1:], 2) if line.strip()):
        if len(row) != len(head):
            raise Refusal(f"{path}, line {number}: {len(row)} fields where the header has {len(head)}")
        for name, written in zip(head, row, strict=True):
            if name in kinds:
                kinds[name].read(written, f"{path}, line {number}: {name}")
                columns[name].append(written)
    if not all(columns.values()):
        raise Refusal(f"{path}, line 1: a header and nothing below it")
    return columns


def read_epochs(path: Path, text: list[str]) -> Log:
    _, hours, percent = CURVE
    columns = _columns(path, text, {hours: TIME, percent: PERCENT})
    seconds, accuracy = 3600 * np.array(columns[hours], float), np.array(columns[percent], float) / 100
    if not seconds[-1] > 0:
        raise Refusal(f"{path}: hours of the last epoch is {columns[hours][-1]!r}, not a number above 0")
    # Not more digits than float64 holds: some entries print 12.839999999999998 for 12.84.
    places = min(decimals([f"{float(text):.10g}" for text in columns[percent]]), 10)
    rounding = 0.5 * 10.0 ** -(places + 2)
    goal = next(iter(seconds[(accuracy >= GOAL - 1e-12) & (seconds > 0)]), math.nan)
    last = accuracy[-1:]
    untold, reached, curve = np.array([]), bounds(last, rounding), (seconds, accuracy)
    facts = {"epochs": str(len(accuracy))}
    if path.name in CLOCKS:
        facts |= {"images": CIFAR_10, "clock": CLOCKS[path.name]}
    return Log(str(path), last, untold, seconds[-1:], np.array([goal]), reached, rounding, facts, epochs=curve)


def read_published_table(path: Path, text: list[str]) -> Log:
    kinds = {"train_loss": LOSS, "valid_acc": FRACTION, "valid_loss": LOSS, "seconds": DURATION}
    columns = _columns(path, text, kinds)
    accuracy, seconds = np.array(columns["valid_acc"], float), np.array(columns["seconds"], float)
    rounding = 0.5 * 10.0 ** -decimals(columns["valid_acc"])
    pairs = zip(columns["train_loss"], columns["valid_loss"], strict=True)
    loss = losses({"train_loss": train, "validation_loss": validation} for train, validation in pairs)
    reached, unknown = bounds(accuracy[np.isfinite(loss)], rounding), np.full(len(accuracy), math.nan)
    return Log(str(path), accuracy, loss, seconds, unknown, reached, rounding)
