"""The systems of 2018: their sizes, their schedules, what they refuse, and their table."""

import re

import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast.command_line import RECIPES, read_request
from large_batch_cifar_10_fast.compiling import gradients, noise
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.layers import norms_of
from large_batch_cifar_10_fast.optim import NesterovSGD
from large_batch_cifar_10_fast.recipe import autocast, run_flop, weight_dtype
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.train import make_model

BASENET_RATES = {0: 0, 7.5: 0.05, 14.7: 0.098, 15: 0.105, 20: 0.005 + 0.2 * 10 / 30, 30: 0.005, 32.5: 0.0025, 36: 5e-4}
EIGHT_GPU_RATES = {0: 0.04, 8.75: 1.02, 17.5: 2.0, 26.25: 1.02, 35: 0.04, 37.5: 0.0202, 40: 0.0004}
ONE_GPU_RATES = {0: 0.075, 6: 0.7875, 12: 1.5, 24: 0.075, 27: 0.037875, 30: 0.00075}


@pytest.mark.parametrize(
    ("recipe", "name", "known"),
    [
        (Basenet(), "lr", BASENET_RATES),
        (Page(), "lr", {e: r / 128 for e, r in {0: 0, 7.5: 0.05, 15: 0.1, 22.5: 0.0525, 30: 0.005, 35: 0}.items()}),
        (Page(starting_point=True), "lr", {7.5: 0.05 / 128, 15: 0.105 / 128, 22.5: 0.055 / 128, 32.5: 0.0025 / 128}),
        (FastAI(), "lr", EIGHT_GPU_RATES),
        (FastAI(), "momentum", {0: 0.95, 8.75: 0.9, 17.5: 0.85, 26.25: 0.9, 35: 0.95, 40: 0.95}),
        (FastAI(entry="one_gpu"), "lr", ONE_GPU_RATES),
    ],
)
def test_schedules_have_their_known_answers(recipe, name, known):
    (group,) = recipe.optimizers(recipe.network(), ALONE)[0].param_groups
    assert {epoch: pytest.approx(value, rel=1e-9, abs=1e-12) for epoch, value in known.items()} == {
        epoch: group["schedules"][name](epoch) for epoch in known
    }


def test_scales_start_uniform_and_wide_ones_at_one():
    torch.manual_seed(0)
    for recipe in (Basenet(), Page()):
        scales = torch.cat([norm.weight.detach() for norm in norms_of(recipe.network())])
        assert 0 < scales.min() < 0.01
        assert 0.99 < scales.max() < 1
        assert scales.mean().item() == pytest.approx(0.5, abs=0.02)
    network = FastAI().network()
    assert all((norm.weight == 1).all() for norm in norms_of(network))
    assert network.linear.bias.eq(0).all()
    for convolution in (m for m in network.modules() if isinstance(m, nn.Conv2d)):
        out, _, k, _ = convolution.weight.shape
        assert convolution.weight.std().item() == pytest.approx((2 / (k * k * out)) ** 0.5, rel=0.1)


def test_fast_ai_keeps_float32_weights_in_fp16_and_the_others_do_not():
    assert (FastAI().loss_scale, Page().loss_scale, Basenet().loss_scale) == (512, 1, 1)
    assert weight_dtype(FastAI(), "fp16") == torch.float32
    assert weight_dtype(Page(), "fp16") == torch.float16
    weights, images = torch.ones(4, 4), torch.ones(4, 4)
    for recipe, precision, computed in (
        (FastAI(), "fp16", torch.float16),
        (FastAI(), "bf16", torch.bfloat16),
        (Page(), "bf16", torch.bfloat16),
        (FastAI(), "fp32", torch.float32),
    ):
        with autocast(recipe, precision, CPU):
            assert (weights @ images).dtype == computed


MUON = MuonRecipe(width=8, batch_size=20)
HALVES = [
    *((Basenet(width=16, batch_size=8), "bf16", 0.4), (Page(width=16, batch_size=8), "bf16", 0.4)),
    *((FastAI(width=3, batch_size=8), "bf16", 0.4), (MUON, "bf16", 0.8), (MUON, "fp16", 0.8)),
]


@pytest.mark.parametrize(("recipe", "precision", "least"), HALVES)
def test_in_half_precision_gradients_point_where_those_of_float64_do(recipe, precision, least):
    """Float32 weights; on few images, at once through up to 22 layers. In fp16 nothing is too small for Muon."""
    found = {}
    for name in (precision, "fp64"):
        model = make_model(recipe, ALONE, name)
        batch = noise(recipe.batch_size, recipe.stages[0].resolution, weight_dtype(recipe, name), ALONE)
        found[name] = gradients(model.network, model.forward, batch, workers=1)
    for name, expected in found["fp64"].items():
        assert found[precision][name].dtype == torch.float32
        cosine = F.cosine_similarity(found[precision][name].double().flatten(), expected.flatten(), dim=0)
        assert least < cosine < 1 - 1e-9, name


def test_the_table_in_the_documents_is_counted_on_the_recipes():
    cells = [line.strip("| ").split(" | ") for line in (REPO / "docs" / "recipes.md").read_text().splitlines()]
    rows = {row[0].strip("`"): row for row in cells if len(row) == 11 and row[0].startswith("`")}
    assert {name.split()[0] for name in rows} == RECIPES.keys()
    for name, (_, _, parameters, multiply_adds, batches, epochs, rate, pflop, *_) in rows.items():
        _, recipe = read_request(["--recipe", *name.split()])
        network = recipe.network()
        assert f"{sum(w.numel() for w in network.parameters() if w.requires_grad):,}" == parameters
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            recipe.network().eval()(torch.empty(1, 3, 32, 32))
        assert f"{counter.get_total_flops() / 2e9:.3f}" == multiply_adds
        assert (f"{recipe.workers} x {recipe.batch_size}", str(recipe.epochs)) == (batches, epochs)
        assert f"{run_flop(recipe, 50_000) / 1e15:.2f}" == pflop
        optimizer = recipe.optimizers(network, DistContext(0, 1, CPU, recipe.workers))[0]
        schedule = optimizer.param_groups[0]["schedules"]["lr"]
        for_the_mean = recipe.batch_size if isinstance(optimizer, NesterovSGD) else 1  # it takes the loss's sum
        values = [float(text) for text in re.findall(r"(?<![(\d.])[\d.]+(?![\d.)])", rate)]
        assert values == pytest.approx([value * for_the_mean for value in schedule.values])
