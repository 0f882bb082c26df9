"""Programs against stock layers and plain formulas, in float64; the documents' table; initial weights; half precision.

Shared with a program are its initial weights, each image's crop and side, and fastai's augmentation (test_batches.py).
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import fastai, muon, page
from large_batch_cifar_10_fast.core.data import Images
from large_batch_cifar_10_fast.core.layers import ghost_norms
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.precision import Precision, move
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.program import PROGRAMS, load_program, read_command

SEED = 11
MEAN, STD = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)


def hyp_of(command):
    program = load_program(command.split()[0])
    return program, read_command(program, ["--recipe", *command.split()])[2]


def trained_by(command, arrays, precision="fp64", **how):
    """Train on a few images. Return what the run yields."""
    program, hyp = hyp_of(command)
    machine = Machine(ALONE, precision, **how)
    return [*program.train(hyp, Images("few", *arrays, [], (MEAN, STD)), machine)(SEED)]


def as_input(images):
    """Return images uint8 [n, 32, 32, 3] as normalized ones [n, 3, 32, 32]."""
    return torch.from_numpy((images - np.array(MEAN)) / STD).permute(0, 3, 1, 2)


def crops_of(images, batch):
    """Pad by reflection, cut, then mirror: images uint8 [n, 32, 32, 3] and a batch of rows, crops and flips."""
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect")
    found = []
    for row, crop, flip in batch.T.tolist():
        y, x = divmod(crop, 9)
        cut = padded[row, y : y + 32, x : x + 32]
        found.append(cut[:, ::-1] if flip else cut)
    return as_input(np.stack(found))


def initial_weights(program, hyp):
    torch.manual_seed(SEED)
    return {name: weight.detach() for name, weight in trained_weights(program.Network(hyp, 10)).items()}


def trained_weights(network):
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def losses_of(logits, labels, smoothing):
    """Return the cross-entropy of each image; a part of its label is spread over all classes."""
    log_p = logits - logits.logsumexp(1, keepdim=True)
    return (smoothing - 1) * log_p[torch.arange(len(labels)), labels] - smoothing * log_p.mean(1)


def check_run(command, arrays, epochs, network, update, reduce, batches, momenta, smoothing=0.0, evaluate=None):
    """Compare scores of all epochs and final weights with those of a stock `network` to nine digits.

    A step's images are computed in parts, those of a worker or a norm's group, for each of which `momenta` has the
    weight of its statistics. `update` gets the mean gradient over the workers, a state, at first 0, and the epochs so
    far; `batches` gets each image's latest loss, and returns rows and images of each step. `evaluate` gets network,
    images, and whether this is the last epoch. In training, a network may return logits [members, B, 10].
    """
    program, hyp = hyp_of(command)
    initial = initial_weights(program, hyp)
    trained = trained_weights(network.double())
    for weight, value in zip(trained.values(), initial.values(), strict=True):  # in the program's order
        weight.data.copy_(value)
    states = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    _, labels, test_images, test_labels = arrays
    labels, test_labels = torch.from_numpy(labels), torch.from_numpy(test_labels)
    latest_losses = torch.full(labels.shape, torch.inf)
    assert len(epochs) == hyp.epochs
    for number, epoch in enumerate(epochs, 1):
        seen = []
        steps = batches(number, latest_losses)
        for step, (rows, images) in enumerate(steps, 1):
            for part, momentum in zip(torch.arange(len(rows)).chunk(len(momenta)), momenta, strict=True):
                for norm in norms:
                    norm.momentum = momentum
                made = network(images[part])
                of_members = made if made.ndim == 3 else made[None]
                targets = labels[rows[part]]
                each = torch.stack([losses_of(logits, targets, smoothing) for logits in of_members])
                (reduce(each) / hyp.workers).backward()
                losses = each.detach().mean(0)
                seen.append((of_members.detach().mean(0), targets, losses))
                latest_losses[rows[part]] = losses.float()
            for name, weight in trained.items():
                now = number - 1 + step / len(steps)
                weight.data.copy_(update(name, weight.data, weight.grad, states[name], now))
            network.zero_grad()
        network.eval()
        with torch.no_grad():
            x = as_input(test_images)
            logits = evaluate(network, x, number == hyp.epochs) if evaluate else network(x)
        network.train()
        tested = logits, test_labels, losses_of(logits, test_labels, smoothing)
        for score, parts in ((epoch.train, seen), (epoch.validation, [tested])):
            logits, targets, losses = map(torch.cat, zip(*parts, strict=True))
            assert (score.correct, score.images) == ((logits.argmax(1) == targets).sum(), len(targets))
            assert score.loss == pytest.approx(losses.mean().item(), rel=1e-9)
    weights = epochs[-1].network.state_dict()
    for name, weight in zip(initial, trained.values(), strict=True):
        assert_close(weights[name], weight.data, rtol=1e-9, atol=1e-11)


convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride, by_page) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(c_in)
        last = [nn.BatchNorm2d(c_out), nn.ReLU(), convolution(c_out, c_out)]
        self.branch = nn.Sequential(convolution(c_in, c_out, stride=stride), *last)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        self.from_activated = by_page or not same

    def forward(self, x):
        activated = self.norm(x).relu()
        return self.branch(activated) + self.shortcut(activated if self.from_activated else x)


class Pools(nn.ModuleList):
    def forward(self, x):
        return torch.cat([pool(x).flatten(1) for pool in self], 1)


def blocks(c_in, c_out, strides, by_page):
    return [Block(*shape, by_page) for shape in zip([c_in, *c_out], c_out, strides, strict=False)]


def resnet18(by_page, first_norm):
    first = [nn.BatchNorm2d(16), nn.ReLU()] if first_norm else []
    inner = blocks(16, [16, 16, 32, 32, 64, 64, 64, 64], [1, 1, 2, 1, 2, 1, 2, 1], by_page)
    pools = [nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)]
    both = Pools(pools[::-1] if by_page else pools)
    return nn.Sequential(convolution(3, 16), *first, *inner, both, nn.Linear(128, 10))


def wide_resnet():
    inner = blocks(3, 3 * [18] + 3 * [36] + 3 * [72], [1, 1, 1, 2, 1, 1, 2, 1, 1], by_page=False)
    tail = [nn.BatchNorm2d(72), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(72, 10)]
    return nn.Sequential(convolution(3, 3), *inner, *tail)


def torch_nesterov(name, w, g, v, epoch):
    g = g + 5e-4 * w
    v[:] = 0.9 * v + g
    return w - 0.1 * epoch / 15 * (g + 0.9 * v)


def page_nesterov(name, w, g, v, epoch):
    d = -(0.1 * epoch / 15 / 4) * (g + 5e-4 * 4 * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def one_cycle(first, peak, at, decay, name, w, g, v, epoch):
    v[:] = (0.95 - 0.1 * epoch / at) * v + g + decay * w
    return w - (first + (peak - first) * epoch / at) * v


RUNS = {
    "basenet --width 16": (1, resnet18(False, True), torch.mean, torch_nesterov),
    "page --width 16": (1, resnet18(True, False), torch.sum, page_nesterov),
    "fastai --width 3": (8, wide_resnet(), torch.mean, partial(one_cycle, 0.04, 2.0, 17.5, 2e-4)),
    "fastai --width 3 --entry one_gpu": (1, wide_resnet(), torch.mean, partial(one_cycle, 0.075, 1.5, 12, 1e-4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_whole_run_equals_stock_layers_and_plain_formulas_to_nine_digits(command):
    """Two epochs of two full batches and a short one."""
    workers, network, reduce, update = RUNS[command]
    size = 4 if workers == 1 else 2
    command += f" --epochs 2 --batch_size {size}"
    program, hyp = hyp_of(command)
    arrays = draw_shapes(5 * size // 2 * workers + workers // 2, 40)  # the last few are not of all workers
    images, labels = arrays[:2]

    def batches(epoch, latest_losses):
        if program is page:
            steps = page.plan_epoch(hyp, len(images), CPU, SEED, epoch)
            made = [(batch[0], crops_of(images, batch)) for batch in steps]
        else:
            steps = fastai.plan_epoch(hyp, len(images), Team(0, 1, CPU, workers), SEED, epoch)
            normalized = as_input(images).permute(0, 2, 3, 1)
            make_batch = partial(fastai.make_batch, normalized, torch.from_numpy(labels))
            made = [(batch[0].long(), make_batch(batch, (MEAN, STD))[0]) for batch in steps]
        assert [len(rows) for rows, _ in made] == [size * workers, size * workers, size // 2 * workers]
        return made

    momenta = [0.1] + (workers - 1) * [0.0]  # only worker 0's statistics count
    check_run(command, arrays, trained_by(command, arrays), network, update, reduce, batches, momenta)


def cycle(hyp, epoch):
    optimizer = fastai.make_optimizer(hyp, nn.Linear(1, 1), ALONE)
    fastai.follow_cycle(hyp, optimizer, epoch)
    return optimizer.param_groups[0]


def rate(program, hyp, epoch):
    """Return the rate for the mean of a batch's losses. Muon takes any multiple."""
    if program is fastai:
        return cycle(hyp, epoch)["lr"]
    if program is muon:
        optimizers = muon.make_optimizers(hyp, muon.Network(replace(hyp, width=2), 10), ALONE)
        muon.set_rates(hyp, optimizers, epoch + hyp.images_of_step / 50_000)  # the end of a step that begins at `epoch`
        return optimizers[0].param_groups[0]["lr"]
    return program.learning_rate(hyp, epoch) * (1 if type(hyp) is page.Basenet else hyp.actual_batch_size)


def test_fastais_momentum_falls_while_its_rate_rises():
    known = {8.75: 0.9, 17.5: 0.85, 26.25: 0.9, 35: 0.95, 40: 0.95}
    assert {epoch: cycle(fastai.Hyp(), epoch)["momentum"] for epoch in known} == pytest.approx(known)


@pytest.mark.slow
def test_the_table_in_the_documents_is_counted_on_the_programs():
    cells = [line.strip("| ").split(" | ") for line in (REPO / "docs" / "recipes.md").read_text().splitlines()]
    rows = {row[0].strip("`"): row for row in cells if len(row) == 11 and row[0].startswith("`")}
    assert {command.split()[0] for command in rows} == PROGRAMS.keys()
    for command, (_, _, parameters, multiply_adds, batches, epochs, rates, pflop, *_) in rows.items():
        program, hyp = hyp_of(command)
        network = program.Network(hyp, 10).eval()
        assert f"{sum(weight.numel() for weight in network.parameters() if weight.requires_grad):,}" == parameters
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.zeros(1, 3, 32, 32))
        assert f"{counter.get_total_flops() / 2e9:.3f}" == multiply_adds
        assert (f"{hyp.workers} x {hyp.actual_batch_size}", str(hyp.actual_epochs)) == (batches, epochs)
        # Of `0 → 0.1 (15), 0.105 → 0.005 (30)` the first value is that at 0, and another at 15.
        text = re.sub(r"(\([\d.]+\)), ([\d.]+)", r"\1 \2 \1", rates.replace(" ", " (0) ", 1))
        values, knots = np.array(re.findall(r"([\d.]+) \(([\d.]+)\)", text), dtype=float).T
        for epoch in np.linspace(0.001, hyp.epochs - 0.001, 50):
            assert rate(program, hyp, epoch) == pytest.approx(np.interp(epoch, knots, values))
        assert f"{hyp.flop(program.Network(hyp, 10), 50_000) / 1e15:.2f}" == pflop


def test_weights_start_as_their_authors_state():
    torch.manual_seed(0)
    for hyp in (page.Basenet(), page.Hyp()):
        scales = torch.cat([norm.weight.detach() for norm in ghost_norms(page.Network(hyp, 10))])
        assert (scales.histc(10, 0, 1) / len(scales)).tolist() == pytest.approx(10 * [0.1], rel=0.2)
    network = fastai.Network(fastai.Hyp(), 10)
    assert all((norm.weight == 1).all() for norm in ghost_norms(network))
    assert (network.linear.bias == 0).all()
    for weight in network.parameters():
        if weight.ndim == 4:
            assert weight.std().item() == pytest.approx((2 / weight[:, 0].numel()) ** 0.5, rel=0.1)
    network = muon.Network(muon.Hyp(), 10)
    assert torch.equal(network.members[0].groups[0][0].weight[:24, :, 1, 1], torch.eye(24))
    assert network.members[0].linear.weight.std().item() == pytest.approx(1)


IN_FP16 = {
    "apple2019 --workers 1 --ghost_batch 2 --width 4 --ema_ep 0": torch.float16,
    "page --width 16": torch.float16,
    "fastai --entry one_gpu --width 3": torch.float32,
    "muon --width 4 --kept 1": torch.float32,
}


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_FP16)
def test_in_fp16_norms_and_the_weights_of_fastai_and_muon_are_float32(command):
    arrays = draw_shapes(4, 1)
    arrays[1][0] = 9  # of ten classes
    [epoch] = trained_by(command + " --epochs 1 --batch_size 4", arrays, "fp16", warm_up=False)
    for name, weight in epoch.network.state_dict().items():
        of_norm = "running" in name or (weight.ndim == 1 and name != "linear.bias")
        assert weight.dtype == (torch.float32 if of_norm else IN_FP16[command])


HALVES = [  # with the least cosine
    ("apple2019 --width 8 --batch_size 16 --ghost_batch 8", "bf16", 0.8),
    ("page --width 16 --batch_size 8", "bf16", 0.4),
    ("fastai --width 3 --batch_size 8", "bf16", 0.4),
    ("muon --width 8 --batch_size 20", "bf16", 0.8),
    ("muon --width 8 --batch_size 20", "fp16", 0.8),
]


@pytest.mark.parametrize(("command", "half", "least"), HALVES)
def test_in_half_precision_losses_are_float32_and_gradients_point_where_those_of_float64_do(command, half, least):
    program, hyp = hyp_of(command)
    gradients = {}
    for name in (half, "fp64"):
        precision = Precision(name, CPU, half_weights=False)
        torch.manual_seed(0)
        network = program.Network(hyp, 10)
        move(network, precision)
        images = torch.randn(hyp.actual_batch_size, 3, 32, 32).to(precision.images, memory_format=torch.channels_last)
        labels = torch.zeros(len(images)).long()  # all equal, so that gradients add up
        first = (hyp, network, precision, 1) if program is fastai else (hyp, network, precision)
        stage = [muon.stage_of(hyp, 1)] if program is muon else []
        loss = program.forward_pass(*first, images, labels, *stage).loss
        assert loss.dtype == (torch.float64 if name == "fp64" else torch.float32)
        loss.backward()
        gradients[name] = [weight.grad for weight in network.parameters() if weight.requires_grad]
    for found, expected in zip(gradients[half], gradients["fp64"], strict=True):
        assert least < F.cosine_similarity(found.double().flatten(), expected.flatten(), dim=0) < 1 - 1e-9
