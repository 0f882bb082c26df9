"""Recipes against independent ones of PyTorch's stock layers, in float64; schedules; the table of all recipes.

Whole runs through `train_once` and `evaluate`, with an evaluation after each epoch. The reference takes the workers one
after the other, each with its own images, its own statistics and its own loss. Shared with our code are only initial
weights and the augmented batches, which test_shards.py is about. Of apple2019, minimal/apple2019.py is the reference.
"""

import copy
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO, Recorder, prepared, train_prepared
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast.compiling import noise, results_of_pass
from large_batch_cifar_10_fast.config import parse
from large_batch_cifar_10_fast.core.images import Images
from large_batch_cifar_10_fast.core.shapes import draw_shapes
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.evaluate import evaluate
from large_batch_cifar_10_fast.layers import norms_of, whitening_buffers
from large_batch_cifar_10_fast.optim import NesterovSGD
from large_batch_cifar_10_fast.recipe import TWO_VIEWS, make_network, reset, run_flop
from large_batch_cifar_10_fast.recipes import RECIPES, Apple2019, Basenet, FastAI, Muon2024, MuonRecipe, Page
from large_batch_cifar_10_fast.train import make_model

SEED = 11


def check_run(recipe, reference, update, losses, reduce, images, steps, predict=None) -> nn.Module:
    """Compare scores and weights of a run to nine digits; return our network.

    `reference` has its parameters in our order, the whitening's frozen filters anywhere. `update` returns a new weight;
    it takes the name, the weight, its mean gradient over the workers, a state, at first zero, and the time in epochs.
    `losses` returns those of images, `reduce` a worker's loss. `steps` are a worker's images and their pixels in each
    step, by epoch. `predict` returns logits, also told whether the epoch is the last one; by default those of one view.
    """
    (model, data), reference, log = prepared(recipe, images), reference.double(), Recorder()
    reset(model.network, recipe, SEED)
    pairs = [*zip(filters_last(model.network), filters_last(reference), strict=True)]
    for ours, theirs in pairs:
        theirs.data.copy_(ours)
    train_prepared(model, data, SEED, log)

    state = {name: torch.zeros_like(w) for name, w in reference.named_parameters() if w.requires_grad}
    seen = torch.full((len(images.train_images),), torch.inf)  # each image's latest loss
    test, labels = normalised(images.test_images).permute(0, 3, 1, 2), torch.from_numpy(images.test_labels)
    for epoch, sizes in enumerate(steps, 1):
        right, total, now = 0, 0, epoch - 1
        data.train.losses.copy_(seen)
        for sample, (size, pixels) in zip(data.train.epoch(SEED, epoch), sizes, strict=True):
            [(x, y)], now = sample.micro_batches(), now + 1 / len(sizes)
            assert x.shape == (size * recipe.workers, 3, pixels, pixels)
            assert x.is_contiguous(memory_format=torch.channels_last)
            gradients = dict.fromkeys(state, 0)
            for mine in torch.arange(len(y)).split(size):
                replica = reference if mine[0] == 0 else copy.deepcopy(reference)  # whose statistics are thrown away
                logits = replica(x[mine].contiguous())
                found = losses(logits, y[mine])
                of_worker = torch.autograd.grad(reduce(found), [replica.get_parameter(name) for name in state])
                for name, gradient in zip(state, of_worker, strict=True):
                    gradients[name] += gradient / recipe.workers
                seen[sample.indices[mine]] = found.detach().float()
                right += (logits.argmax(1) == y[mine]).sum()
                total += found.sum().item()
            for name, gradient in gradients.items():
                weight = reference.get_parameter(name).data
                weight.copy_(update(name, weight, gradient, state[name], now))
        reference.eval()
        with torch.no_grad():
            logits = predict(reference, test, epoch == len(steps)) if predict else reference(test)
        reference.train()
        score = log.scores[epoch - 1][1]
        assert (score.correct, score.images) == ((logits.argmax(1) == labels).sum(), len(labels))
        assert score.loss == pytest.approx(losses(logits, labels).mean().item(), rel=1e-9)
    score = log.scores[-1][0]
    assert (score.correct, score.images) == (right, sum(size for size, _ in sizes) * recipe.workers)
    assert score.loss == pytest.approx(total / score.images, rel=1e-9)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    return model.network


def filters_last(network: nn.Module) -> list[torch.Tensor]:
    """All weights, with the filters of the whitening at the end: buffers of ours, frozen parameters of a reference."""
    weights = sorted(network.parameters(), key=lambda weight: not weight.requires_grad)
    return [*weights, *whitening_buffers(network)]


def normalised(images: np.ndarray) -> torch.Tensor:
    mean, std = np.array([125.31, 122.95, 113.87]), np.array([62.99, 62.09, 66.70])
    return torch.from_numpy((images - mean) / std)


def check_whitening(filters: torch.Tensor, images: np.ndarray, epsilon: float) -> None:
    """Compare with scaled eigenvectors, whose sign is anyone's."""
    size = filters.shape[-1]
    patches = F.unfold(normalised(images).permute(0, 3, 1, 2), size).transpose(1, 2).flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    expected = torch.from_numpy((vectors / np.sqrt(values + epsilon)).T[::-1].copy()).view(filters.shape)
    signs = (filters * expected).sum((1, 2, 3)).sign().view(-1, 1, 1, 1)
    torch.testing.assert_close(filters, signs * expected, rtol=1e-7, atol=1e-9)


def test_averaged_statistics_are_the_mean_of_those_of_all_groups():
    """Training is as with the first group's; minimal/apple2019.py is the reference of that."""
    images, sizes = Images("shapes", *draw_shapes(8 * 16 * 3, 40)), {"width": 3, "batch_size": 16, "ghost_batch": 8}
    networks, scores = {}, {}
    for name in ("first", "average"):
        model, data = prepared(Apple2019(eval_stats=name, epochs=2, ema_ep=0.3, **sizes), images)
        train_prepared(model, data, SEED, log := Recorder())
        networks[name], scores[name] = model.network, log.scores[-1][1]
    first, average = (norms_of(networks[name]) for name in ("first", "average"))
    for one, every in zip(first, average, strict=True):
        assert torch.equal(one.bias, every.bias)
        assert torch.equal(one.running_mean, every.running_mean[:1])
        assert (len(every.running_mean), len(every.running_var)) == (2, 2)
        one.running_mean.copy_(every.running_mean.mean(0))
        one.running_var.copy_((every.running_var[0] + every.running_var[1]) / 2)
    first_model, data = prepared(Apple2019(eval_stats="first", **sizes), images)
    first_model.network.load_state_dict(networks["first"].state_dict())
    score = evaluate(first_model, TWO_VIEWS, data.test)
    assert score.loss == pytest.approx(scores["average"].loss, rel=1e-12)
    assert score.loss != scores["first"].loss


@pytest.mark.parametrize(("batch_size", "ghost_batch"), [(256, 16), (512, 32), (64, 4)])
def test_a_batch_is_sixteen_ghost_groups_unless_told_otherwise(batch_size, ghost_batch):
    assert Apple2019(batch_size=batch_size).ghost_batch == ghost_batch
    assert {norm.ghost_batch for norm in norms_of(Apple2019(batch_size=batch_size, width=4).network())} == {ghost_batch}
    assert Apple2019(batch_size=batch_size, ghost_batch=8).ghost_batch == 8


def test_building_a_network_leaves_the_global_random_stream_alone():
    before = torch.get_rng_state()
    make_network(Apple2019(width=4), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


BATCH, SHARD = 4, 10
MEAN, MAX = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)


class Block(nn.Module):
    """As the issue of each system says it, `identity` being `raw` or `activated`."""

    def __init__(self, c_in, c_out, stride, identity):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        self.from_activated = not same or identity == "activated"

    def forward(self, x):
        a = self.norm1(x).relu()
        y = self.conv2(self.norm2(self.conv1(a)).relu())
        return y + self.shortcut(a if self.from_activated else x)


class Pools(nn.ModuleList):
    def forward(self, x):
        return torch.cat([pool(x).flatten(1) for pool in self], 1)


def stock_resnet18(w, identity, surplus_norm, pools):
    shapes = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1)]
    shapes += [(2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    blocks = [nn.BatchNorm2d(w), nn.ReLU()] * surplus_norm + [Block(*shape, identity) for shape in shapes]
    return nn.Sequential(nn.Conv2d(3, w, 3, padding=1, bias=False), *blocks, Pools(pools), nn.Linear(8 * w, 10))


def stock_wide_resnet(w):
    a, b, c = 6 * w, 12 * w, 24 * w
    shapes = [(w, a, 1), (a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 1)]
    blocks = [*(Block(*shape, "raw") for shape in shapes), nn.BatchNorm2d(c), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, w, 3, padding=1, bias=False), *blocks, Pools([MEAN]), nn.Linear(c, 10))


def torch_nesterov(name, w, g, v, epoch):
    g = g + 5e-4 * w
    v[:] = 0.9 * v + g
    return w - 0.1 * epoch / 15 * (g + 0.9 * v)


def page_nesterov(name, w, g, v, epoch):
    d = -(0.1 * epoch / 15 / BATCH) * (g + 5e-4 * BATCH * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def one_cycle(rate, slope, decay, up):
    def update(name, w, g, v, epoch):
        v[:] = (0.95 - 0.1 * epoch / up) * v + g + decay * w
        return w - (rate + slope * epoch) * v

    return update


PAGES_START = stock_resnet18(16, "activated", True, [MAX, MEAN])
ONE_GPU = one_cycle(0.075, 1.425 / 12, 1e-4, 12)
SYSTEMS = {
    "basenet": (Basenet, {"width": 16}, torch.mean, stock_resnet18(16, "raw", True, [MEAN, MAX]), torch_nesterov),
    "page": (Page, {"width": 16}, torch.sum, stock_resnet18(16, "activated", False, [MAX, MEAN]), page_nesterov),
    "page's start": (Page, {"width": 16, "starting_point": True}, torch.sum, PAGES_START, page_nesterov),
    "fastai": (FastAI, {"width": 3}, torch.mean, stock_wide_resnet(3), one_cycle(0.04, 1.96 / 17.5, 2e-4, 17.5)),
    "fastai, one GPU": (FastAI, {"width": 3, "entry": "one_gpu"}, torch.mean, stock_wide_resnet(3), ONE_GPU),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(system):
    """Two epochs of two full batches and a short one."""
    kind, options, reduce, reference, update = SYSTEMS[system]
    recipe = kind(epochs=2, batch_size=BATCH, **options)
    images = Images("shapes", *draw_shapes(SHARD * recipe.workers + recipe.workers // 2, 40))
    losses, steps = partial(F.cross_entropy, reduction="none"), 2 * [[(4, 32), (4, 32), (2, 32)]]
    check_run(recipe, reference, update, losses, reduce, images, steps)


SCHEDULES = {  # of the first group of parameters: known values by epoch
    "apple2019": (Apple2019(), "lr", {1 / 24: 1 / 57.6, 1.8: 0.75, 3.6: 1.5, 9.8: 0.825, 16: 0.15, 18: 0.15}),
    "basenet": (Basenet(), "lr", {7.5: 0.05, 14.7: 0.098, 15: 0.105, 20: 0.215 / 3, 30: 0.005, 32.5: 0.0025, 36: 5e-4}),
    "page": (Page(), "lr", {0: 0, 7.5: 0.05, 15: 0.1, 22.5: 0.0525, 30: 0.005, 35: 0}),
    "page's start": (Page(starting_point=True), "lr", {7.5: 0.05, 15: 0.105, 22.5: 0.055, 32.5: 0.0025}),
    "fastai": (FastAI(), "lr", {0: 0.04, 8.75: 1.02, 17.5: 2.0, 26.25: 1.02, 35: 0.04, 37.5: 0.0202, 40: 0.0004}),
    "fastai's momentum": (FastAI(), "momentum", {0: 0.95, 8.75: 0.9, 17.5: 0.85, 26.25: 0.9, 35: 0.95, 40: 0.95}),
    "fastai, one GPU": (FastAI(entry="one_gpu"), "lr", {0: 0.075, 6: 0.7875, 12: 1.5, 24: 0.075, 30: 0.00075}),
    "muon2024": (Muon2024(), "lr", {1 / 25: 0.24, 26 / 25: 0.21, 101 / 25: 0.12, 201 / 25: 0}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_their_known_answers(name):
    recipe, option, known = SCHEDULES[name]
    optimizer = recipe.optimizers(recipe.network(), ALONE)[0]
    divisor = recipe.batch_size if isinstance(optimizer, NesterovSGD) else 1  # for the summed loss
    schedule = optimizer.param_groups[0]["schedules"][option]
    assert {epoch: divisor * schedule(epoch) for epoch in known} == pytest.approx(known, rel=1e-9, abs=1e-12)


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


def test_in_fp16_norms_losses_and_fast_ais_weights_are_float32():
    kinds = [(Apple2019(width=4), torch.float16), (Page(width=16), torch.float16), (FastAI(width=3), torch.float32)]
    for recipe, dtype in kinds:
        network = make_model(recipe, ALONE, "fp16").network
        of_norms = {*nn.ModuleList(norms_of(network)).parameters()}
        assert {weight.dtype for weight in network.parameters() if weight not in of_norms} == {dtype}
        assert {tensor.dtype for tensor in (*of_norms, norms_of(network)[0].running_var)} == {torch.float32}
        assert recipe.loss(torch.zeros(1, 10).half(), torch.tensor([0])).dtype == torch.float32
    assert (FastAI().loss_scale, Page().loss_scale, Basenet().loss_scale) == (512, 1, 1)


MUON = MuonRecipe(width=8, batch_size=20)
HALVES = [
    *((Basenet(width=16, batch_size=8), "bf16", 0.4), (Page(width=16, batch_size=8), "bf16", 0.4)),
    *((FastAI(width=3, batch_size=8), "bf16", 0.4), (MUON, "bf16", 0.8), (MUON, "fp16", 0.8)),
]


@pytest.mark.parametrize(("recipe", "precision", "least"), HALVES, ids=lambda value: getattr(value, "name", None))
def test_in_half_precision_gradients_point_where_those_of_float64_do(recipe, precision, least):
    """Float32 weights; on few images, at once through up to 22 layers. In fp16 nothing is too small for Muon."""
    found = {}
    for name in (precision, "fp64"):
        model = make_model(recipe, ALONE, name)
        images = noise(recipe.batch_size, recipe.stages[0].resolution, model)
        labels = torch.zeros(len(images), dtype=torch.int64)  # all equal, so that gradients add up
        found[name] = results_of_pass(model.network, model.forward, images, labels)
    for name, expected in found["fp64"].items():
        if not name.startswith("gradient"):
            continue
        assert found[precision][name].dtype == torch.float32
        cosine = F.cosine_similarity(found[precision][name].double().flatten(), expected.flatten(), dim=0)
        assert least < cosine < 1 - 1e-9, name


def test_the_table_in_the_documents_is_counted_on_the_recipes():
    cells = [line.strip("| ").split(" | ") for line in (REPO / "docs" / "recipes.md").read_text().splitlines()]
    rows = {row[0].strip("`"): row for row in cells if len(row) == 11 and row[0].startswith("`")}
    assert {name.split()[0] for name in rows} == RECIPES.keys()
    for name, (_, _, parameters, multiply_adds, batches, epochs, rate, pflop, *_) in rows.items():
        _, recipe = parse(["--recipe", *name.split()])
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
