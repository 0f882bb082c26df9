"""The schedule's known answers, and the optimiser against its formula."""

import numpy as np
import pytest
import torch

from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.optim import PiecewiseLinear, follow_schedules, nesterov_update, restart
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

ALONE = DistContext(0, 1, torch.device("cpu"), 8)


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.0173611), (86, 1.493056), (87, 1.497278), (384, 0.15), (400, 0.15), (432, 0.15)]
)
def test_schedule_gives_the_published_rates(step, rate):
    assert Apple2019().rate()(step / 24) == pytest.approx(rate, rel=1e-6)


def test_schedule_peaks_at_the_warmups_end():
    assert Apple2019().rate()(3.6) == pytest.approx(1.5)
    assert Apple2019(lr_scaler=2.0, epochs=10, warmup_fraction=4, ema_ep=1).rate()(2.5) == pytest.approx(2.0)


def test_five_steps_follow_the_formula_in_float64():
    random = np.random.default_rng(1)
    w, v = random.normal(size=(3, 4)), np.zeros((3, 4))
    weights, velocity = torch.tensor(w), torch.zeros(3, 4, dtype=torch.float64)
    for lr in (0.01, 0.03, 0.02, 0.02, 0.005):
        gradient = random.normal(size=(3, 4))
        d = -lr * (gradient + 0.192 * w)
        v = 0.9 * v + d
        w = w + d + 0.9 * v
        nesterov_update([weights], [torch.tensor(gradient)], [velocity], lr, 0.192, 0.9)
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-13)


def _both(rates) -> tuple[torch.Tensor, torch.Tensor]:
    """Our weights and torch.optim.SGD's after steps of these rates with the same gradients."""
    random = np.random.default_rng(2)
    start = torch.tensor(random.normal(size=6))
    ours, velocity = start.clone(), torch.zeros_like(start)
    theirs = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1)
    for rate in rates:
        gradient = torch.tensor(random.normal(size=6))
        nesterov_update([ours], [gradient], [velocity], rate, 0.1, 0.9)
        sgd.param_groups[0]["lr"] = rate
        theirs.grad = gradient.clone()
        sgd.step()
    return ours, theirs.detach()


def test_equals_torch_sgd_at_a_constant_rate_and_only_there():
    torch.testing.assert_close(*_both([0.05] * 5), rtol=1e-12, atol=1e-12)
    ours, theirs = _both([0.05, 0.1, 0.02, 0.02, 0.2])
    assert (ours - theirs).abs().max() > 1e-3


def test_weights_and_biases_get_their_own_rate_and_decay():
    network = torch.nn.Linear(2, 3)
    with torch.no_grad():
        network.weight.fill_(1.0)
        network.bias.fill_(1.0)
    [optimizer] = Apple2019().optimizers(network, ALONE)
    follow_schedules([optimizer], 1 / 24)  # the first step is number 1
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rate = 1.5 * (1 / 24) / 3.6
    # From rest, w moves by 1.9 d, d = -lr (grad + wd w).
    weight, bias = 1 - 1.9 * rate / 256 * 1.192, 1 - 1.9 * 64 * rate / 256 * 1.003
    torch.testing.assert_close(network.weight.detach(), torch.full((3, 2), weight), rtol=1e-6, atol=0)
    torch.testing.assert_close(network.bias.detach(), torch.full((3,), bias), rtol=1e-6, atol=0)


def test_rate_and_momentum_both_move_in_torchs_own_optimizers():
    rise, fall = PiecewiseLinear((0, 2), (0, 0.4)), PiecewiseLinear((0, 2), (0.95, 0.85))
    weight = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [weight], "schedules": {"lr": rise * 0.5, "momentum": fall}}]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True)
    follow_schedules([optimizer], 1.5)
    [group] = optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (pytest.approx(0.15), pytest.approx(0.875))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == pytest.approx([1 - 0.15 * 1.875] * 2)


def test_a_run_starts_without_momenta_and_gradients_of_the_last():
    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    sgd.step()
    restart([sgd])
    assert weight.grad is None
    assert not sgd.state[weight]["momentum_buffer"].any()
