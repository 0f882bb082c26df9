"""An epoch never waits for a GPU, and convolutions need not transpose."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.devices import Precision
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipe import Model, make_network, training_pass
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.train import make_model, make_step, prepare

pytestmark = pytest.mark.slow

RECIPES = [
    Apple2019(workers=2, batch_size=16, ghost_batch=8, width=4),
    Basenet(width=16),
    Page(width=16),
    FastAI(width=3),
    MuonRecipe(width=4, batch_size=20, workers=2, pixels="24,32", kept="0.5"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_weights_and_activations_are_channels_last_in_memory(recipe):
    recipe = replace(recipe, batch_size=8)
    ctx, found = DistContext(0, 1, torch.device("cpu"), recipe.workers), {}
    model = make_model(recipe, ctx, "fp32")

    def look(name: str, tensor: torch.Tensor) -> None:
        if tensor.ndim == 4:
            found[name] = tensor.is_contiguous(memory_format=torch.channels_last)

    for name, module in model.network.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: look(f"output of {name}", output))
    for name, weight in model.network.named_parameters():
        look(name, weight)
    data = prepare(random_images(16 * recipe.workers, 1), model, Clock(ctx.synchronize))
    [(images, labels)] = data.train.epoch(seed=0, epoch=1)[0].micro_batches()
    model.forward(images, labels)
    assert len(found) > 20
    assert [name for name in found if not found[name]] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_on_a_pretended_gpu_an_epoch_neither_waits_nor_mixes_devices(monkeypatch, recipe):
    """FakeTensorMode knows shapes and devices alone: what needs a value, or tensors of two devices, raises.

    Backward would need a driver; zeros stand for its gradients.
    """
    gpu = torch.device("cuda", 0)

    class Generator:
        device = gpu

        def __init__(self, device):
            assert device == gpu

        def manual_seed(self, seed):
            return self

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "randperm", lambda n, generator, device: torch.arange(n, device=device))
    monkeypatch.setattr(torch, "randint", lambda n, size, generator, device: torch.arange(*size, device=device) % n)
    monkeypatch.setattr(torch, "rand", lambda n, generator, device: torch.ones(n, device=device))
    ctx = DistContext(0, 1, gpu, recipe.workers)
    with FakeTensorMode(allow_non_fake_inputs=False):
        network = make_network(recipe, seed=0)
        for module in network.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(weight.to(gpu), requires_grad=weight.requires_grad))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(gpu))
        weights = [*network.parameters()]
        set_zero = lambda _: [setattr(weight, "grad", torch.zeros_like(weight)) for weight in weights]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "backward", set_zero)
        precision, micro_batches = Precision("fp32", gpu), min(2, recipe.workers)
        forward = partial(training_pass, network, recipe, precision, recipe.workers // micro_batches)
        model = Model(recipe, ctx, precision, network, recipe.optimizers(network, ctx), forward, micro_batches)
        count = round(3 * recipe.workers * recipe.batch_size / recipe.stages[0].keep_fraction)
        data = prepare(random_images(count, 10), model, Clock(lambda: None))
        step, samples = make_step(model, data), data.train.epoch(seed=0, epoch=1)
        for sample in samples:
            step(sample)
        with pytest.raises(DataDependentOutputException):
            data.sums.tolist()
    assert len(samples) == 3
    assert not data.train.losses.requires_grad, "or a step's graph would be kept for an epoch"
    assert {tensor.device for tensor in (*weights, data.sums, *data.test)} == {gpu}
