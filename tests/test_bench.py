"""The bench compares with the same mathematics, in pairs, each model in the precision it names."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
from test_compiling import ALONE, SMALL, fresh_network, gradients_of_a_step, whitened

from large_batch_cifar_10_fast import bench
from large_batch_cifar_10_fast.data.shards import MEAN, STD, Shards, make_batch, normalize
from large_batch_cifar_10_fast.optim import follow_schedules
from large_batch_cifar_10_fast.recipe import training_pass
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.train import make_model

BATCH = torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.int64)
pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", "4", "--batch_size", "250", "--epochs", "4", "--no_compile"]
MUON += ["--pixels", "9,9,12,12", "--whitening_epochs", "0", "--kept", "1,0.5,1,0.5", "--workers", "2"]


@pytest.fixture
def measure(monkeypatch, capsys):
    """Run bench on 2,000 training images; return its JSON."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", "--json", *arguments])
        monkeypatch.setattr(bench, "TRAIN", 2000)
        monkeypatch.setattr(bench, "TEST", 250)
        bench.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_the_baseline_computes_the_same_gradients_and_weights():
    model, steps = bench.make_baseline(make_model(SMALL, ALONE, "fp32"), {None: 2 * [BATCH]}, "fp64")
    assert [(images.dtype, len(labels)) for images, labels in steps[None]] == [(torch.float64, 64)], "one batch"
    baseline, ours, optimizers = whitened(model.network), fresh_network(), model.optimizers
    got, expected = (gradients_of_a_step(n, partial(training_pass, n, SMALL, "fp64")) for n in (baseline, ours))
    trained = {name: weight for name, weight in ours.named_parameters() if weight.requires_grad}
    for name, weight in trained.items():
        torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)
        weight.grad = expected[name]
    optimizers += SMALL.optimizers(ours, ALONE)
    for epoch in (0.5, 1.0):  # the second step has momentum
        follow_schedules(optimizers, epoch=epoch)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(baseline.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_run_has_the_steps_of_each_stage_and_a_step_its_parts(measure, monkeypatch):
    made = []
    monkeypatch.setattr("large_batch_cifar_10_fast.data.shards.make_batch", lambda *a: made.append(a) or make_batch(*a))
    result = measure("--repeats", "1", *MUON)
    assert len(made) == 2 + 4, "a step of each kind, and an epoch's augmentation"
    seconds = {name: part["median"] for name, part in result["seconds"].items()}
    of_a_step = {"forward", "backward", "averaging", "update"}
    assert 0.2 < sum(seconds[part] for part in of_a_step) / seconds["step"] < 5, "once each, on a busy machine"
    assert all({"baseline", "speedup"} <= result["seconds"][part].keys() for part in ("step", *of_a_step))
    assert all(
        row["speedup"] == row["baseline"] / row["median"] for row in result["seconds"].values() if "speedup" in row
    )
    assert {"upload", "preprocessing", "whitening", "validation", "compilation"} <= seconds.keys()
    small, large = seconds["step from epoch 1 on"], seconds["step"]
    assert result["training of a run, s"] == pytest.approx((4 + 2) * small + (4 + 2) * large)
    share = seconds["augmentation of an epoch"] / (4 * small)
    assert result["augmentation, share of an epoch"] == pytest.approx(share)
    assert result["images per second"] == pytest.approx(500 / large)
    assert (result["conditions"]["workers"], result["conditions"]["batch"]) == (2, 250), "as asked for, without a GPU"


def test_recipes_are_measured_in_turn_and_the_ratio_is_of_pairs(measure, monkeypatch):
    """With a clock of our own: a step of muon takes n seconds in round n, one of apple2019 always 6."""
    taken, now = [], [0]

    def take_step(model, batches, metrics):
        name, pixels, count = model.recipe.name, batches[0][0].shape[-1], len(batches[0][0])
        biases_train = all(weight.requires_grad for weight in model.network.parameters() if weight.ndim == 1)
        taken.append((name, pixels, count, biases_train))
        now[0] += (len(taken) + 2) // 3 if name == "muon" else 6

    monkeypatch.setattr(bench, "take_step", take_step)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    options = ["--width", "2", "--batch_size", "32", "--epochs", "3", "--precision", "fp32", "--no_compile"]
    result = measure("--recipe", "muon", "--against", "apple2019", *options)
    # One worker without a GPU. Muon's whitening bias is frozen from its second stage on.
    assert taken == 8 * [("muon", 24, 32, True), ("muon", 32, 32, False), ("apple2019", 32, 32, True)]
    ours, theirs = 2000 // 32 + 2 * (1360 // 32), 3 * 8 * (250 // 32)
    muon, apple2019 = (row["training of a run, s"] for row in result["recipes"])
    assert (muon, apple2019) == (pytest.approx([n * ours for n in range(2, 9)]), pytest.approx(7 * [6 * theirs]))
    assert result["ratios"] == pytest.approx([6 * theirs / (n * ours) for n in range(2, 9)])
    assert result["interval"] == pytest.approx([min(result["ratios"]), max(result["ratios"])])


def test_the_interval_of_the_median_is_that_of_the_sign_test():
    """The numbers 1, 2, ... in another order are their own ranks."""
    for count, ranks in {5: None, 6: (1, 6), 11: (2, 10), 25: (8, 18)}.items():
        assert bench.interval([float(index * 7 % count + 1) for index in range(count)]) == ranks


def test_each_model_of_a_comparison_computes_in_the_float32_it_names():
    allowed, models = [], []
    for precision in ("tf32", "fp32"):
        model = make_model(SMALL, ALONE, precision)
        model.network.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.matmul.allow_tf32))
        models.append((model, {SMALL.stages[0].kind: [BATCH]}))
    bench.time_in_turn(models, repeats=1, in_parts=True)
    assert allowed == 2 * [True, True, False, False], "whole and in parts, in the warm-up and in the round"


def test_every_input_pipeline_loads_every_image_once_cropped_and_mirrored_like_ours():
    """Each image has one gray level and a brighter left half, to be told after cropping and mirroring."""
    images = np.repeat(np.arange(40, dtype=np.uint8) * 6, 32 * 32 * 3).reshape(40, 32, 32, 3)
    images[:, :, :16] += 3
    device_images = normalize(torch.from_numpy(images), torch.float32)
    shards = Shards(device_images, torch.arange(40) % 10, range(1), 40, Page(batch_size=16), 1, make_batch)
    for name, load in bench.input_pipelines(images, np.arange(40) % 10, shards).items():
        batches = list(load())
        assert [batch.shape for batch, _ in batches] == [(n, 3, 32, 32) for n in (16, 16, 8)], name
        pixels = torch.cat([batch for batch, _ in batches]) * torch.tensor(STD).view(3, 1, 1)
        pixels = (pixels + torch.tensor(MEAN).view(3, 1, 1)).round().long()
        numbers = pixels[:, 0, 5, 5] // 6
        assert sorted(numbers.tolist()) == list(range(40)), name
        assert torch.equal(numbers % 10, torch.cat([labels for _, labels in batches])), name
        left, right = pixels[:, 0, 0, 0] % 6, pixels[:, 0, 0, 31] % 6
        assert {*left.tolist()} == {*right.tolist()} == {0, 3}, f"{name}: some mirrored, some not"
        assert len({*(pixels[:, 0, 0] % 6 == 3).sum(1).tolist()}) > 3, f"{name}: several offsets"


def test_a_short_measurement_of_an_epoch_is_extrapolated(monkeypatch):
    """The clock advances by three seconds to start, and by one per batch."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    def load():
        wait(3)
        yield from range(10)

    for most in (10, 4):
        assert bench.time_epoch(load(), lambda batch: wait(1), most, 10, ALONE) == 13


def test_input_pipelines_are_repeated(measure):
    options = ["--width", "16", "--batch_size", "500", "--steps", "2", "--repeats", "2", "--no_compile"]
    result = measure("--input_pipelines", *options)
    assert [len(row[part]) for row in result["pipelines"].values() for part in row] == [2] * 10
    assert result["conditions"]["training steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "muon", "--steps", "3"], "--steps is for --input_pipelines"),
        (["--against", "muon", "--input_pipelines"], "not allowed with"),
        (["--against", "muon", "--baseline_precision", "bf16"], "not allowed with"),
        (["--repeats", "0"], "--repeats 0 must be greater than 0"),
        (["--input_pipelines", "--recipe", "fastai"], "use --recipe page"),
    ],
)
def test_a_bad_option_ends_with_status_2_and_one_line(arguments, message, monkeypatch, error_line):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert message in error_line(bench.main)
