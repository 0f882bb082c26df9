"""The Muon recipe trains and evaluates as stock layers in float64 do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_oracle import Head, check_run, check_whitening
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe

EPOCHS, STEP_IMAGES = 4, 12


def stock_network(w):
    layers = [nn.Conv2d(3, 24, 2), nn.GELU()]
    layers[0].weight.requires_grad_(False)
    shapes = [(24, w), (w, w), (w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w)]
    for place, (channels_in, channels_out) in enumerate(shapes):
        pool = nn.MaxPool2d(2) if place % 2 == 0 else nn.Identity()
        norm = nn.BatchNorm2d(channels_out, eps=1e-12, momentum=0.4)
        norm.weight = None
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), pool, norm, nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), Head(4 * w, 256))


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


@pytest.mark.parametrize("workers", [1, 2])
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(workers):
    """Two epochs at 24 pixels and two at 32; in the last two the images with the highest losses alone."""
    batch, options = STEP_IMAGES // workers, {"pixels": "24,32", "kept": "1,1,0.7,0.5", "whitening_epochs": 2}
    recipe = MuonRecipe(epochs=EPOCHS, batch_size=batch, workers=workers, width=4, **options)
    images = Images("shapes", *draw_shapes(3 * STEP_IMAGES + workers, 40))  # what is left of a shard waits
    losses = partial(F.cross_entropy, reduction="none", label_smoothing=0.2)
    steps = [3 * [(batch, 24)], 3 * [(batch, 24)], 2 * [(batch, 32)], [(batch, 32)]]
    update, reference = partial(_update, workers), stock_network(4)
    network = check_run(recipe, reference, update, losses, torch.sum, images, steps, _one_view_or_six)
    assert not network.whitening.bias.requires_grad, "its rate is 0, too: this is the work saved"
    filters = network.whitening.weight
    check_whitening(filters[:12], images.train_images[::workers], epsilon=5e-4)
    assert torch.equal(filters[12:], -filters[:12])
