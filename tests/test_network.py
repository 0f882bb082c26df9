"""Ghost norm, whitening, shapes and loss against PyTorch's own layers and against sums by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from large_batch_cifar_10_fast.network import (
    GhostNorm,
    Network,
    normed,
    smoothed_cross_entropy,
    whitening_filters,
)  # fmt: skip

FILTERS = torch.zeros(27, 3, 3, 3)


def _inputs(groups: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(groups * 16, 5, 4, 6, generator=generator, dtype=dtype) + 2
    return x.to(memory_format=torch.channels_last).requires_grad_()


def test_ghost_norm_is_batch_norm_on_each_16_images_alone_forward_and_backward():
    ours, x = GhostNorm(5).double(), _inputs(3)
    nn.init.normal_(ours.bias)
    weights = torch.randn_like(x)
    y = ours(x)
    (y * weights).sum().backward()

    theirs = nn.BatchNorm2d(5, eps=1e-5).double()
    theirs.bias.data = ours.bias.detach().clone()
    x2 = x.detach().clone().requires_grad_()
    y2 = torch.cat([theirs(group) for group in x2.split(16)])
    (y2 * weights).sum().backward()
    torch.testing.assert_close(y, y2)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_evaluation_uses_the_mean_of_the_followed_groups_running_statistics():
    ours = GhostNorm(5).double()
    ours.followed = 2
    theirs = [nn.BatchNorm2d(5, momentum=0.1).double() for _ in range(2)]
    for step in range(4):
        x = _inputs(4).detach() * (1 + step) + step
        ours(x)
        for norm, group in zip(theirs, x.split(16), strict=False):  # groups 2 and 3 are another worker's
            norm(group)
    mean = torch.stack([norm.running_mean for norm in theirs]).mean(0)
    variance = torch.stack([norm.running_var for norm in theirs]).mean(0)
    torch.testing.assert_close(ours.running_mean, mean)
    torch.testing.assert_close(ours.running_var, variance)
    x = _inputs(1).detach()[:3]  # in evaluation a batch may be of any size
    expected = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-5).sqrt() + ours.bias.view(-1, 1, 1)
    torch.testing.assert_close(ours.eval()(x), expected.detach())


def test_nothing_is_followed_unless_asked_for():
    norm = GhostNorm(5).double()
    norm(_inputs(2))
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()


def test_half_precision_keeps_norms_in_float32():
    network = Network(FILTERS, 4, seed=0).cast("fp16", torch.device("cpu"))
    kinds = {name: p.dtype for name, p in network.named_parameters()}
    assert {kind for name, kind in kinds.items() if name.endswith("bias")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if name.endswith("weight")} == {torch.float16}
    assert network.norms()[0].running_var.dtype == torch.float32
    assert normed(5)(_inputs(1, torch.float32).half()).dtype == torch.float16


def test_whitened_patches_have_identity_covariance_up_to_the_floor():
    images = torch.from_numpy(np.random.default_rng(4).normal(size=(40, 32, 32, 3)).cumsum(1).cumsum(2) / 50)
    filters = whitening_filters(images)
    patches = torch.cat([
        nn.functional.unfold(image.permute(2, 0, 1)[None], 3)[0].T for image in images
    ])  # fmt: skip
    x = patches.numpy()
    eigenvalues = np.sort(np.linalg.eigvalsh(x.T @ x / (len(x) - 1)))[::-1]
    outputs = (patches @ filters.view(27, 27).T).numpy()
    expected = np.diag(eigenvalues / (eigenvalues + 0.01))
    np.testing.assert_allclose(outputs.T @ outputs / (len(x) - 1), expected, atol=1e-8)
    assert expected[0, 0] > 0.99


def test_whitening_looks_at_the_first_ten_thousand_images():
    images = torch.rand(10_050, 3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(whitening_filters(images), whitening_filters(images[:10_000]))


def test_parameters_and_shapes_are_the_methods():
    network = Network(FILTERS, 64, seed=0)
    assert sum(p.numel() for p in network.parameters()) == 6_570_880
    shapes = {}
    for name in ("prep", "layer1", "layer2", "layer3", "head"):
        getattr(network, name).register_forward_hook(
            lambda m, i, y, name=name: shapes.update({name: tuple(y.shape[1:])})
        )
    assert network(torch.randn(16, 3, 32, 32)).shape == (16, 10)
    assert shapes == {"prep": (64, 32, 32), "layer1": (128, 16, 16), "layer2": (256, 8, 8),
                      "layer3": (512, 4, 4), "head": (10,)}  # fmt: skip


def test_seed_alone_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed * 7)  # the global stream must not matter
        return torch.cat([p.detach().flatten() for p in Network(FILTERS, 4, seed).parameters()])

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    Network(FILTERS, 4, 0)
    assert torch.equal(torch.rand(1), expected), "building a network must leave the global stream alone"
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_restarted_network_is_a_fresh_one():
    filters = torch.randn(27, 3, 3, 3)
    used = Network(FILTERS, 4, seed=3).cast("fp64", torch.device("cpu"))
    used.follow(16)
    used(torch.randn(16, 3, 32, 32, dtype=torch.float64)).sum().backward()
    used.restart(filters, seed=4)
    fresh = Network(filters, 4, seed=4).cast("fp64", torch.device("cpu"))
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(used.state_dict()[name], tensor), name


def test_logits_are_divided_by_sixteen():
    network = Network(FILTERS, 4, seed=0).eval()
    images = torch.randn(2, 3, 32, 32)
    undivided = []
    network.head.register_forward_hook(lambda m, i, y: undivided.append(y))
    torch.testing.assert_close(network(images), undivided[0] / 16)


def test_loss_is_smoothed_by_a_fifth():
    logits = torch.tensor([[2.0, 0.0, -1.0] + [0.0] * 7])
    total = math.exp(2) + math.exp(-1) + 8
    log_p = [2 - math.log(total), *[-math.log(total)] * 8, -1 - math.log(total)]
    expected = -0.8 * log_p[0] - 0.2 * sum(log_p) / 10
    assert smoothed_cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-6)
    assert smoothed_cross_entropy(logits.half(), torch.tensor([0])).dtype == torch.float32
