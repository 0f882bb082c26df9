"""Ghost batch norm and pooling against PyTorch's own layers; whitening against sums by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from large_batch_cifar_10_fast.layers import (
    GhostBatchNorm,
    MaxPool,
    MaxPoolFunction,
    prepare_norms,
    update_statistics,
    whitening_filters,
)


def _inputs(groups: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(groups * 16, 5, 4, 6, generator=generator, dtype=dtype) + 2
    return x.to(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize(("ghost_batch", "affine"), [(16, False), (16, True), (8, False), (48, True)])
def test_it_is_batch_norm_on_each_group_alone_forward_and_backward(ghost_batch, affine):
    ours, x = GhostBatchNorm(5, ghost_batch, affine).double(), _inputs(3)
    theirs = nn.BatchNorm2d(5, eps=1e-5).double()
    for norm in (ours, theirs):
        generator = torch.Generator().manual_seed(1)
        nn.init.normal_(norm.bias, generator=generator)
        if affine:
            nn.init.normal_(norm.weight, generator=generator)
    factors = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    y = ours(x)
    (y * factors).sum().backward()

    x2 = x.detach().clone().requires_grad_()
    y2 = torch.cat([theirs(group) for group in x2.split(ghost_batch)])
    (y2 * factors).sum().backward()
    torch.testing.assert_close(y, y2)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)
    if affine:
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    else:
        assert [name for name, _ in ours.named_parameters()] == ["bias"]
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups", [1, 2])
def test_evaluation_uses_the_mean_of_its_first_groups_running_statistics(groups):
    ours = GhostBatchNorm(5, 16, momentum=0.2, eps=1e-3, groups=groups).double()
    nn.init.normal_(ours.weight)
    prepare_norms(ours, 1, tracking=True)
    theirs = [nn.BatchNorm2d(5, momentum=0.2).double() for _ in range(groups)]
    for step in range(4):
        x = _inputs(4).detach() * (1 + step) + step
        ours(x)
        update_statistics(ours)
        for norm, group in zip(theirs, x.split(16), strict=False):  # the later groups are another worker's
            norm(group)
    torch.testing.assert_close(ours.running_mean, torch.stack([norm.running_mean for norm in theirs]))
    torch.testing.assert_close(ours.running_var, torch.stack([norm.running_var for norm in theirs]))
    mean, variance = ours.running_mean.mean(0), ours.running_var.mean(0)
    x = _inputs(1).detach()[:3]  # in evaluation a batch may be of any size
    x_hat = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-3).sqrt()
    expected = x_hat * ours.weight.view(-1, 1, 1) + ours.bias.view(-1, 1, 1)
    torch.testing.assert_close(ours.eval()(x), expected)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 2), (torch.bfloat16, 3), (torch.float64, 6)])
def test_pooling_and_its_gradient_are_pytorchs_also_for_equal_values(dtype, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (5, 3, 6, 12), generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    ours, expected = MaxPoolFunction.apply(x, size), nn.functional.max_pool2d(x, size)
    factors = torch.randn(expected.shape, generator=generator).to(dtype)
    assert torch.equal(ours, expected)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(y, x, factors) for y in (ours, expected))
    assert torch.equal(gradient, expected_gradient)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("compiling", "size", "side", "ours"), [(True, 2, 4, True), (True, 2, 5, False), (False, 2, 4, False)]
)
def test_pooling_has_its_own_gradient_where_it_is_compiled(compiling, size, side, ours, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    pooled = MaxPool(size)(torch.empty(1, 3, side, side, requires_grad=True))
    assert ("MaxPoolFunction" in type(pooled.grad_fn).__name__) == ours
    assert MaxPool()(pooled).shape == (1, 3, 1, 1)


def test_whitened_patches_have_identity_covariance_up_to_the_floor():
    images = torch.from_numpy(np.random.default_rng(4).normal(size=(40, 32, 32, 3)).cumsum(1).cumsum(2) / 50)
    filters = whitening_filters(images, size=3, epsilon=0.01)
    x = torch.cat([nn.functional.unfold(image.permute(2, 0, 1)[None], 3)[0].T for image in images])
    covariance = (x.T @ x / (len(x) - 1)).numpy()
    eigenvalues = np.sort(np.linalg.eigvalsh(covariance))[::-1]
    outputs = (x @ filters.view(27, 27).T).numpy()
    expected = np.diag(eigenvalues / (eigenvalues + 0.01))
    np.testing.assert_allclose(outputs.T @ outputs / (len(x) - 1), expected, atol=1e-8)
    assert expected[0, 0] > 0.99
