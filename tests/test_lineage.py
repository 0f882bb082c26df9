"""The systems of 2018: their sizes, their schedules, and their training against stock layers in float64."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder, train_here
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import lineage
from large_batch_cifar_10_fast.images.sources import Images
from large_batch_cifar_10_fast.images.synthetic import draw_shapes
from large_batch_cifar_10_fast.measuring import ladder
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.request.command_line import RECIPES, read_request
from large_batch_cifar_10_fast.results.clock import Clock
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings
from large_batch_cifar_10_fast.train import make_learner, prepare, train_once
from large_batch_cifar_10_fast.training.compiling import gradients, noise
from large_batch_cifar_10_fast.training.networks import autocast, weight_dtype, work
from large_batch_cifar_10_fast.training.norm import norms_of
from large_batch_cifar_10_fast.training.shards import MEAN, STD, normalise, upload_shards
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, 1)
BATCH, SHARD, EPOCHS, SEED = 4, 10, 2, 5


@pytest.mark.parametrize(
    ("recipe", "parameters", "multiply_adds", "pflop"),
    [
        (Basenet(), 5_205_962, 0.460, 5.51),
        (Page(), 5_205_834, 0.460, 4.82),
        (Page(starting_point=True), 5_205_962, 0.460, 4.82),
        (FastAI(), 9_658_458, 1.385, 16.61),
        (FastAI(entry="one_gpu"), 9_658_458, 1.385, 12.46),
    ],
)
def test_parameters_and_work_are_the_published_ones(recipe, parameters, multiply_adds, pflop):
    assert sum(weight.numel() for weight in recipe.network().parameters()) == parameters
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        recipe.network().eval()(torch.empty(1, 3, 32, 32))
    assert counter.get_total_flops() / 2e9 == pytest.approx(multiply_adds, abs=5e-4)
    assert work(recipe, 50_000) / 1e15 == pytest.approx(pflop, abs=5e-3)


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


@pytest.mark.parametrize(
    ("recipe", "decay", "nesterov"),
    [(Basenet(), 5e-4, True), (FastAI(), 2e-4, False), (FastAI(entry="one_gpu"), 1e-4, False)],
)
def test_torchs_sgd_decays_every_weight(recipe, decay, nesterov):
    network = recipe.network()
    (group,) = recipe.optimizers(network, ALONE)[0].param_groups
    assert (group["weight_decay"], group["nesterov"]) == (decay, nesterov)
    assert len(group["params"]) == len(list(network.parameters()))


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


class Stock(nn.Module):
    """A network of stock layers, made in the order of ours, so that weights can be copied one by one."""

    def __init__(self, first, blocks, tail, pools, features):
        super().__init__()
        self.first, self.blocks, self.tail, self.pools = first, blocks, tail, pools
        self.linear = nn.Linear(features, 10)

    def forward(self, x):
        x = self.tail(self.blocks(self.first(x)))
        return self.linear(torch.cat([pool(x) for pool in self.pools], 1))


def mean(x):
    return x.mean((2, 3))


def maximum(x):
    return x.amax((2, 3))


def stock_resnet18(w, identity, surplus_norm, pools):
    first = [nn.Conv2d(3, w, 3, padding=1, bias=False)] + [nn.BatchNorm2d(w), nn.ReLU()] * surplus_norm
    shapes = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1)]
    shapes += [(2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    blocks = nn.Sequential(*[Block(*shape, identity) for shape in shapes])
    return Stock(nn.Sequential(*first), blocks, nn.Identity(), pools, 8 * w)


def stock_wide_resnet(w):
    a, b, c = 6 * w, 12 * w, 24 * w
    shapes = [(w, a, 1), (a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, b, 1), (b, c, 2), (c, c, 1), (c, c, 1)]
    blocks = nn.Sequential(*[Block(*shape, "raw") for shape in shapes])
    tail = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU())
    return Stock(nn.Conv2d(3, w, 3, padding=1, bias=False), blocks, tail, [mean], c)


def torch_nesterov(w, g, v, epoch):
    g = g + 5e-4 * w
    v[:] = 0.9 * v + g
    return w - 0.1 * epoch / 15 * (g + 0.9 * v)


def page_nesterov(w, g, v, epoch):
    d = -(0.1 * epoch / 15 / BATCH) * (g + 5e-4 * BATCH * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def one_cycle(rate, slope, decay, up):
    def update(w, g, v, epoch):
        v[:] = (0.95 - 0.1 * epoch / up) * v + g + decay * w
        return w - (rate + slope * epoch) * v

    return update


SYSTEMS = {
    "basenet": (Basenet, {"width": 8}, "mean", stock_resnet18(8, "raw", True, [mean, maximum]), torch_nesterov),
    "page": (Page, {"width": 8}, "sum", stock_resnet18(8, "activated", False, [maximum, mean]), page_nesterov),
    "page's start": (
        Page,
        {"width": 8, "starting_point": True},
        "sum",
        stock_resnet18(8, "activated", True, [maximum, mean]),
        page_nesterov,
    ),
    "fastai": (FastAI, {"width": 2}, "mean", stock_wide_resnet(2), one_cycle(0.04, 1.96 / 17.5, 2e-4, 17.5)),
    "fastai, one GPU": (
        FastAI,
        {"width": 2, "entry": "one_gpu"},
        "mean",
        stock_wide_resnet(2),
        one_cycle(0.075, 1.425 / 12, 1e-4, 12),
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(system):
    """Two epochs of two full batches and a short one, every worker's own, and an evaluation after each."""
    kind, options, reduction, reference, update = SYSTEMS[system]
    recipe = kind(epochs=EPOCHS, batch_size=BATCH, **options)
    world = World(0, 1, CPU, recipe.workers)
    images = Images("shapes", *draw_shapes(SHARD * recipe.workers + recipe.workers // 2, 40))
    learner = make_learner(Settings(precision="fp64", seed=SEED), recipe, world)
    data, log = prepare(images, learner, Clock(world.synchronize)), Recorder()
    reference = copy.deepcopy(reference).double()
    weights = list(reference.parameters())
    with torch.no_grad():
        for ours, theirs in zip(learner.network.parameters(), weights, strict=True):
            theirs.copy_(ours)
    train_once(0, learner, data, Clock(world.synchronize), log)

    velocities, step = [torch.zeros_like(w) for w in weights], 0
    for epoch in range(1, EPOCHS + 1):
        reference.train()
        sizes = []
        right = total = 0
        for ((x, y),) in data.train.epoch(SEED, epoch):
            step += 1
            sizes.append(len(y) // recipe.workers)
            gradients = [torch.zeros_like(w) for w in weights]
            for worker in range(recipe.workers):
                mine = slice(worker * sizes[-1], (worker + 1) * sizes[-1])
                replica = reference if worker == 0 else copy.deepcopy(reference)  # whose statistics are thrown away
                logits = replica(x[mine])
                loss = F.cross_entropy(logits, y[mine], reduction=reduction)
                grads = torch.autograd.grad(loss, list(replica.parameters()))
                gradients = [a + b / recipe.workers for a, b in zip(gradients, grads, strict=True)]
                right += (logits.argmax(1) == y[mine]).sum().item()
                total += F.cross_entropy(logits, y[mine], reduction="sum").item()
            with torch.no_grad():
                for w, g, v in zip(weights, gradients, velocities, strict=True):
                    w.copy_(update(w, g, v, step / 3))
        assert sizes == [4, 4, 2]
        with torch.no_grad():
            logits = reference.eval()(data.test[0].permute(0, 3, 1, 2))
        score = log.validations[epoch - 1]
        assert score.correct == (logits.argmax(1) == data.test[1]).sum()
        assert score.loss == pytest.approx(F.cross_entropy(logits, data.test[1]).item(), rel=1e-9)
    for ours, theirs in zip(learner.network.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert (log.train.correct, log.train.images) == (right, 10 * recipe.workers)
    assert log.train.loss == pytest.approx(total / (10 * recipe.workers), rel=1e-9)


def test_fast_ai_keeps_float32_weights_in_fp16_and_the_others_do_not():
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


SMALL = {
    "basenet": ["--width", 8, "--batch_size", 64],
    "page": ["--width", 8, "--batch_size", 64],
    "fastai": ["--width", 2, "--batch_size", 16],
}


@pytest.mark.parametrize("recipe", SMALL)
def test_a_small_version_trains_every_image_in_every_epoch(recipe, tiny_npz, tmp_path, capsys):
    arguments = ["--recipe", recipe, *SMALL[recipe], "--epochs", 1, "--data", tiny_npz, "--out", tmp_path]
    train_here(*arguments, "--no_warmup", "--no_compile")
    assert capsys.readouterr().err == ""
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    images = 643 // row["workers"] * row["workers"]
    assert row["train_accuracy"] * images == pytest.approx(round(row["train_accuracy"] * images))
    assert row["train_loss"] == pytest.approx(2.3, abs=0.2)  # log 10: the first epoch's rate is hardly above 0
    assert 0 < row["validation_loss"] < 5


@pytest.mark.parametrize("kind", [Basenet, Page, FastAI])
def test_in_bf16_gradients_point_where_those_of_float64_do(kind):
    recipe, world = kind(batch_size=8, width=8 if kind is not FastAI else 2), ALONE
    found = {}
    for precision in ("bf16", "fp64"):
        learner = make_learner(Settings(precision=precision, seed=3), recipe, world)
        batch = noise(8, 32, weight_dtype(recipe, precision), world)
        found[precision] = gradients(learner.network, learner.forward, recipe, batch, precision)
    for name, expected in found["fp64"].items():
        assert found["bf16"][name].dtype == torch.float32
        cosine = F.cosine_similarity(found["bf16"][name].double().flatten(), expected.flatten(), dim=0)
        assert 0.4 < cosine < 1 - 1e-9, name  # on eight images, at once through up to 22 layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "basenet", "--ghost_batch", "16"], "recipe basenet has no option --ghost_batch"),
        (["--recipe", "basenet", "--epochs", "41"], "--epochs 41 must lie in 1 to 40: the schedule has no more"),
        (["--recipe", "fastai", "--entry", "one_gpu", "--epochs", "31"], "--epochs 31 must lie in 1 to 30"),
        (["--recipe", "fastai", "--entry", "two_gpus"], "invalid choice: 'two_gpus'"),
        (["--recipe", "page", "--width", "4"], "--width 4 must lie in 8 to inf: with less than 8 channels"),
        (["--recipe", "page", "--batch_size", "0"], "--batch_size 0 must be greater than 0"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused(arguments, message):
    with pytest.raises(Refusal, match=message):
        read_request(arguments, {})


def test_the_table_of_the_lineage_tells_every_recipe_and_its_work(tmp_path, capsys):
    lineage.main(["--picture", str(tmp_path / "p.svg")])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0].strip("`").split()[0] for row in rows} == RECIPES.keys()
    assert ["`basenet`", "5,205,962", "1 x 128", "40", "5.51", "340.6", "1 V100"] in [row[:7] for row in rows]
    apple = next(row for row in rows if row[0] == "`apple2019`")
    assert apple[4] == "2.01"
    assert "work of a run, PFLOP" in (tmp_path / "p.svg").read_text()


def _ladder(images, labels):
    shards = upload_shards(images, labels, Page(batch_size=16), ALONE, 1)
    return ladder.rungs(images, labels, replace(shards, images=normalise(shards.images, torch.float32)), 1)


@pytest.mark.slow
def test_every_rung_of_the_ladder_hands_over_every_image_cut_and_mirrored():
    """Images that differ in one grey each: what is handed over can be told by it."""
    greys = np.arange(40) * 6
    images = np.broadcast_to(greys[:, None, None, None], (40, 32, 32, 3)).astype(np.uint8).copy()
    for rung in _ladder(images, np.arange(40) % 10):
        batches = list(rung.epoch())
        assert [len(labels) for _, labels in batches] == [16, 16, 8], rung.name
        pixels = torch.cat([batch[:, 0, 5, 5] for batch, _ in batches]) * STD[0] + MEAN[0]
        numbers = (pixels / 6).round().long()
        assert sorted(numbers.tolist()) == list(range(40)), rung.name
        assert torch.equal(numbers % 10, torch.cat([labels for _, labels in batches])), rung.name


def test_crops_by_hand_are_those_of_the_padded_image():
    image = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)), mode="reflect")
    dataset = ladder.Prepared(image, np.array([3]), in_bulk=True)
    dataset.choices = [[2, 7, 1]]
    crop, label = dataset[0]
    expected = (padded[2:34, 7:39][:, ::-1] - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(crop.permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert label == 3


def test_a_rung_is_timed_to_its_end_or_at_the_pace_seen(monkeypatch):
    """Three seconds to start, one a batch."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def epoch():
        now[0] += 3
        yield from range(10)

    def work(batch):
        now[0] += 1

    rung, world = ladder.Rung("", None, epoch), ALONE
    assert ladder.seconds_of_an_epoch(rung, work, 10, 10, world) == 13
    assert ladder.seconds_of_an_epoch(rung, work, 4, 10, world) == 13
