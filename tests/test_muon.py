"""The Muon recipe: its figures, its stages, its work. For its composition see test_muon_oracle.py."""

from dataclasses import asdict

import pytest
import torch
from conftest import ALONE, Recorder
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.metrics import Score
from large_batch_cifar_10_fast.options import as_pairs
from large_batch_cifar_10_fast.recipe import Stage, make_network, run_flop, stage_of
from large_batch_cifar_10_fast.recipes.muon import Muon2024, MuonRecipe
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, train_once, warm_up

STARTED, LATER = Stage(1, 32), Stage(4, 32, ("whitening.bias",))


def test_every_figure_of_2024s_is_what_its_authors_state():
    """However our own may change: the recipe takes from it what it does not state itself."""
    figures = "epochs=8 batch_size=2000 width=64 pixels=32 kept=1 workers=1 views=six filter_rate=0.24 "
    figures += "filter_momentum=0.6 whitening_epochs=3 bias_rate=0.053 head_rate=0.67 momentum=0.85 "
    figures += "label_smoothing=0.2 norm_momentum=0.4"
    assert {*as_pairs(asdict(Muon2024())).split()} == {*figures.split()}


def test_work_is_what_torch_counts_over_a_run_that_is_made(monkeypatch):
    recipe = MuonRecipe(width=4, batch_size=100, epochs=4, pixels="9,9,12,12", kept="1,1,1,0.5")
    model = make_model(recipe, ALONE, "fp32")
    data = prepare(random_images(643, 10), model, Clock(ALONE.synchronize))
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Score(0, 1, 0.0))
    with FlopCounterMode(display=False) as counter:
        train_once(0, 0, model, data, make_step(model, data), Clock(ALONE.synchronize), Recorder())
    counted = {str(name): flop for name, flop in counter.get_flop_counts()["Global"].items()}
    assert counted.pop("aten.bmm") > 0, "Muon's products are no images'"
    assert sum(counted.values()) == run_flop(recipe, 643)


def test_stages_begin_where_the_resolution_changes_or_the_bias_comes_to_rest():
    assert Muon2024().stages == (STARTED, LATER)
    rest = ("whitening.bias",)
    recipe = MuonRecipe(epochs=4, pixels="24,24,24,28,28,32", whitening_epochs=1, kept="1")
    assert recipe.stages == (Stage(1, 24), Stage(2, 24, rest), Stage(3, 28, rest), Stage(4, 32, rest))
    assert [stage_of(recipe, epoch).resolution for epoch in (1, 2, 3, 4, 9)] == [24, 24, 28, 32, 32]
    assert MuonRecipe(epochs=3, pixels="32", whitening_epochs=0, kept="1").stages == (Stage(1, 32, rest),)
    halved = MuonRecipe(epochs=3, pixels="24,32,32", whitening_epochs=0, kept="1,1,0.5").stages
    assert halved == (Stage(1, 24, rest), Stage(2, 32, rest), Stage(3, 32, rest, 0.5))


def test_filters_begin_as_the_identity_and_the_head_with_deviation_one():
    network = make_network(Muon2024(), seed=0)
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(network.groups[0][0](x)[:, :24], x)
    assert network.groups[0][0](x).shape[1] == 64
    assert network.linear.weight.std().item() == pytest.approx(1)


def test_the_warm_up_takes_each_kind_of_step_once(monkeypatch):
    """Of three stages at 16 pixels two take the same steps, and so do both at 20.

    A second pass begins with all parameters, too: a CUDA graph of a frozen bias would never train it.
    """
    recipe = MuonRecipe(epochs=5, width=2, batch_size=10, pixels="16,16,16,20,20", kept="1,1,0.6,1,0.6")
    taken = []

    def take_step(model, micro_batches, metrics):
        [(images, _)] = micro_batches
        taken.append((images.shape[-1], model.network.whitening.bias.requires_grad))

    monkeypatch.setattr(train, "take_step", take_step)
    model = make_model(recipe, ALONE, "fp32")
    for _ in range(2):
        warm_up(model, 100, 1)
    assert taken == 2 * [(16, True), (16, False), (20, False)]
