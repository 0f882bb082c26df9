"""The Muon recipe: it trains and evaluates as stock layers in float64 do; its figures, its stages, its work."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, Recorder, prepared, train_prepared
from test_oracle import check_run, check_whitening
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import optim, train
from large_batch_cifar_10_fast.config import as_pairs
from large_batch_cifar_10_fast.core.images import Images, random_images
from large_batch_cifar_10_fast.core.shapes import draw_shapes
from large_batch_cifar_10_fast.evaluate import Score
from large_batch_cifar_10_fast.recipe import Stage, run_flop, stage_of
from large_batch_cifar_10_fast.recipes.muon import Muon2024, MuonRecipe
from large_batch_cifar_10_fast.train import make_model, make_step, warm_up

EPOCHS, STEP_IMAGES = 4, 12


class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 256


def stock_network(w):
    layers = [nn.Conv2d(3, 24, 2), nn.GELU()]
    layers[0].weight.requires_grad_(False)
    shapes = [(24, w), (w, w), (w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w)]
    for place, (channels_in, channels_out) in enumerate(shapes):
        pool = nn.MaxPool2d(2) if place % 2 == 0 else nn.Identity()
        norm = nn.BatchNorm2d(channels_out, eps=1e-12, momentum=0.4)
        norm.weight = None
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), pool, norm, nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), Head(4 * w, 10, bias=False))


def _muon(w, g, state, rate):
    state[:] = 0.6 * state + g
    direction = (g + 0.6 * state).flatten(1)
    x = direction / direction.norm()
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return w * len(w) ** 0.5 / w.norm() - rate * x.view(w.shape)


def _update(workers, name, w, g, state, epoch):
    """Rates are for the summed loss of all workers. The bias of the whitening is frozen after two epochs."""
    now = epoch - 12 / 50_000  # of the true data set the first step would end at 0
    if w.ndim == 4:
        return _muon(w, g, state, 0.24 * (1 - now / EPOCHS))
    rate = 0.67 if w.ndim == 2 else 0.053
    left = max(0, 1 - now / 2) if name == "0.bias" else 1 - now / EPOCHS
    g = workers * g + 2e-6 * STEP_IMAGES / rate * w
    state[:] = 0.85 * state + g
    return w - rate * left * (g + 0.85 * state)


def _one_view_or_six(network, images, last):
    if not last:
        return network(images)
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    views = [(images, 0.25), (padded[:, :, :32, :32], 0.125), (padded[:, :, 2:, 2:], 0.125)]
    return sum((network(view) + network(view.flip(3))) * weight for view, weight in views)


def test_two_workers_train_as_stock_layers_do_to_nine_digits():
    """Two epochs at 24 pixels and two at 32; in all but the third some images alone, those never seen first."""
    workers, batch = 2, STEP_IMAGES // 2
    options = {"pixels": "24,32", "kept": "0.7,0.7,1,0.5", "whitening_epochs": 2}
    recipe = MuonRecipe(epochs=EPOCHS, batch_size=batch, workers=workers, width=4, **options)
    images = Images("shapes", *draw_shapes(3 * STEP_IMAGES + workers, 40))  # what is left of a shard waits
    losses = partial(F.cross_entropy, reduction="none", label_smoothing=0.2)
    steps = [2 * [(batch, 24)], 2 * [(batch, 24)], 3 * [(batch, 32)], [(batch, 32)]]
    update, reference = partial(_update, workers), stock_network(4)
    network = check_run(recipe, reference, update, losses, torch.sum, images, steps, _one_view_or_six)
    assert not network.whitening.bias.requires_grad, "its rate is 0, too: this is the work saved"
    filters = network.whitening.weight
    check_whitening(filters[:12], images.train_images[::workers], epsilon=5e-4)
    assert torch.equal(filters[12:], -filters[:12])


def test_every_figure_of_2024s_is_what_its_authors_state():
    """However our own may change: the recipe takes from it what it does not state itself."""
    figures = "epochs=8 batch_size=2000 width=64 pixels=32 kept=1 workers=1 views=six filter_rate=0.24 "
    figures += "filter_momentum=0.6 whitening_epochs=3 bias_rate=0.053 head_rate=0.67 momentum=0.85 "
    figures += "label_smoothing=0.2 norm_momentum=0.4"
    assert {*as_pairs(Muon2024()).split()} == {*figures.split()}


def test_work_is_what_torch_counts_over_a_run_that_is_made(monkeypatch):
    recipe = MuonRecipe(width=4, batch_size=100, epochs=4, pixels="9,9,12,12", kept="1,1,1,0.5")
    model, data = prepared(recipe, random_images(643, 10), "fp32")
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Score(0, 1, 0.0))
    with FlopCounterMode(display=False) as counter:
        train_prepared(model, data, 0, Recorder())
    counted = {str(name): flop for name, flop in counter.get_flop_counts()["Global"].items()}
    assert counted.pop("aten.bmm") > 0, "Muon's products are no images'"
    assert sum(counted.values()) == run_flop(recipe, 643)


@pytest.mark.parametrize(("precision", "half"), [("bf16", True), ("fp32", False)])
def test_a_step_multiplies_the_matrices_of_muon_in_its_precision(precision, half, monkeypatch):
    model, data = prepared(MuonRecipe(epochs=1, width=2, batch_size=10, kept="1"), random_images(10, 1), precision)
    found, orthogonal = [], optim.orthogonal
    monkeypatch.setattr(optim, "orthogonal", lambda x: found.append(torch.is_autocast_enabled("cpu")) or orthogonal(x))
    make_step(model, data)(data.train.epoch(seed=0, epoch=1)[0])
    assert found == [half]


def test_stages_begin_where_the_resolution_changes_or_the_bias_is_frozen():
    frozen = ("whitening.bias",)
    assert Muon2024().stages == (Stage(1, 32), Stage(4, 32, frozen))
    assert MuonRecipe(epochs=2).stages == (Stage(1, 24), Stage(2, 32, frozen, 0.68)), "in proportion"
    assert Muon2024(epochs=2).stages == (Stage(1, 32), Stage(2, 32, frozen))
    recipe = MuonRecipe(epochs=4, pixels="24,24,24,28,28,32", whitening_epochs=1, kept="1")
    assert recipe.stages == (Stage(1, 24), Stage(2, 24, frozen), Stage(3, 28, frozen), Stage(4, 32, frozen))
    assert [stage_of(recipe, epoch).resolution for epoch in (1, 2, 3, 4, 9)] == [24, 24, 28, 32, 32]
    assert MuonRecipe(epochs=3, pixels="32", whitening_epochs=0, kept="1").stages == (Stage(1, 32, frozen),)
    halved = MuonRecipe(epochs=3, pixels="24,32,32", whitening_epochs=0, kept="1,1,0.5").stages
    assert halved == (Stage(1, 24, frozen), Stage(2, 32, frozen), Stage(3, 32, frozen, 0.5))


def test_the_warm_up_takes_each_distinct_step_once(monkeypatch):
    """Of three stages at 16 pixels two take the same steps, and so do both at 20.

    A second pass begins with all parameters, too: a CUDA graph of a frozen bias would never train it.
    """
    recipe = MuonRecipe(epochs=5, width=2, batch_size=10, pixels="16,16,16,20,20", kept="1,1,0.6,1,0.6")
    taken = []

    def train_step(model, data, sample):
        [(images, _)] = sample.micro_batches()
        taken.append((images.shape[-1], model.network.whitening.bias.requires_grad))

    monkeypatch.setattr(train, "train_step", train_step)
    model = make_model(recipe, ALONE, "fp32")
    for _ in range(2):
        warm_up(model, 100, 1)
    assert taken == 2 * [(16, True), (16, False), (20, False)]
