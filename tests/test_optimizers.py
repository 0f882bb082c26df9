"""The schedule's known answers, and the optimiser against its formula."""

import numpy as np
import pytest
import torch

from large_batch_cifar_10_fast.optim import nesterov_update, restart
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019


def test_the_schedule_gives_the_published_rates_and_peaks_at_the_warm_ups_end():
    published = {1: 0.0173611, 86: 1.493056, 87: 1.497278, 384: 0.15, 400: 0.15, 432: 0.15}
    assert {step: Apple2019().rate()(step / 24) for step in published} == pytest.approx(published, rel=1e-6)
    assert Apple2019().rate()(3.6) == pytest.approx(1.5)
    assert Apple2019(lr_scaler=2.0, epochs=10, warmup_fraction=4, ema_ep=1).rate()(2.5) == pytest.approx(2.0)


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


def test_a_run_starts_without_momenta_and_gradients_of_the_last():
    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    sgd.step()
    restart([sgd])
    assert weight.grad is None
    assert not sgd.state[weight]["momentum_buffer"].any()
