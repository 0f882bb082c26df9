"""An epoch never waits for a GPU, and convolutions need not transpose."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipes import Apple2019, Basenet, FastAI, MuonRecipe, Page
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
    monkeypatch.setattr(train, "place", lambda network, precision: network)  # it is made on the GPU
    monkeypatch.setattr(train, "prepare_for_gpu", lambda optimizers: None)  # fused SGD has no fake kernel
    with FakeTensorMode(allow_non_fake_inputs=False):
        with gpu:
            model = make_model(recipe, DistContext(0, 1, gpu, recipe.workers), "fp32", min(2, recipe.workers))
        weights = [*model.network.parameters()]
        set_zero = lambda _: [setattr(weight, "grad", torch.zeros_like(weight)) for weight in weights]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "backward", set_zero)
        count = round(3 * recipe.workers * recipe.batch_size / recipe.stages[0].keep_fraction)
        data = prepare(random_images(count, 10), model, Clock(lambda: None))
        step, samples = make_step(model, data), data.train.epoch(seed=0, epoch=1, losses=data.losses)
        for sample in samples:
            step(sample)
        with pytest.raises(DataDependentOutputException):
            data.metrics.sums.tolist()
    assert len(samples) == 3
    assert not data.losses.requires_grad, "or a step's graph would be kept for an epoch"
    assert {tensor.device for tensor in (*weights, data.metrics.sums, *data.test)} == {gpu}
