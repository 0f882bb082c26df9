"""The bench tells its figures, and what it compares with is the same mathematics."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import REPO, environment
from test_compiling import ALONE, SMALL, fresh_network, gradients_of_a_step, whitened

from large_batch_cifar_10_fast import bench
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.measuring.baseline import baseline_network, baseline_optimizers
from large_batch_cifar_10_fast.measuring.figures import ratio
from large_batch_cifar_10_fast.request import command_line
from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.training.networks import work
from large_batch_cifar_10_fast.training.optimizers import follow_schedules

pytestmark = pytest.mark.slow


def test_the_baseline_of_the_bench_is_the_same_mathematics():
    baseline, ours = whitened(baseline_network(SMALL, "fp64", ALONE)), fresh_network()
    got, expected = gradients_of_a_step(baseline, baseline), gradients_of_a_step(ours, ours)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)
            parameter.grad = expected[name]
    optimizers = SMALL.optimizers(ours, ALONE)
    slow_optimizers = baseline_optimizers(SMALL, baseline, ALONE)
    follow_schedules([*optimizers, *slow_optimizers], epoch=0.5)
    for optimizer in (*optimizers, *slow_optimizers):
        optimizer.step()
    for a, b in zip(baseline.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_bench_tells_all_parts(monkeypatch, capsys):
    options = ["--json", "--repeats", "5", "--width", "4", "--batch_size", "16", "--no_compile"]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    monkeypatch.setattr(bench, "random_images", lambda *_: random_images(2000, 1000))  # for 50,000 and 10,000
    bench.main()
    told = json.loads(capsys.readouterr().out)
    parts = {
        "upload",
        "preprocessing",
        "whitening",
        "augmentation of an epoch",
        "validation",
        "compilation",
        "start-up",
    }
    of_a_step = ("forward", "backward", "averaging", "update")
    assert told["images per second"] == pytest.approx(16 / told["step"]["seconds"])
    assert {"step", *parts, *of_a_step} <= told.keys()
    assert sum(told[part]["seconds"] for part in of_a_step) == pytest.approx(told["step"]["seconds"], rel=0.5)
    assert {"step", "forward", "backward", "update"} <= told["baseline"].keys()
    assert 0 < told["utilization, of the matrix product's rate"] < 1.5


def test_the_bench_counts_the_steps_that_each_epoch_keeps(monkeypatch, capsys):
    options = ["--recipe", "muon", "--width", "4", "--batch_size", "500", "--views", "one", "--epochs", "4"]
    options += ["--pixels", "9,9,12,12", "--whitening_epochs", "0", "--kept", "1,0.5,1,0.5"]
    monkeypatch.setattr(sys, "argv", ["bench", "--json", "--repeats", "1", "--no_compile", *options])
    monkeypatch.setattr(bench, "random_images", lambda *_: random_images(2000, 100))
    bench.main()
    told = json.loads(capsys.readouterr().out)
    assert [name for name in told if "step from" in name] == ["step from epoch 1 on"], "a kind of step once"
    small, large = told["step from epoch 1 on"]["seconds"], told["step"]["seconds"]
    assert told["training of a run at this pace, s"] == pytest.approx((4 + 2) * small + (4 + 2) * large)
    share = told["augmentation of an epoch"]["seconds"] / (4 * small)  # both of the first epoch
    assert told["augmentation, share of an epoch"] == pytest.approx(share)
    assert told["work of a run, PFLOP"] == work(read_request(options, {})[1], 50_000) / 1e15


@pytest.mark.parametrize(
    ("variables", "gpu", "shape"),
    [
        ({}, False, (2, 1000)),
        ({"WORKERS": ""}, False, (2, 1000)),
        ({"WORKERS": "4"}, False, (4, 500)),
        ({}, True, (1, 2000)),
    ],
)
def test_without_a_gpu_the_bench_takes_a_worker_a_process_unless_told_how_many(variables, gpu, shape, monkeypatch):
    measured = []
    monkeypatch.setattr(sys, "argv", ["bench", "--recipe", "muon"])
    monkeypatch.setattr(bench, "launched_world_size", lambda: 2)
    monkeypatch.setattr(bench, "bench", lambda settings, recipe, *_: measured.append(recipe))
    monkeypatch.setattr(command_line, "count_gpus", lambda device: int(gpu))
    monkeypatch.delenv("WORKERS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bench.main()
    assert [(recipe.workers, recipe.batch_size) for recipe in measured] == [shape]


def test_the_ratio_is_of_pairs_and_above_one_where_ours_is_faster():
    assert ratio([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--picture", "p.png"], "belong to --ladder"),
        (["--ladder", "--ladder_steps", "1"], "--ladder_steps 1 must be at least 2"),
        (["--ladder", "--picture", "p.jpg"], "--picture p.jpg must end in .png"),
        (["--ladder", "--micro_batches", "2"], "--micro_batches 2 does not divide the 1 workers of a process"),
        (["--ladder", "--batch_size", "50001"], "= 50001 images a step, more than the training set's 50000"),
        (["--ladder", "--recipe", "fastai"], "recipe fastai has more: use --recipe page"),
        (["--recipe", "muon", "--kept", "1,0.01"], "epoch 5 keeps 0.01 of 50000 images"),
    ],
)
def test_the_bench_refuses_what_it_cannot_measure(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_bench_is_a_command():
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.bench", "--repeats", "0"]
    result = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "bench: --repeats 0 must be at least 1\n")
