"""page, basenet and fastai against stock layers and plain formulas, in float64; the documents' table; half precision.

Shared with them are initial weights, each image's crop and side, and fastai's augmentation (test_batches.py).
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO, run_here, write_npz_as_dealt
from test_apple2019 import MEAN, SEED, STD, Reference, cropped_and_mirrored, normalised, plan, smoothed
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import apple2019, fastai, muon, page
from large_batch_cifar_10_fast.core import fast
from large_batch_cifar_10_fast.core.layers import ghost_norms
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import log
from large_batch_cifar_10_fast.lab.program import PROGRAMS, flop_of, load_program, read_command, workers_of


def hyp_of(command):
    program = load_program(command.split()[0])
    return program, read_command(program, ["--recipe", *command.split()])[2]


def trained_by(command, arrays, folder):
    """Train on a few images, by default in fp64. Return the weights, and the rows of all epochs."""
    data = write_npz_as_dealt(folder / "few.npz", *arrays)
    how = ["--data", data, "--seed", SEED, "--precision", "fp64", "--save", folder / "w.pt", "--out", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("large_batch_cifar_10_fast.core.images.Images.normalization", (MEAN, STD))
        run_here(*how, "--recipe", *command.split())
    return torch.load(folder / "w.pt", weights_only=True)["weights"], pd.read_csv(folder / "epochs.tsv", sep="\t")


def initial_weights(program, hyp):
    torch.manual_seed(SEED)
    return {name: weight.detach() for name, weight in program.Network(hyp, 10).named_parameters()}


def set_weights(network, values):
    """Set a reference's trained weights, which are in the program's order. Return them by name."""
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    for weight, value in zip(trained.values(), values, strict=True):
        weight.data.copy_(value)
    return trained


def as_input(images):
    return torch.from_numpy(normalised(images)).permute(0, 3, 1, 2)


def crops_of(images, batch):
    return torch.tensor(np.stack([cropped_and_mirrored(images[row], *how) for row, *how in batch.T.tolist()]))


def check_run(program, hyp, network, update, reduce, batches, arrays, weights, epochs, smoothing=0.0, of_last=None):
    """Compare scores of all epochs and final weights with those of a stock `network` to nine digits.

    `update` gets the mean gradient over the workers, a state, at first 0, and the epochs so far; `batches` gets each
    image's latest loss, and returns rows and images of each step. `of_last` evaluates the last epoch.
    """
    initial = initial_weights(program, hyp)
    trained = set_weights(network.double(), initial.values())
    states = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    momentum = norms[0].momentum
    losses_of = partial(F.cross_entropy, reduction="none", label_smoothing=smoothing)
    _, labels, _, test_labels = map(torch.from_numpy, arrays)
    latest_losses = torch.full(labels.shape, torch.inf)
    for epoch in range(1, hyp.epochs + 1):
        seen = []
        steps = batches(epoch, latest_losses)
        for number, (rows, images) in enumerate(steps, 1):
            for worker, mine in enumerate(torch.arange(len(rows)).chunk(workers_of(hyp))):
                for norm in norms:
                    norm.momentum = momentum * (worker == 0)  # whose statistics alone count
                logits = network(images[mine])
                seen.append((logits.detach(), labels[rows[mine]]))
                losses = losses_of(logits, labels[rows[mine]])
                (reduce(losses) / workers_of(hyp)).backward()
                latest_losses[rows[mine]] = losses.detach().float()
            for name, weight in trained.items():
                now = epoch - 1 + number / len(steps)
                weight.data.copy_(update(name, weight.data, weight.grad, states[name], now))
            network.zero_grad()
        network.eval()
        with torch.no_grad():
            evaluate = of_last if of_last and epoch == hyp.epochs else nn.Module.__call__
            logits = evaluate(network, as_input(arrays[2]))
        network.train()
        row = epochs.iloc[epoch - 1]
        for name, parts in {"train": seen, "validation": [(logits, test_labels)]}.items():
            logits, targets = map(torch.cat, zip(*parts, strict=True))
            assert row[f"{name}_accuracy"] == (logits.argmax(1) == targets).double().mean().item()
            assert row[f"{name}_loss"] == pytest.approx(losses_of(logits, targets).mean().item(), rel=1e-9)
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
    "page --width 16 --starting_point": (1, resnet18(True, True), torch.sum, page_nesterov),
    "fastai --width 3": (8, wide_resnet(), torch.mean, partial(one_cycle, 0.04, 2.0, 17.5, 2e-4)),
    "fastai --width 3 --entry one_gpu": (1, wide_resnet(), torch.mean, partial(one_cycle, 0.075, 1.5, 12, 1e-4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_whole_run_equals_stock_layers_and_plain_formulas_to_nine_digits(command, tmp_path):
    """Two epochs of two full batches and a short one."""
    workers, network, reduce, update = RUNS[command]
    command += " --epochs 2 --batch_size 4"
    program, hyp = hyp_of(command)
    arrays = draw_shapes(10 * workers + workers // 2, 40)  # the last few are not of all workers
    images = normalised(arrays[0])

    def batches(epoch, latest_losses):
        if program is page:
            steps = page.plan_epoch(hyp, len(images), CPU, SEED, epoch)
            made = [(batch[0], crops_of(images, batch)) for batch in steps]
        else:
            steps = fastai.plan_epoch(hyp, len(images), Team(0, 1, CPU, workers), SEED, epoch)
            make_batch = partial(fastai.make_batch, torch.from_numpy(images), torch.from_numpy(arrays[1]))
            made = [(batch[0].long(), make_batch(batch, (MEAN, STD))[0]) for batch in steps]
        assert [len(rows) for rows, _ in made] == [4 * workers, 4 * workers, 2 * workers]
        return made

    check_run(program, hyp, network, update, reduce, batches, arrays, *trained_by(command, arrays, tmp_path))


@pytest.mark.slow
def test_averaged_statistics_are_the_mean_of_those_of_worker_0s_ghost_groups(tmp_path):
    """After one step, which is the same as with the first group's."""
    command = "apple2019 --workers 2 --batch_size 32 --ghost_batch 16 --width 3 --epochs 1 --ema_ep 0"
    arrays = draw_shapes(64, 40)
    with_first, _ = trained_by(command, arrays, tmp_path)
    weights, epochs = trained_by(f"{command} --eval_stats average", arrays, tmp_path)
    filters = weights["whitening.weight"]
    _, hyp = hyp_of(command)
    initial = initial_weights(apple2019, hyp)
    assert all(torch.equal(weights[name], with_first[name]) for name in initial)
    [batch] = plan(hyp, 64, epoch=1)
    network = Reference().double()
    set_weights(network, initial.values())
    for group, momentum in zip(batch[:, :32].split(16, 1), (0.05 / 0.95, 0.05), strict=True):
        for norm in network.norms:
            norm.momentum = momentum  # so that in the end each group counts for a twentieth
        network(crops_of(normalised(arrays[0]), group), filters)
    set_weights(network.eval(), [weights[name] for name in initial])
    x = as_input(arrays[2])
    loss = smoothed((network(x, filters) + network(x.flip(3), filters)) / 2, torch.from_numpy(arrays[3])).mean()
    assert epochs["validation_loss"].iloc[-1] == pytest.approx(loss.item(), rel=1e-9)


def test_a_batch_is_sixteen_ghost_groups():
    assert [apple2019.Hyp(batch_size=size).ghost_batch for size in (64, 256, 512)] == [4, 16, 32]


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
        muon.set_rates(hyp, optimizers, epoch + 1 / 25)  # the end of a step that begins at `epoch`
        return optimizers[0].param_groups[0]["lr"]
    return program.learning_rate(hyp, epoch) * (1 if type(hyp) is page.Basenet else hyp.batch_size)


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
        assert f"{sum(weight.numel() for weight in network.parameters()):,}" == parameters
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.zeros(1, 3, 32, 32))
        assert f"{counter.get_total_flops() / 2e9:.3f}" == multiply_adds
        assert (f"{workers_of(hyp)} x {hyp.batch_size}", str(hyp.epochs)) == (batches, epochs)
        # Of `0 → 0.1 (15), 0.105 → 0.005 (30)` the first value is that at 0, and another at 15.
        text = re.sub(r"(\([\d.]+\)), ([\d.]+)", r"\1 \2 \1", rates.replace(" ", " (0) ", 1))
        values, knots = np.array(re.findall(r"([\d.]+) \(([\d.]+)\)", text), dtype=float).T
        for epoch in np.linspace(0.001, hyp.epochs - 0.001, 50):
            assert rate(program, hyp, epoch) == pytest.approx(np.interp(epoch, knots, values))
        assert f"{flop_of(program, hyp, 50_000) / 1e15:.2f}" == pflop


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
    assert torch.equal(network.groups[0][0].weight[:24, :, 1, 1], torch.eye(24))
    assert network.linear.weight.std().item() == pytest.approx(1)


IN_FP16 = {
    "apple2019 --workers 1 --ghost_batch 5 --width 4 --ema_ep 0": torch.float16,
    "page --width 16": torch.float16,
    "fastai --entry one_gpu --width 3": torch.float32,
    "muon --width 4 --kept 1": torch.float32,
}


@pytest.mark.slow
@pytest.mark.parametrize("command", IN_FP16)
def test_in_fp16_norms_and_the_weights_of_fastai_and_muon_are_float32(command, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "matrix_rate", lambda *_: 1.0)  # a CPU takes long
    more = " --epochs 1 --batch_size 10 --no_warmup --precision fp16"
    weights, _ = trained_by(command + more, draw_shapes(10, 1), tmp_path)
    for name, weight in weights.items():
        of_norm = "running" in name or (weight.ndim == 1 and name != "linear.bias")
        assert weight.dtype == (torch.float32 if of_norm else IN_FP16[command])


HALVES = [  # with the least cosine
    ("apple2019 --width 8 --batch_size 16 --ghost_batch 8", "bf16", 0.8),
    ("basenet --width 16 --batch_size 8", "bf16", 0.4),
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
        precision = fast.Precision(name, CPU, half_weights=False)
        torch.manual_seed(0)
        network = program.Network(hyp, 10)
        fast.place(network, precision)
        images = torch.randn(hyp.batch_size, 3, 32, 32).to(precision.images, memory_format=torch.channels_last)
        labels = torch.zeros(len(images)).long()  # all equal, so that gradients add up
        first = (network, precision, 1) if program is fastai else (hyp, network, precision)
        loss = program.forward_pass(*first, images, labels).loss
        assert loss.dtype == (torch.float64 if name == "fp64" else torch.float32)
        loss.backward()
        gradients[name] = [weight.grad for weight in network.parameters()]
    for found, expected in zip(gradients[half], gradients["fp64"], strict=True):
        assert least < F.cosine_similarity(found.double().flatten(), expected.flatten(), dim=0) < 1 - 1e-9
