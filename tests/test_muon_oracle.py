"""The Muon recipe trains and evaluates as stock layers in float64 do."""

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, Recorder
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipe import reset
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, train_once


class StockNetwork(nn.Module):
    """Of stock layers, made in the order of ours, so that weights can be copied one by one."""

    def __init__(self, w, momentum):
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        shapes = [(24, w), (w, w), (w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w)]
        self.convolutions = nn.ModuleList(nn.Conv2d(*shape, 3, padding=1, bias=False) for shape in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out, eps=1e-12, momentum=momentum) for _, out in shapes)
        self.linear = nn.Linear(4 * w, 10, bias=False)
        for norm in self.norms:
            norm.weight.requires_grad_(False)

    def forward(self, x):
        x = F.gelu(self.whitening(x))
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = convolution(x)
            x = F.max_pool2d(x, 2) if place % 2 == 0 else x
            x = F.gelu(norm(x))
        return self.linear(x.amax((2, 3))) / 256


def _muon(w, g, state, rate):
    state[:] = 0.6 * state + g
    direction = (g + 0.6 * state).reshape(len(w), -1)
    x = direction / direction.norm()
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return w * len(w) ** 0.5 / w.norm() - rate * x.view(w.shape)


def _sgd(w, g, state, rate, decay):
    g = g + decay * w
    state[:] = 0.85 * state + g
    return w - rate * (g + 0.85 * state)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(workers):
    """Four epochs, at two resolutions, the bias of the whitening at rest after the first, the last two of the images
    with the highest losses; rates for summed losses."""
    batch, seed, epochs, steps = 12 // workers, 5, 4, 3
    total = 12 * steps + workers  # what is left of a shard waits
    recipe = MuonRecipe(epochs=epochs, batch_size=batch, workers=workers, width=4, pixels="24,32", kept="1,1,0.7,0.5")
    ctx = DistContext(0, 1, CPU, workers)
    model = make_model(recipe, ctx, "fp64")
    data = prepare(Images("shapes", *draw_shapes(total, 40)), model, Clock(ctx.synchronize))
    reference, names = StockNetwork(4, 0.4).double(), [name for name, _ in model.network.named_parameters()]
    ours = dict(model.network.named_parameters())
    assert names[:2] == ["whitening.weight", "whitening.bias"]
    assert names[-1] == "linear.weight"
    biases = [name for name in names if name.endswith("bias") and name != "whitening.bias"]
    filters = [name for name in names if name.startswith("groups") and name.endswith("weight")]
    theirs = {"whitening.weight": reference.whitening.weight, "whitening.bias": reference.whitening.bias}
    theirs |= {name: c.weight for name, c in zip(filters, reference.convolutions, strict=True)}
    theirs |= {name: n.bias for name, n in zip(biases, reference.norms, strict=True)}
    theirs |= {"linear.weight": reference.linear.weight}
    reset(model.network, recipe, seed)
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(ours[name])
    trained = []

    class Log(Recorder):
        def epoch(self, clock, train, validation):
            trained.append(ours["whitening.bias"].requires_grad)
            super().epoch(clock, train, validation)

    train_once(0, seed, model, data, make_step(model, data), Clock(ctx.synchronize), log := Log())
    assert trained == [True, False, False, False], "its rate is 0 then, too: this is the work saved"

    state = {name: torch.zeros_like(weight) for name, weight in theirs.items()}
    decay, seen = 2e-6 * 12, torch.full((total,), torch.inf)
    for epoch in range(1, epochs + 1):
        reference.train()
        batches = data.train.epoch(seed, epoch, seen)
        assert len(batches) == (steps, steps, 2, 1)[epoch - 1]
        for step, sample in enumerate(batches, 1):
            ((x, y),), rows = sample, sample.rows
            assert x.shape[-1] == (24 if epoch <= 2 else 32)
            gradients = dict.fromkeys(theirs, 0.0)
            for worker in range(workers):
                mine = slice(worker * batch, (worker + 1) * batch)
                kept = {k: v.clone() for k, v in reference.state_dict().items() if "running" in k or "tracked" in k}
                losses = F.cross_entropy(reference(x[mine]), y[mine], label_smoothing=0.2, reduction="none")
                reference.zero_grad()
                losses.sum().backward()
                seen[rows[mine]] = losses.detach().float()
                if worker:
                    reference.load_state_dict(kept, strict=False)  # worker 0's statistics alone
                gradients = {name: gradients[name] + weight.grad for name, weight in theirs.items()}
            # In epochs; of the true data set the first step would end at 0.
            now = epoch - 1 + step / len(batches) - 12 / 50_000
            left, left_early = 1 - now / epochs, 1 - now
            with torch.no_grad():
                for name, w in theirs.items():
                    g, s = gradients[name], state[name]
                    if name in filters:
                        w.copy_(_muon(w, g, s, 0.24 * left))
                    elif name in biases:
                        w.copy_(_sgd(w, g, s, 0.053 * left, decay / 0.053))
                    elif name == "linear.weight":
                        w.copy_(_sgd(w, g, s, 0.67 * left, decay / 0.67))
                    elif name == "whitening.bias" and epoch == 1:
                        w.copy_(_sgd(w, g, s, 0.053 * left_early, decay / 0.053))
        with torch.no_grad():
            images = data.test[0].permute(0, 3, 1, 2)
            padded = F.pad(images, (1, 1, 1, 1), "reflect")
            shifted = [padded[:, :, :32, :32], padded[:, :, 2:, 2:]]
            reference.eval()
            logits = reference(images)
            if epoch == epochs:  # six views, and before then one
                logits = sum(
                    (reference(view) + reference(view.flip(3))) * weight
                    for view, weight in zip([images, *shifted], [0.25, 0.125, 0.125], strict=True)
                )
        assert log.validations[epoch - 1].correct == (logits.argmax(1) == data.test[1]).sum()
        expected = F.cross_entropy(logits, data.test[1], label_smoothing=0.2).item()
        assert log.validations[epoch - 1].loss == pytest.approx(expected, rel=1e-9)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-11, msg=name)
