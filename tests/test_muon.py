"""muon against stock layers and plain formulas, in float64; its figures, its kinds of steps, its work."""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, REPO
from test_oracle import SEED, as_input, check_run, crops_of, hyp_of, trained_by
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast import muon
from large_batch_cifar_10_fast.core import machine as machines
from large_batch_cifar_10_fast.core.optim import Muon
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes


@dataclass
class Figures:
    """What differs between the recipes."""

    middle: int  # channels of the second block at width 4
    second: int  # side of the first block's second filters
    sums: bool
    rate: float
    of_norm: float
    members: int = 1


FIGURES = {
    "muon": Figures(14, 1, True, 0.17, 0.22),
    "muon95": Figures(14, 1, True, 0.17, 0.22, members=2),
    "muon_first": Figures(16, 3, False, 0.24, 0.4),
    "muon2024": Figures(16, 3, False, 0.24, 0.4),
}


class Head(nn.Linear):
    def __init__(self, sums):
        super().__init__(16, 10, bias=False)
        self.sums = sums

    def forward(self, x):
        places = x.flatten(2)
        seen = places.amax(2)
        if self.sums:
            seen = seen + places.sum(2) / places.shape[2]
        return super().forward(seen) / 256


def stock_network(figures):
    """Return the network at width 4."""
    first = nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU())
    first[0].weight.requires_grad_(False)
    return Members([first, *[stock_member(figures) for _ in range(figures.members)]])


class Members(nn.ModuleList):
    """The first is shared. In evaluation, the logits of the others are averaged."""

    def forward(self, x):
        first, *others = self
        logits = torch.stack([other(first(x)) for other in others])
        return logits if self.training else logits.mean(0)


def stock_member(figures):
    layers = []
    channels = [24, 4, 4, figures.middle, figures.middle, 16, 16]
    for place, (c_in, c_out) in enumerate(pairwise(channels)):
        pool = nn.MaxPool2d(2) if place % 2 == 0 else nn.Identity()
        norm = nn.BatchNorm2d(c_out, eps=1e-12, momentum=figures.of_norm)
        norm.weight = None
        side = figures.second if place == 1 else 3
        layers += [nn.Conv2d(c_in, c_out, side, padding=side // 2, bias=False), pool, norm, nn.GELU()]
    return nn.Sequential(*layers, Head(figures.sums))


def update(figures, name, w, g, state, epoch):
    now = epoch - 12 / 50_000  # of the true data set the first step would end at 0
    if w.ndim == 4:
        state[:] = 0.6 * state + g
        direction = (g + 0.6 * state).flatten(1)
        x = direction / direction.norm()
        for _ in range(3):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return w * len(w) ** 0.5 / w.norm() - figures.rate * (1 - now / 4) * x.view(w.shape)
    rate = 0.67 if w.ndim == 2 else 0.053  # for the sum of a step's 12 losses
    left = 1 - now / 4
    if name == "0.0.bias":  # shared: of the mean of its gradients
        rate /= figures.members
        left = max(0, 1 - now / 2)
    g = 2 * g + 2e-6 * 12 / rate * w
    state[:] = 0.85 * state + g
    return w - rate * left * (g + 0.85 * state)


def six_views_at_last(network, images, is_last):
    if not is_last:
        return network(images)
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    views = [images, images, padded[:, :, :32, :32], padded[:, :, 2:, 2:]]
    return sum(network(view) + network(view.flip(3)) for view in views) / 8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FIGURES)
def test_two_workers_train_as_stock_layers_do_to_nine_digits(recipe):
    """Of 19 images of each worker first 18, then the hardest 12, 18, and the hardest 6. One not seen is hardest."""
    figures = FIGURES[recipe]
    command = f"{recipe} --epochs 4 --batch_size 6 --workers 2 --width 4 --whitening_epochs 2 --pixels 24,32"
    command += " --kept 1,0.7,1,0.5"
    _, hyp = hyp_of(command)
    arrays = draw_shapes(38, 40)

    def batches(epoch, latest_losses):
        everything = replace(hyp, batch_size=19, kept=(1,))
        [plan] = muon.plan_epoch(everything, latest_losses, 1, Team(0, 1, CPU, 2), SEED, epoch)
        kept, size = [(18, 24), (12, 24), (18, 32), (6, 32)][epoch - 1]
        parts = []
        for of_worker in plan.chunk(2, 1):
            places = torch.arange(19)
            if kept < 18:
                places = latest_losses[of_worker[0]].argsort(descending=True)
            parts.append(of_worker[:, places[:kept].sort().values].split(6, 1))
        steps = [torch.cat(step, 1) for step in zip(*parts, strict=True)]
        for _, crops, _ in steps:
            crops += 4 * (crops // 5) + 20  # from those of a padding of 2, 5 x 5, to those of 4, 9 x 9
        crops = [(batch[0], crops_of(arrays[0], batch)) for batch in steps]
        return [(rows, F.interpolate(images, (size, size), mode="bilinear")) for rows, images in crops]

    epochs = trained_by(command, arrays)
    filters = epochs[-1].network.whitening.weight
    network = stock_network(figures).double()
    network[0][0].weight.copy_(filters)
    momenta = [figures.of_norm, 0.0]
    follow = partial(update, figures)
    check_run(command, arrays, epochs, network, follow, torch.sum, batches, momenta, 0.2, evaluate=six_views_at_last)

    patches = F.unfold(as_input(arrays[0][::2]), 2).transpose(1, 2).flatten(0, 1)
    covariance = patches.T @ patches / (len(patches) - 1)
    rows = filters[:12].flatten(1)
    outputs = rows @ covariance @ rows.T
    assert_close(outputs, outputs.diag().sort(descending=True).values.diag())
    assert_close(outputs + 5e-4 * rows @ rows.T, torch.eye(12).double())
    assert torch.equal(filters[12:], -filters[:12])


def test_the_warm_up_takes_each_distinct_step_once(monkeypatch):
    taken = []

    def forward_pass(hyp, network, precision, images, labels, stage, real=muon.forward_pass):
        taken.append((images.shape[-1], stage.trains_whitening))
        return real(hyp, network, precision, images, labels, stage)

    monkeypatch.setattr(muon, "forward_pass", forward_pass)
    command = "muon --epochs 5 --width 2 --batch_size 10 --pixels 16,16,16,20,20 --kept 1,1,0.6,1,0.6"
    trained_by(command, draw_shapes(20, 1))
    assert taken[:3] == [(16, True), (16, False), (20, False)]


def test_without_warm_up_and_compiler_no_noise_takes_memory(monkeypatch):
    monkeypatch.setattr(machines, "random_images", None)
    command = "muon --epochs 1 --width 2 --batch_size 10 --pixels 16"
    trained_by(command, draw_shapes(20, 1), warm_up=False)


@pytest.mark.slow
def test_work_is_what_torch_counts_over_a_run_but_for_evaluation(monkeypatch):
    command = "muon --epochs 4 --width 4 --batch_size 100 --pixels 9,12 --kept 1,1,1,0.5"
    monkeypatch.setattr(machines, "predict", lambda network, images: torch.zeros(len(images), 10))
    with FlopCounterMode(display=False) as counter:
        trained_by(command, draw_shapes(250, 10), warm_up=False)
    counts = counter.get_flop_counts()["Global"]
    hyp = hyp_of(command)[1]
    others = counts[torch.ops.aten.bmm] + 2 * 12**2 * 250 * 31**2  # Muon's products, and the covariance of all patches
    assert counter.get_total_flops() - others == hyp.flop(muon.Network(hyp, 10), 250)


def test_a_step_multiplies_the_matrices_of_muon_in_the_precision_of_the_run(monkeypatch):
    dtypes = []

    def multiply(a, b, real=torch.Tensor.__matmul__):
        product = real(a, b)
        if product.ndim == 3:
            dtypes.append(product.dtype)
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        trained_by("muon --epochs 1 --width 2 --batch_size 10 --kept 1", draw_shapes(10, 1), precision)
        assert {*dtypes} == {dtype}
        dtypes.clear()


def test_an_epoch_of_few_images_has_a_step():
    assert muon.steps_by_epoch(muon.Hyp(batch_size=10, epochs=2, kept=(1, 0.5)), 15) == [1, 1]


# ---- Other networks


@pytest.mark.parametrize("compiled", [False, True])
def test_other_networks_train_with_muon_as_the_page_says(compiled, monkeypatch):
    """The lines of docs/use_muon.md. Its optimizers have states and schedules as torch's have."""
    parts = draw_shapes(64, 1)
    images = torch.from_numpy(parts[0]).permute(0, 3, 1, 2).float().div(255)
    batches = 10 * [(images, torch.from_numpy(parts[1]))]  # more rates than torch compiles versions
    (lines,) = re.findall(r"(?s)```python\n(.*?)```", (REPO / "docs" / "use_muon.md").read_text())
    if not compiled:
        lines = lines.replace("muon.update = torch.compile(muon.update)", "")
    torch.manual_seed(0)
    torch.compiler.reset()  # or another test's compilation of the same functions makes this one the second
    found = {"batches": batches}
    with torch._dynamo.config.patch(error_on_recompile=True):
        exec(lines, found)  # our own page
    assert found["loss"] < math.log(10) / 2  # half of what it begins with
    for weight in found["filters"]:
        assert float(weight.norm()) == pytest.approx(len(weight) ** 0.5, rel=0.3)
    assert found["muon"].param_groups[0]["lr"] == 0
    state = found["muon"].state_dict()
    other = Muon(found["filters"])
    other.load_state_dict(state)
    assert_close(other.state_dict(), state)


def test_the_layout_of_a_weight_does_not_change_its_update():
    values = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    plain = nn.Parameter(values.clone())
    channels_last = nn.Parameter(values.to(memory_format=torch.channels_last))
    matrix = nn.Parameter(values.flatten(1).T.contiguous().T)
    for weight in (plain, channels_last, matrix):
        weight.grad = weight.detach() ** 2
        Muon([weight]).step()
    assert_close(channels_last.data, plain.data)
    assert_close(matrix.data, plain.data.flatten(1))
    plain.grad = plain.detach().to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view"):
        Muon([plain]).step()


def test_muon_refuses_weights_that_are_no_matrix():
    with pytest.raises(ValueError, match=r"^Muon has no update for a weight \[3\]: give it to SGD or AdamW$"):
        Muon([nn.Parameter(torch.ones(3))])
