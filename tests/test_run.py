"""A run: what is timed, which epoch reaches 94%, what it saves, how it fails; and that another recipe can be added."""

import dataclasses
import math
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ALONE, REPO, TINY, run_here, write_npz
from torch import nn
from torchvision.io import write_png

from large_batch_cifar_10_fast import ConfigError, api, runs, train
from large_batch_cifar_10_fast import log as run_log
from large_batch_cifar_10_fast.config import recipe_named
from large_batch_cifar_10_fast.data.shards import CropAndFlip, assign_independent
from large_batch_cifar_10_fast.core.shapes import draw_shapes
from large_batch_cifar_10_fast.core.devices import out_of_memory_hint
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.evaluate import Score, chunk_sizes, evaluate, predict
from large_batch_cifar_10_fast.layers import GhostBatchNorm
from large_batch_cifar_10_fast.optim import PiecewiseLinear
from large_batch_cifar_10_fast.recipe import TWO_VIEWS, Recipe, option
from large_batch_cifar_10_fast.recipes import DEMO, RECIPES, Apple2019, Page
from large_batch_cifar_10_fast.core.table import code_digest


@pytest.mark.slow
def test_upload_preprocessing_whitening_and_training_count_and_validation_does_not(tiny_npz, tmp_path, monkeypatch):
    """Work takes seconds of its own kind on a device, for which the clock waits; validations say 90%, 95%, 93%, 96%."""
    now, queued, scores = [0.0], [], iter([90, 95, 93, 96] * 2)

    def taking(seconds, work):
        def slower(*arguments, **named):
            queued.append(seconds)
            return work(*arguments, **named)

        return slower

    def synchronize(ctx):
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * now[0])
    monkeypatch.setattr(DistContext, "synchronize", synchronize)
    monkeypatch.setattr(train, "make_model", taking(500, train.make_model))
    monkeypatch.setattr(train, "upload_test", taking(0.5, train.upload_test))
    monkeypatch.setattr(train, "normalize", taking(0.25, train.normalize))
    monkeypatch.setattr(train, "whitening_buffers", taking(0.125, train.whitening_buffers))
    monkeypatch.setattr(train, "train_step", taking(1, train.train_step))
    monkeypatch.setattr(train, "evaluate", taking(1000, lambda *_, **__: Score(next(scores), 100, 1.0)))
    run_here("--demo", *TINY, "--epochs", 4, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    steps = 643 // 8 // 16
    parts = {"upload": 0.5, "preprocessing": 0.5, "whitening": 0.125, "training": 4 * steps}
    parts |= {"seconds": 1.125 + 4 * steps, "last_validation": 1000, "validation_accuracy": 0.96}
    parts |= {"cpu_seconds": 2 * parts["seconds"]}
    parts |= {"goal_epoch": 2, "goal_seconds": 1.125 + 2 * steps}  # the first epoch at 94%, not the last
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows[[*parts]].to_dict("records") == [parts, parts]
    hours = pd.read_csv(tmp_path / "timing_log.tsv", sep="\t")["hours"] * 3600
    assert hours.tolist() == pytest.approx([1.125 + epoch * steps for epoch in (1, 2, 3, 4)])


@dataclasses.dataclass(frozen=True)
class Stock(Recipe):
    """Two workers, plain batch norm with a scale, torch's SGD, the loss's mean, one view."""

    batch_size: int = option(16, "images a worker takes each step")
    epochs: int = option(2, "epochs of a run")

    name = "stock"
    workers = 2
    augmentation = CropAndFlip(padding=4, assign=assign_independent)
    whole_epochs = True
    reduction = "mean"
    loss_scale = 8

    def network(self) -> nn.Module:
        norm = GhostBatchNorm(6, ghost_batch=self.batch_size)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False), norm, nn.ReLU(), nn.AvgPool2d(30), nn.Flatten(), nn.Linear(6, 10)
        )

    def optimizers(self, network, ctx) -> list:
        schedules = {"lr": PiecewiseLinear((0, 1, 2), (0, 0.1, 0.01)), "momentum": PiecewiseLinear((0, 2), (0.95, 0.8))}
        group = {"params": list(network.parameters()), "schedules": schedules}
        return [torch.optim.SGD([group], lr=0.0, momentum=0.9, nesterov=True, weight_decay=0.01)]


@pytest.mark.parametrize("name", ["network", "optimizers", "workers"])
def test_a_recipe_without_a_part_that_has_no_default_cannot_be_made(name):
    incomplete = type("Incomplete", (Stock,), {name: getattr(Recipe, name)})
    with pytest.raises(TypeError, match=rf"abstract method '?{name}"):
        incomplete()


def test_a_campaign_of_another_recipe_is_written_and_continued(tiny_npz, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(RECIPES, "stock", Stock)
    base = ["--data", tiny_npz, "--out", tmp_path, "--no_warmup", "--precision", "fp32"]
    run_here("--recipe", "stock", *base, "--epochs", 1)
    with pytest.raises(ConfigError, match=r"continued with recipe \(apple2019, not stock\)"):
        run_here("--resume", *base, *TINY)
    run_here("--recipe", "stock", *base, "--epochs", 1, "--resume", "--runs", 2)
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")[["run", "recipe", "options"]]
    assert rows.to_numpy().tolist() == [[run, "stock", "batch_size=16 epochs=1"] for run in (0, 1)]
    assert "# recipe stock batch_size=16 epochs=1\n" in capsys.readouterr().out


def test_the_digest_of_the_code_covers_what_decides_the_weights_of_this_recipe(tmp_path, monkeypatch):
    recipes = (Page(), Apple2019())
    for module in ("page", "basenet", "apple2019"):
        monkeypatch.setattr(f"large_batch_cifar_10_fast.recipes.{module}.__file__", str(tmp_path / f"{module}.py"))
        (tmp_path / f"{module}.py").touch()
    monkeypatch.setattr(runs, "PACKAGE", tmp_path)

    def changes(name: str) -> list[bool]:
        before = [runs.code_digest(recipe) for recipe in recipes]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("changed")
        return [runs.code_digest(recipe) != old for recipe, old in zip(recipes, before, strict=True)]

    for name in ("train.py", "layers.py", "data/shards.py"):
        assert changes(name) == [True, True], name
    assert changes("page.py") == [True, False]
    assert changes("basenet.py") == [True, False], "from which page inherits"
    assert changes("apple2019.py") == [False, True]
    assert changes("plot.py") == changes("log.py") == changes("fastai.py") == [False, False]


MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 100, "--epochs", 2, "--pixels", "24,32", "--kept", "1,0.5"]
SMALL = {"apple2019": ["--demo", *TINY[:-1], "--eval_stats", "average"], "muon": MUON}  # with a warm-up


@pytest.fixture(scope="module", params=SMALL)
def saved(request, tiny_npz, tmp_path_factory):
    """Weights of a single run after a warm-up, the options they were trained with, and the run's row."""
    folder, options = tmp_path_factory.mktemp("saved"), [*SMALL[request.param], "--data", tiny_npz, "--no_compile"]
    options += ["--precision", "fp32"]
    run_here(*options, "--seed", 6, "--save", folder / "w.pt", "--out", folder)
    return folder / "w.pt", options, pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


@pytest.mark.slow
def test_the_last_run_of_a_campaign_equals_a_single_run_with_its_seed_after_a_warm_up(saved, tmp_path):
    """Each run begins anew: weights, statistics, resolution, frozen weights, hard examples and the order of flips."""
    file, options, row = saved
    run_here(*options, "--no_warmup", "--runs", 2, "--seed", 5, "--save", tmp_path / "w.pt", "--out", tmp_path)
    result = ["train_accuracy", "train_loss", "validation_count", "validation_loss"]
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[-1][result].tolist() == row[result].tolist()
    weights, expected = (torch.load(path, weights_only=True)["weights"] for path in (tmp_path / "w.pt", file))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_saved_weights_alone_make_a_model_with_the_result_of_their_run(saved, tiny_npz, monkeypatch, capsys):
    weights, _, row = saved
    score = api.evaluate(weights, tiny_npz)
    assert score.accuracy == row["validation_accuracy"]
    assert score.loss == pytest.approx(row["validation_loss"], rel=1e-6)
    monkeypatch.setattr("sys.argv", ["api", str(weights), "--data", str(tiny_npz)])
    api.main()
    assert f"accuracy {score.accuracy:.4f} ({score.correct} of {score.images} images)" in capsys.readouterr().out
    model, images = api.load(weights), torch.from_numpy(np.load(tiny_npz)["test_images"])
    assert (model.training, model.classes[3], model.about["recipe"]) == (False, "3", row["recipe"])
    probabilities = model.predict(images)
    assert torch.allclose(probabilities.sum(1), torch.ones(len(images)))
    right = (probabilities.argmax(1).numpy() == np.load(tiny_npz)["test_labels"]).sum()
    assert right == row["validation_count"]
    assert model(images).shape == (len(images), 10)


@pytest.mark.slow
def test_the_page_on_use_of_the_model_is_right(saved, tmp_path, monkeypatch, capsys):
    """Its program predicts as our own code does, and exports a program for any number of images."""
    program, onnx = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "use_the_model.md").read_text(), re.S)
    shutil.copy(saved[0], tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, image in zip(("one.png", "two.png"), images, strict=True):
        write_png(image, name)
    names = {}
    exec(program, names)
    model, images = api.load(saved[0]), images.permute(0, 2, 3, 1)
    shown = [f"{model.classes[p.argmax()]} {p.max():.3f}" for p in model.predict(images)]
    assert capsys.readouterr().out.splitlines() == shown
    exported = torch.export.load("model.pt2").module()
    for count in (2, 5):
        some = images[torch.arange(count) % 2]
        assert torch.allclose(exported(some), model(some), atol=1e-5)
    pytest.importorskip("onnxscript")
    exec(onnx, names)
    session = pytest.importorskip("onnxruntime").InferenceSession("model.onnx")
    (logits,) = session.run(None, {session.get_inputs()[0].name: some.numpy()})
    assert np.allclose(logits, model(some).detach(), atol=1e-4)


@pytest.mark.slow
def test_other_files_than_saved_weights_are_refused_in_one_line(saved, tmp_path):
    weights, _, _ = saved
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK" + weights.read_bytes()[:500])
    (tmp_path / "changed.pt").write_bytes(weights.read_bytes().replace(b"ctorch", b"cos\nys"))
    for name in ("absent.pt", "text.pt", "cut.pt", "changed.pt", "list.pt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be loaded \([^\n]*$"):
            api.load(tmp_path / name)
    content = torch.load(weights, weights_only=True)
    torch.save(content["weights"], tmp_path / "old.pt")
    with pytest.raises(ConfigError, match=r"old\.pt has weights alone, as earlier versions wrote them: read"):
        api.load(tmp_path / "old.pt")
    content["about"]["recipe"] = "mine"
    torch.save(content, tmp_path / "mine.pt")
    with pytest.raises(ConfigError, match=r"is of the recipe mine: give its object, load\(FILE, recipe=...\)"):
        api.load(tmp_path / "mine.pt")


@pytest.mark.slow
def test_images_of_twelve_classes_train_a_network_of_twelve_and_name_their_normalization(tmp_path, capsys):
    parts = draw_shapes(400, 20)
    parts[1][:], parts[2][:3] = np.arange(400) % 12, parts[0][:3]
    data, weights = write_npz(tmp_path / "twelve.npz", *parts), tmp_path / "w.pt"
    run_here(*MUON, "--data", data, "--out", tmp_path, "--save", weights, "--precision", "fp32")
    output = capsys.readouterr()
    assert re.search(r"# 12 classes, normalized by .* mean \(12\d\.", output.out)
    assert output.err.count("Warning: ") == output.err.count("3 of 20 test images are also training images") == 1
    assert api.load(weights)(torch.zeros(2, 32, 32, 3, dtype=torch.uint8)).shape == (2, 12)
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert api.evaluate(weights, data).loss == pytest.approx(row["validation_loss"], rel=1e-6)
    others = write_npz(data, *(part if part.ndim > 1 else part + 3 for part in draw_shapes(400, 20)))
    with pytest.raises(ConfigError, match=r"knows 12 classes, and .* has a label 12"):
        api.evaluate(weights, others)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        api.evaluate(tmp_path / "absent.pt", "/absent")  # no image is looked for before


@pytest.mark.slow
def test_a_program_trains_twice_with_options_and_with_a_recipe_of_its_own(tiny_npz, tmp_path):
    options = {"data": tiny_npz, "out": tmp_path, "precision": "fp32", "no_warmup": True}
    small = DEMO | {"width": 4, "epochs": 1, "ema_ep": 0.5}
    rows = api.train(runs=2, campaign="one", no_compile=True, resume=False, **options, **small)
    assert rows[["run", "recipe"]].to_numpy().tolist() == [[0, "apple2019"], [1, "apple2019"]]

    class Wide(Apple2019):
        name = "wide"

    more = api.train(Wide(**small), no_compile=True, seed=1, campaign="two", **options)
    assert more["recipe"].tolist() == ["wide"]
    assert more["validation_loss"][0] == rows["validation_loss"][1], "the same options and seed"
    with pytest.raises(ConfigError, match="--runs 0 must lie in 1 to 100000"):
        api.train(**options, runs=0)


OWN = """
from dataclasses import dataclass
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

@dataclass(frozen=True)
class Mine(Apple2019):
    name = "mine"
    batch_size: int = 32
    surplus: float = 0.5

class Undecorated(Apple2019):
    batch_size = 32

class Nameless(Apple2019):
    pass
"""


@pytest.mark.slow
def test_a_recipe_in_a_file_of_its_own_is_trained_from_the_command_line(tiny_npz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    few = [word for pair in (("--epochs", 1), ("--ema_ep", 0.5), ("--width", 4), ("--surplus", 2)) for word in pair]
    run_here("--recipe", "own.py:Mine", *few, "--data", tiny_npz, "--out", tmp_path, "--save", "w.pt", "--no_compile")
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert row["recipe"] == "mine"
    assert {"batch_size=32", "surplus=2.0"} <= set(row["options"].split())
    with zipfile.ZipFile(tmp_path / f"source-{row['code']}.zip") as source:
        assert source.read("own.py").decode() == OWN
        assert source.read("large_batch_cifar_10_fast/train.py") == Path(train.__file__).read_bytes()
    (tmp_path / "own.py").write_text(OWN + "# changed")
    assert code_digest(recipe_named("own.py:Mine")()) != row["code"]
    invalid = {
        "own.py:Other": "has no attribute 'Other'",
        "absent.py:Mine": "FileNotFoundError",
        "own": "neither one of",
    }
    invalid |= {"own.py:Undecorated": r"put @dataclass\(frozen=True\) above it", "own.py:dataclass": "TypeError"}
    for name, reason in invalid.items():
        with pytest.raises(ConfigError, match=rf"^--recipe {name} cannot be used \([^\n]*{reason}"):
            run_here("--recipe", name)
    with pytest.raises(ConfigError, match=r"^Nameless is not apple2019: give your recipe a name of its own"):
        run_here("--recipe", "own.py:Nameless")


@pytest.mark.slow
def test_weights_are_trained_and_saved_in_half_precision(tiny_npz, tmp_path):
    small = ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--precision", "fp16"]
    run_here(*small, "--out", tmp_path, "--save", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)["weights"]
    assert weights["prep.0.weight"].dtype == torch.float16
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert (row["precision"], np.isfinite(row["train_loss"])) == ("fp16", True)


def test_views_of_half_precision_are_averaged_in_float32():
    def network(batch):
        return (1 + batch[:, 0, 0, :1] / 128).to(torch.bfloat16)

    image = torch.tensor([0.0, 1]).view(1, 1, 2, 1)
    assert predict(network, image, TWO_VIEWS).item() == 1 + 1 / 256, "which bfloat16 would round to 1"


@pytest.mark.slow
def test_a_diverged_run_is_a_result_with_a_warning_and_never_reached_the_goal(tiny_npz, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Score(95, 101, math.nan))
    run_here("--demo", *TINY, "--data", tiny_npz, "--lr_scaler", "100000", "--out", tmp_path)
    out, err = capsys.readouterr()
    assert re.match(r"Warning: run 0 \(seed 0\) stopped after epoch 1 of 2: its loss is not finite; .*\n$", err), err
    assert (tmp_path / "timing_log.tsv").read_text().count("\n") == 2, "its second epoch is not trained"
    assert out.endswith("\n0 runs reached 0.94 out of 1\n")
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert row[["train_loss", "goal_epoch", "goal_seconds"]].isna().all()
    assert (row["validation_count"], row["validation_images"]) == (95, 101)


@pytest.mark.parametrize("words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", ""])
def test_running_out_of_memory_gives_a_hint_that_fits_what_was_done(words):
    def fail(images):
        raise RuntimeError(words) if words else torch.OutOfMemoryError

    training = "^training ran out of memory: raise --micro_batches"
    with pytest.raises(ConfigError, match=training), out_of_memory_hint("training"):
        fail(None)
    recipe, test = Apple2019(width=4), (torch.zeros(2, 32, 32, 3), torch.zeros(2, dtype=torch.int64))
    hint = r"^evaluation ran out of memory: (?!.*--micro_batches).*--precision"
    with pytest.raises(ConfigError, match=hint), out_of_memory_hint("training"):
        evaluate(replace(train.make_model(recipe, ALONE, "fp32"), evaluation=fail), TWO_VIEWS, test)


def test_what_an_evaluation_takes_leaves_room_on_small_gpus(monkeypatch):
    """An uncompiled fastai takes 1.6 MiB an image in fp32, the most of all recipes."""
    for gib in (2, 7.6, 15.8, 79):
        properties = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=properties: it)
        largest = chunk_sizes(10_000, torch.device("cuda", 0))[0]
        assert largest * 1.6 * 2**20 < 0.45 * properties.total_memory


@pytest.mark.slow
def test_clocks_are_read_after_the_warm_up(tiny_npz, tmp_path, capsys, monkeypatch):
    asked, found = [], {"driver": "550.54", "clocks": "SM 1980 MHz"}
    monkeypatch.setattr(train, "warm_up", lambda *_: asked.append("warm-up"))
    monkeypatch.setattr(run_log, "driver_and_clocks", lambda _: asked.append("clocks") or found)
    run_here(*SMALL["apple2019"], "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert asked == ["warm-up", "clocks"]
    assert "\n# driver 550.54, clocks SM 1980 MHz\nUploaded" in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["clocks"].tolist() == ["SM 1980 MHz"]
