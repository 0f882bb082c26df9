"""The bench takes the steps of training, in turn, each recipe in the precision it names. And the script for GPUs."""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import GPU, GPUS, REPO, prepared, python, run_program, write_program
from test_compiling import SMALL

from large_batch_cifar_10_fast import bench
from large_batch_cifar_10_fast.config import parse
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.train import distinct_samples, make_step

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", "4", "--batch_size", "250", "--epochs", "4", "--no_compile"]
MUON += ["--pixels", "9,9,12,12", "--whitening_epochs", "0", "--kept", "1,0.5,1,0.5", "--workers", "2"]


@pytest.fixture
def measure(monkeypatch, capsys):
    """Return a function that runs bench on 2,000 training images, and returns what it prints."""
    monkeypatch.setattr(bench, "TRAIN", 2000)
    monkeypatch.setattr(bench, "TEST", 250)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        bench.main()
        return capsys.readouterr().out

    return run


def test_the_parts_of_a_run_and_of_a_step_are_printed(measure):
    text = measure("--repeats", "1", *MUON)
    seconds = {name: float(number) for name, number in re.findall(r"(?m)^(\S.*?) {2,}(\d[\d.]*(?:e-\d+)?)", text)}
    in_parts = sum(seconds[part] for part in ("augmentation", "forward", "backward", "averaging", "update"))
    assert 0.2 < in_parts / seconds["step from epoch 3 on"] < 5, "once each, on a busy machine"
    assert {"compilation", "upload", "preprocessing", "whitening", "validation"} <= seconds.keys()
    small, large = seconds["step from epoch 1 on"], seconds["step from epoch 3 on"]
    sampling = 4 * seconds["sampling of an epoch"]
    assert seconds["training of a run"] == pytest.approx((4 + 2) * small + (4 + 2) * large + sampling, rel=1e-3)
    assert seconds["speed of the last step"] == pytest.approx(500 / large, rel=1e-3)


def test_recipes_are_measured_in_turn_and_the_ratio_is_of_pairs(measure, monkeypatch):
    """With a clock of our own: a step of muon takes n seconds in round n, one of apple2019 always 6."""
    taken, now = [], [0]

    def train_step(model, data, sample):
        images, _ = next(sample.micro_batches())
        biases_train = all(weight.requires_grad for weight in model.network.parameters() if weight.ndim == 1)
        taken.append((model.recipe.name, images.shape[-1], len(images), biases_train))
        now[0] += (len(taken) + 2) // 3 if model.recipe.name == "muon" else 6

    monkeypatch.setattr("large_batch_cifar_10_fast.train.train_step", train_step)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    options = ["--width", "2", "--batch_size", "32", "--epochs", "3", "--precision", "fp32", "--no_compile"]
    text = measure("--recipe", "muon", "--against", "apple2019", *options)
    # One worker without a GPU. Muon's whitening bias is frozen from its second stage on.
    assert taken == 8 * [("muon", 24, 32, True), ("muon", 32, 32, False), ("apple2019", 32, 32, True)]
    ours, theirs = 2 * (2000 // 32) + 1360 // 32, 3 * 8 * (250 // 32)
    low, high = (6 * theirs / (n * ours) for n in (8, 2))
    assert f"training of a run {5 * ours} ({2 * ours} to {8 * ours}) s" in text
    assert f"n = 7, 95% confidence interval of the median [{low:.4g}, {high:.4g}]" in text


def test_the_faster_recipe_is_named_if_the_interval_of_the_sign_test_excludes_one():
    """The numbers 1, 2, ... in another order are their own ranks, (1, 6) of 6 and (8, 18) of 25."""
    for count, factor, verdict, interval in (
        *((5, 10, "No difference is shown", "[-inf, inf]"), (6, 10, "a is faster", "[10, 60]")),
        *((25, 0.1, "No difference is shown", "[0.8, 1.8]"), (25, 0.01, "b is faster", "[0.08, 0.18]")),
    ):
        text = bench.which_is_faster("a", "b", factor * np.array([i * 7 % count + 1 for i in range(count)]))
        assert text.startswith(f"{verdict}: b takes ")
        assert text.endswith(interval)


def test_each_recipe_of_a_comparison_computes_in_the_float32_it_names():
    allowed, benches = [], []
    for precision in ("tf32", "fp32"):
        model, data = prepared(SMALL, random_images(100, 10), precision)
        sample = next(distinct_samples(model, data.train))
        model.network.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.matmul.allow_tf32))
        benches.append(bench.Bench(model, data, make_step(model, data), [sample], {}))
    bench.time_in_turn(benches, repeats=1)
    assert allowed == 2 * [True, False], "in the warm-up and in the round"


@pytest.mark.skipif(GPUS == 0, reason="no GPU here")
def test_on_a_gpu_a_step_is_the_graph_of_training(tmp_path):
    result = python("-m", "large_batch_cifar_10_fast.bench", *MUON, "--repeats", 1, cwd=tmp_path, **GPU)
    assert ", a CUDA graph" in result.stdout, result.stderr


def test_a_bad_option_ends_with_status_2_and_one_line(monkeypatch, error_line):
    monkeypatch.setattr(sys, "argv", ["bench", "--repeats", "0"])
    assert "--repeats 0 must be at least 1" in error_line(bench.main)


STAND_IN = f"""case $* in
    -m\\ large*) (IFS=$'\\t'; echo "$*" >>calls); case $* in *$FAILING*) exit 1 ;; esac ;;
    -m*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_the_script_for_gpus_calls_programs_with_options_that_they_have(tmp_path):
    """A program that fails does not stop the others."""
    stand_in, command = write_program(tmp_path / "python", STAND_IN), ["bash", REPO / "measure_gpu.sh", "--out", "m"]
    result = run_program(*command, "--data", "x.npz", cwd=tmp_path, PYTHON=stand_in, FAILING="bench --recipe apple2019")
    report = (tmp_path / "m" / "report.md").read_text()
    parts = re.findall(r"^\| (\w+) \| (\d+) \| \d+ \|", report, re.M)
    names = "machine tests apple2019 muon bench_apple2019 bench_muon compare"
    assert ([name for name, _ in parts], result.returncode) == (names.split(), 1)
    assert [name for name, status in parts if status != "0"] == ["bench_apple2019"]
    assert re.search(r"## machine\n\n```\n.*torch \d", report, re.S), "versions"
    calls = [line.split("\t")[1:] for line in (tmp_path / "calls").read_text().splitlines()]
    for program, *arguments in calls:
        if program.endswith(("launch", "bench")):
            assert parse(arguments)[0].data == "x.npz"
    assert len(calls) == 5
