"""The bench compares with the same mathematics, in pairs, each side in the precision it names."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO, environment
from test_compiling import ALONE, SMALL, fresh_network, gradients_of_a_step, whitened

from large_batch_cifar_10_fast import bench, command_line
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.data.shards import MEAN, STD, Shards, normalize
from large_batch_cifar_10_fast.optim import follow_schedules
from large_batch_cifar_10_fast.recipe import Stage, work
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.train import make_model

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", "4", "--batch_size", "500", "--epochs", "4", "--no_compile"]
MUON += ["--pixels", "9,9,12,12", "--whitening_epochs", "0", "--kept", "1,0.5,1,0.5"]


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
    baseline, ours = whitened(bench.baseline_network(SMALL, "fp64", ALONE.device)), fresh_network()
    got, expected = gradients_of_a_step(baseline, baseline), gradients_of_a_step(ours, ours)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)
            parameter.grad = expected[name]
    sides = SMALL.optimizers(ours, ALONE), bench.baseline_optimizers(SMALL, baseline, ALONE)
    for epoch in (0.5, 1.0):  # the second step has momentum
        for optimizers in sides:
            follow_schedules(optimizers, epoch=epoch)
            for optimizer in optimizers:
                optimizer.step()
    for a, b in zip(baseline.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_parts_of_a_step_add_up_and_a_run_has_the_images_of_each_kind_of_step(measure):
    result = measure("--repeats", "3", *MUON)
    seconds = {name: part["median"] for name, part in result["seconds"].items()}
    of_a_step = {"forward", "backward", "averaging", "update"}
    parts = {"upload", "preprocessing", "whitening", "augmentation of an epoch", "validation", "compilation"}
    assert {"step", "start-up", *parts, *of_a_step} <= seconds.keys()
    assert sum(seconds[part] for part in of_a_step) == pytest.approx(seconds["step"], rel=0.8)
    assert all({"baseline", "speedup"} <= result["seconds"][part].keys() for part in ("step", *of_a_step))
    assert [name for name in seconds if "step from" in name] == ["step from epoch 1 on"]
    small, large = seconds["step from epoch 1 on"], seconds["step"]
    assert result["training of a run, s"] == pytest.approx((4 + 2) * small + (4 + 2) * large)
    share = seconds["augmentation of an epoch"] / (4 * small)
    assert result["augmentation, share of an epoch"] == pytest.approx(share)
    assert result["images per second"] == pytest.approx(500 / large)
    assert result["work of a run, PFLOP"] == work(read_request(MUON)[1], 2000) / 1e15


def test_a_run_has_the_images_of_all_workers_and_epochs_by_kind_of_step():
    frozen = ("whitening.bias",)
    by_kind = {Stage(1, 24): 50_000, Stage(1, 24, frozen): 150_000, Stage(1, 32, frozen): 50_000 + 4 * 34_000}
    assert bench.images_by_kind(Apple2019(), 50_000) == {Stage(): 18 * 8 * 24 * 256}
    assert bench.images_by_kind(MuonRecipe(), 50_000) == by_kind
    assert bench.images_by_kind(MuonRecipe(workers=8), 50_000) == by_kind


def test_recipes_are_measured_in_turn_and_the_ratio_is_of_pairs(measure, monkeypatch):
    """By a clock of ours: a step of muon takes n seconds in round n, one of apple2019 always 6."""
    taken, trained, now = [], [], [0]

    def timed_step(model, optimizers, batches, seconds):
        taken.append((model.recipe.name, batches[0][0].shape[-1], len(batches[0][0])))
        trained.append(all(weight.requires_grad for weight in model.network.parameters() if weight.ndim == 1))
        now[0] += model.recipe.name == "muon" and batches[0][0].shape[-1] == 24
        seconds.append(now[0] if model.recipe.name == "muon" else 6)

    monkeypatch.setattr(bench, "timed_step", timed_step)
    options = ["--width", "2", "--batch_size", "32", "--epochs", "3", "--precision", "fp32", "--no_compile"]
    result = measure("--recipe", "muon", "--against", "apple2019", "--rounds", "6", *options)
    assert taken == 7 * [("muon", 24, 32), ("muon", 32, 32), ("apple2019", 32, 32)], "a batch of one worker"
    assert trained == 7 * [True, False, True], "muon's whitening bias, frozen from its second kind of step on"
    ours, theirs = 2000 // 32 + 2 * (1360 // 32), 3 * 8 * (250 // 32)
    assert result["recipes"][0]["training of a run, s"] == pytest.approx([n * ours for n in range(2, 8)])
    assert result["recipes"][1]["training of a run, s"] == pytest.approx(6 * [6 * theirs])
    assert result["ratios"] == pytest.approx([6 * theirs / (n * ours) for n in range(2, 8)])
    assert result["interval"] == pytest.approx([min(result["ratios"]), max(result["ratios"])])
    assert bench.speedup([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == 3.0


@pytest.mark.parametrize(("count", "ranks"), [(5, None), (6, (1, 6)), (11, (2, 10)), (25, (8, 18))])
def test_the_interval_of_the_median_is_that_of_the_sign_test(count, ranks):
    """The numbers 1, 2, ... in another order are their own ranks."""
    assert bench.interval([float(index * 7 % count + 1) for index in range(count)]) == ranks


@pytest.mark.parametrize("in_parts", [False, True])
def test_each_side_of_a_comparison_computes_in_the_float32_it_names(in_parts, monkeypatch):
    allowed = []
    learners = [make_model(SMALL, ALONE, name) for name in ("tf32", "fp32", "tf32")]
    images, labels = torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.int64)
    for model in learners:
        optimizers = SMALL.optimizers(model.network, ALONE)
        hook = model.network.register_forward_pre_hook(
            lambda *_: allowed.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        )
        if in_parts:
            bench.time_step_in_parts(model, optimizers, images, labels, bench.defaultdict(list))
        else:
            bench.timed_step(model, optimizers, [(images, labels)], [])
        hook.remove()
    assert allowed == [(True, True), (False, False), (True, True)]


def test_every_input_pipeline_loads_every_image_once_cropped_and_mirrored_like_ours():
    """Each image has one gray level and a brighter left half: both can be told after cropping and mirroring."""
    grays = np.arange(40, dtype=np.uint8) * 6
    images = np.repeat(grays, 32 * 32 * 3).reshape(40, 32, 32, 3)
    images[:, :, :16] += 3
    device_images = normalize(torch.from_numpy(images), torch.float32)
    shards = Shards(device_images, torch.arange(40) % 10, range(1), 40, Page(batch_size=16), 1)
    for name, load in bench.input_pipelines(images, np.arange(40) % 10, shards, 1).items():
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


def test_a_crop_on_the_cpu_is_that_of_the_padded_image():
    image = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)), mode="reflect")
    expected = (padded[2:34, 7:39][:, ::-1] - np.array(MEAN)) / np.array(STD)
    for prepared in (False, True):
        dataset = bench.OnCPU(image, np.array([3]), prepared, in_bulk=True)
        dataset.crops = [[2, 7, 1]]
        crop, label = dataset[0]
        np.testing.assert_allclose(crop.permute(1, 2, 0).numpy(), expected, atol=1e-5)
        assert label == 3


def test_an_epoch_is_timed_to_its_end_or_extrapolated(monkeypatch):
    """Three seconds to start, one per batch."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    def load():
        wait(3)
        yield from range(10)

    assert bench.time_epoch(load(), lambda batch: wait(1), 10, 10, ALONE) == 13
    assert bench.time_epoch(load(), lambda batch: wait(1), 4, 10, ALONE) == 13


def test_input_pipelines_print_json_and_draw(measure, tmp_path):
    options = ["--width", "16", "--batch_size", "500", "--steps", "2", "--repeats", "2", "--no_compile"]
    result = measure("--input_pipelines", *options, "--picture", str(tmp_path / "p.png"))
    assert [len(row[part]) for row in result["pipelines"].values() for part in row] == [2] * 10
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("given", "gpus", "shape"),
    [([], 0, (2, 1000)), (["--workers=4"], 0, (4, 500)), (["--workers", "4"], 1, (4, 500)), ([], 1, (1, 2000))],
)
def test_without_a_gpu_a_step_is_of_one_worker_per_process_unless_workers_is_set(given, gpus, shape, monkeypatch):
    monkeypatch.setattr(command_line, "count_gpus", lambda device: gpus)
    recipe = command_line.read_to_measure(["--recipe", "muon", *given], processes=2)[1]
    assert (recipe.workers, recipe.batch_size) == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--picture", "p.png"], "--picture needs --input_pipelines"),
        (["--against", "muon", "--steps", "3"], "--steps needs --input_pipelines"),
        (["--against", "muon", "--input_pipelines"], "not allowed with"),
        (["--against", "muon", "--rounds", "0"], "0 must be at least 1"),
        (["--against", "muon", "--pixels", "9"], "recipe apple2019 has no option --pixels"),
        (["--against", "muon", "--batch_size", "60000"], "60000 images a step, more than the training set's 50000"),
        (["--input_pipelines", "--steps", "1"], "--steps 1 must be at least 2"),
        (["--input_pipelines", "--picture", "p.jpg"], "--picture p.jpg must end in .png"),
        (["--input_pipelines", "--micro_batches", "2"], "--micro_batches 2 does not divide the 1 workers of a process"),
        (["--input_pipelines", "--recipe", "fastai"], "use --recipe page"),
        (["--recipe", "muon", "--kept", "1,0.01"], "epoch 5 keeps 0.01 of 50000 images"),
    ],
)
def test_a_bad_option_ends_with_status_2_and_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as end:
        bench.main()
    output = capsys.readouterr()
    assert (end.value.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert message in output.err


def test_bench_is_a_command():
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.bench", "--repeats", "0"]
    result = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
