"""How two recipes' times are compared: the images of each kind of step, and rounds of both in turn."""

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
    by_kind = {Stage(1, 24): 50_000, Stage(1, 24, RESTS): 150_000, Stage(1, 32, RESTS): 50_000 + 4 * 34_000}
    assert pace.images_by_kind(MuonRecipe()) == by_kind
    assert pace.images_by_kind(MuonRecipe(workers=8)) == by_kind


def steps_last(monkeypatch, seconds):
    """Steps that compute nothing last so long, one after another; returned is where they are noted down."""
    taken, clock = [], iter(seconds)

    def take_step(learner, optimizers, micro_batches, tally):
        [(images, _)] = micro_batches
        taken.append((learner.recipe.name, images.shape[-1], len(images)))

    monkeypatch.setattr(pace, "take_step", take_step)
    monkeypatch.setattr(pace, "timed", lambda world, figures, work: work() or figures.append(next(clock)))
    monkeypatch.delenv("WORKERS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return taken


def test_rounds_are_of_both_in_turn_and_scaled_to_whole_runs(monkeypatch, capsys):
    """By a clock of ours. Of muon's three epochs one is at 24 pixels, and the others are of 0.68 of the images."""
    taken = steps_last(monkeypatch, [9, 9, 9, 1, 2, 3, 1.5, 2, 3, 2, 2, 3])
    monkeypatch.setattr(sys, "argv", ["pace", "muon", "apple2019", "--rounds", "3", *SMALL])
    pace.main()
    assert taken == 4 * [("muon", 24, 32), ("muon", 32, 32), ("apple2019", 32, 32)], "a worker's batch of each"
    told = capsys.readouterr().out.splitlines()
    small, large, theirs = 50_000 // 32, 2 * (34_000 // 32), 3 * 8 * (6250 // 32)
    ours = [second * small + 2 * large for second in (1, 1.5, 2)]
    assert told[2].startswith("muon: steps of 1 x 32 images, fp32, not compiled; a run has 0.")
    assert told[2].endswith(f" PFLOP, {ours[1]:.1f} s of training, median of 3 ({ours[0]:.1f} to {ours[2]:.1f})")
    assert f" PFLOP, {3 * theirs:.1f} s of training, median of 3 (" in told[3]
    ratios = [3 * theirs / one for one in ours]
    spread = f"median of 3 ({ratios[2]:.2f} to {ratios[0]:.2f})"
    assert told[4] == f"apple2019 takes {ratios[1]:.2f} times as long as muon, {spread}"


def test_from_six_rounds_on_the_ratio_has_its_interval(monkeypatch, capsys):
    """By a clock of ours: every step of muon lasts a second, and those of the other 1 to 7, in no order."""
    steps_last(monkeypatch, [9, 9, 9] + [seconds for other in (4, 1, 7, 3, 6, 2, 5) for seconds in (1, 1, other)])
    monkeypatch.setattr(sys, "argv", ["pace", "muon", "apple2019", *SMALL])
    pace.main()
    ours, theirs = 50_000 // 32 + 2 * (34_000 // 32), 3 * 8 * (6250 // 32)
    least, middle, most = (other * theirs / ours for other in (1, 4, 7))
    told = capsys.readouterr().out.splitlines()[-1]
    spread = f"median of 7 ({least:.2f} to {most:.2f}); 95% interval {least:.2f} to {most:.2f}"
    assert told == f"apple2019 takes {middle:.2f} times as long as muon, {spread}"


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (11, 2, 10), (25, 8, 18)])
def test_an_interval_of_the_median_is_the_signs(count, low, high):
    """Of the numbers 1, 2, ... in any order: the least pair of ranks outside of which too few coins fall."""
    shuffled = [float(index * 7 % count + 1) for index in range(count)]
    assert sorted(shuffled) == [*range(1, count + 1)]
    assert pace.interval_of_median(shuffled) == f"; 95% interval {low}.00 to {high}.00"


def test_too_few_rounds_have_no_interval():
    assert pace.interval_of_median([1.0, 2.0, 3.0, 4.0, 5.0]) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pixels", "9"], "recipe apple2019 has no option --pixels"),
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
