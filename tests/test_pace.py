"""How two recipes' times are compared: the images of each kind of step, and rounds of both in turn."""

import re
import sys

import pytest
import torch

from large_batch_cifar_10_fast import pace
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.training.recipe import Stage

RESTS = ("whitening.bias",)
SMALL = ["--width", "2", "--batch_size", "32", "--epochs", "3", "--precision", "fp32", "--no_compile"]


def test_a_runs_images_are_those_of_all_workers_and_epochs_by_kind_of_step():
    assert pace.images_by_kind(Apple2019()) == {Stage(): 18 * 8 * 24 * 256}
    by_kind = {Stage(1, 24): 50_000, Stage(1, 24, RESTS): 200_000, Stage(1, 32, RESTS): 50_000 + 3 * 34_000}
    assert pace.images_by_kind(MuonRecipe()) == by_kind
    assert pace.images_by_kind(MuonRecipe(workers=8)) == by_kind


def test_rounds_are_of_both_in_turn_and_scaled_to_whole_runs(monkeypatch, capsys):
    """By a clock of ours: a step of one takes a second, then 1.5, then 2; of the other always 3."""
    monkeypatch.setattr(sys, "argv", ["pace", "muon2024", "apple2019", "--rounds", "3", "--pixels", "9", *SMALL])
    with pytest.raises(SystemExit):
        pace.main()
    assert "recipe apple2019 has no option --pixels" in capsys.readouterr().err

    order, seconds = [], iter([9, 9, 1, 3, 1.5, 3, 2, 3])

    def timed(world, figures, work):
        order.append(work.__defaults__[0][0][1].shape[0])
        work()
        figures.append(next(seconds))

    monkeypatch.setattr(pace, "timed", timed)
    monkeypatch.delenv("WORKERS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["pace", "muon2024", "apple2019", "--rounds", "3", *SMALL])
    pace.main()
    assert order == [32] * 8, "a worker's batch of each"
    told = capsys.readouterr().out.splitlines()
    ours, theirs = 3 * (50_000 // 32), 3 * 8 * (6250 // 32)
    assert re.fullmatch(
        rf"muon2024: .* PFLOP, training {1.5 * ours:.1f} s, median of 3 \({ours}.0 to {2 * ours}.0\)", told[1]
    )
    assert re.fullmatch(rf"apple2019: .* PFLOP, training {3 * theirs:.1f} s, median of 3 .*", told[2])
    ratios = [3 * theirs / (second * ours) for second in (1.5, 2, 1)]
    median, least, most = (f"{figure:.2f}" for figure in ratios)
    assert told[3] == f"apple2019 takes {median} times as long as muon2024, median of 3 ({least} to {most})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "pace: --rounds 0 must be at least 1"),
        (["--batch_size", "60000"], "60000 images a step, more than the training set's 50000"),
        (["--micro_batches", "2"], "--micro_batches 2 does not divide the 1 workers of a process"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["pace", "muon", "apple2019", *arguments])
    with pytest.raises(SystemExit) as end:
        pace.main()
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1
