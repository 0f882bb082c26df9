"""How the parts are put together: what is timed, which epoch reaches 94%, and that another recipe can be added."""

import dataclasses

import pandas as pd
import pytest
import torch
from conftest import TINY, train_here
from torch import nn

from large_batch_cifar_10_fast import ConfigError, runs, train
from large_batch_cifar_10_fast.data.augment import CropAndFlip, assign_independent
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.evaluate import Score
from large_batch_cifar_10_fast.layers import GhostBatchNorm
from large_batch_cifar_10_fast.optim import PiecewiseLinear
from large_batch_cifar_10_fast.recipe import Recipe, option
from large_batch_cifar_10_fast.recipes import RECIPES, Apple2019, Page


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
    monkeypatch.setattr(DistContext, "synchronize", synchronize)
    monkeypatch.setattr(train, "make_model", taking(500, train.make_model))
    monkeypatch.setattr(train, "upload_test", taking(0.5, train.upload_test))
    monkeypatch.setattr(train, "normalize", taking(0.25, train.normalize))
    monkeypatch.setattr(train, "whitening_buffers", taking(0.125, train.whitening_buffers))
    monkeypatch.setattr(train, "train_step", taking(1, train.train_step))
    monkeypatch.setattr(train, "evaluate", taking(1000, lambda *_, **__: Score(next(scores), 100, 1.0)))
    train_here("--demo", *TINY, "--epochs", 4, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    steps = 643 // 8 // 16
    parts = {"upload": 0.5, "preprocessing": 0.5, "whitening": 0.125, "training": 4 * steps}
    parts |= {"seconds": 1.125 + 4 * steps, "last_validation": 1000, "validation_accuracy": 0.96}
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
    train_here("--recipe", "stock", *base, "--epochs", 1)
    with pytest.raises(ConfigError, match=r"continued with recipe \(apple2019, not stock\)"):
        train_here("--resume", *base, *TINY)
    train_here("--recipe", "stock", *base, "--epochs", 1, "--resume", "--runs", 2)
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

    for name in ("train.py", "layers.py", "data/augment.py"):
        assert changes(name) == [True, True], name
    assert changes("page.py") == [True, False]
    assert changes("basenet.py") == [True, False], "from which page inherits"
    assert changes("apple2019.py") == [False, True]
    assert changes("plot.py") == changes("log.py") == changes("fastai.py") == [False, False]
