"""The heart of the design: the result does not depend on how many processes compute the workers."""

import functools
import re

import pandas as pd
import pytest
import torch
from conftest import REPO, TINY, train_on_machines, train_together, write_npz

from large_batch_cifar_10_fast.images.shapes import draw_shapes

pytestmark = pytest.mark.slow

# (recipe, processes, micro-batches), against one process in one; the campaign tests run two processes
SPLITS = [("apple2019", 2, 2), ("apple2019", 8, 1), ("fastai", 2, 2), ("muon", 2, 2)]
SMALL = {  # each recipe of several workers, in steps of 16 images
    "apple2019": ["--demo", *TINY, "--batch_size", "2", "--ghost_batch", "1"],
    "fastai": ["--width", "3", "--batch_size", "2", "--epochs", "1", "--no_warmup"],
    "muon": ["--workers=4", "--width=4", "--batch_size=4", "--epochs=2", "--pixels=24,32", "--kept=1,0.5"],
}


@pytest.fixture(scope="module")
def few_npz(tmp_path_factory):
    """107 training images, which neither 4 workers nor 8 share evenly."""
    return write_npz(tmp_path_factory.mktemp("images") / "few.npz", *draw_shapes(107, 21))


def train(recipe, npz, folder, processes=1, micro_batches=1):
    """Return the weights and the row of a run."""
    options = ["--data", npz, "--precision", "fp64", "--micro_batches", micro_batches, "--save", folder / "w.pt"]
    result = train_together(processes, "--recipe", recipe, *SMALL[recipe], *options, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return weights_of(folder), pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


def weights_of(folder):
    return torch.load(folder / "w.pt", weights_only=True)["weights"]


@pytest.fixture(scope="module")
def alone(few_npz, tmp_path_factory):
    """By recipe: weights and row of one process, made once."""
    return functools.cache(lambda recipe: train(recipe, few_npz, tmp_path_factory.mktemp("alone")))


def check_equal(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.dist(weights[name], tensor) < 1e-9 * tensor.norm(), name


@pytest.mark.parametrize(("recipe", "processes", "micro_batches"), SPLITS)
def test_results_do_not_depend_on_processes(few_npz, tmp_path, alone, recipe, processes, micro_batches):
    expected, expected_row = alone(recipe)
    weights, row = train(recipe, few_npz, tmp_path, processes, micro_batches)
    check_equal(weights, expected)
    assert row["processes"] == processes
    assert row["validation_count"] == expected_row["validation_count"]
    assert row["train_accuracy"] == expected_row["train_accuracy"]
    assert row["validation_loss"] == pytest.approx(expected_row["validation_loss"], rel=1e-9)


def test_two_machines_equal_one_and_only_the_first_has_tables(few_npz, tmp_path, alone):
    command = [*SMALL["apple2019"], "--data", str(few_npz), "--precision", "fp64", "--save", "w.pt", "--campaign", "c"]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    result = train_on_machines(command, command, folders=folders)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n# processes 2\n") == 1
    check_equal(weights_of(folders[0]), alone("apple2019")[0])
    more = [*command, "--runs", "2"]
    assert "\n# finished_runs 1\n" in train_on_machines(more, more, folders=folders).stdout
    assert pd.read_csv(folders[0] / "runs.tsv", sep="\t")["seed"].tolist() == [0, 1]
    assert not list(folders[1].iterdir())


def test_two_machines_that_were_asked_for_different_things_train_nothing(tiny_npz, tmp_path):
    command = [*SMALL["apple2019"], "--data", str(tiny_npz)]
    result = train_on_machines(command, [*command, "--seed", "5", "--epochs", "3"], folders=[tmp_path] * 2)
    form = (
        r"train: process . differs from process . in --epochs \((3, not 2|2, not 3)\), .*: give all the same options\n"
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(form, result.stderr), "one process of all reports it"
    assert not list(tmp_path.iterdir())


def test_processes_whose_weights_drift_apart_end_the_campaign_without_a_row(few_npz, tmp_path):
    drift = "optimizer.step()\n        network[0].weight.data += 1e-6 * team.rank"
    (tmp_path / "drift.py").write_text((REPO / "tests" / "tiny.py").read_text().replace("optimizer.step()", drift))
    result = train_together(2, "--recipe", "drift.py", "--data", few_npz, "--out", "out", cwd=tmp_path)
    line = "train: the processes have different weights, so run 0 does not count: try --no_compile"
    assert result.returncode == 2
    assert result.stderr == f"{line}\n"
    assert not [*tmp_path.glob("out/runs/*/[0-9]*")]
