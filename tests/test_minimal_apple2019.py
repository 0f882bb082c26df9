"""The 2019 method in one file, against the package in float64, and without each of its tricks."""

import importlib.util
import re
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import CPU, REPO, Recorder, random_pictures, run_program, write_npz

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipe import frozen_weights
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, train_once

SOURCE = REPO / "minimal" / "apple2019.py"
SMALL = {"batch_size": 8, "ghost_groups": 2, "width": 4, "epochs": 3}
EDITS = re.findall(r"\n( *)(\S.*?)  # without ([\w -]+): (.+)", SOURCE.read_text())
TRICKS = {trick: (indent + line, "" if new == "delete this line" else indent + new) for indent, line, trick, new in EDITS}
DATA = [*random_pictures(8 * 27), *random_pictures(24)]  # three steps an epoch, and three images of a shard left


def small(text: str = SOURCE.read_text()) -> str:
    """Return the program's text with the sizes of SMALL."""
    for name, value in SMALL.items():
        text, count = re.subn(rf"^    {name}=.*?,", f"    {name}={value},", text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def module_of(text: str, path) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def trained(text: str, path, seed: int = 5) -> tuple[torch.nn.Module, list[list[float]]]:
    """Train in float64. Return the network, and of each epoch training accuracy and loss, test accuracy and loss."""
    program = module_of(text, path)
    data, seconds = program.prepare(DATA, torch.float64)
    network, epochs = program.train(seed, program.hyp.epochs, data, sum(seconds))
    return network, [epoch[1:] for epoch in epochs]


class EveryEpoch(Recorder):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def epoch(self, clock, train, validation):
        super().epoch(clock, train, validation)
        self.epochs.append([train.accuracy, train.loss, validation.accuracy, validation.loss])


def trained_by_package(seed: int = 5) -> tuple[torch.nn.Module, list[list[float]]]:
    """Train the same with the package."""
    groups, epochs = SMALL["ghost_groups"], SMALL["epochs"]
    sizes = {"batch_size": SMALL["batch_size"], "ghost_batch": SMALL["batch_size"] // groups, "width": SMALL["width"]}
    recipe = Apple2019(**sizes, epochs=epochs, ema_ep=epochs / 9)
    ctx, log = DistContext(0, 1, CPU, recipe.workers), EveryEpoch()
    model = make_model(recipe, ctx, "fp64")
    data = prepare(Images("noise", *DATA), model, Clock(ctx.synchronize))
    train_once(0, seed, model, data, make_step(model, data), Clock(ctx.synchronize), log)
    return model.network, log.epochs


def test_a_run_equals_the_packages_to_nine_digits(tmp_path):
    (network, epochs), (expected, expected_epochs) = trained(small(), tmp_path / "same.py"), trained_by_package()
    np.testing.assert_allclose(epochs, expected_epochs, rtol=1e-9)
    frozen = frozen_weights(expected)
    biases = [p for p in network.parameters() if p.ndim == 1 and p.grad is not None]
