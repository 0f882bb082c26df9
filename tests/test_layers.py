"""Pooling and convolutions against PyTorch's; norms in half precision; Muon's products; what whitening looks at."""

import pytest
import torch
import torch.nn.functional as F

from large_batch_cifar_10_fast import apple2019, muon
from large_batch_cifar_10_fast.core import layers
from large_batch_cifar_10_fast.core.layers import Convolution, GhostBatchNorm, MaxPoolFunction
from large_batch_cifar_10_fast.core.optim import batches_of, orthogonal, orthogonal_each


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_float32(dtype):
    """In half precision the squares of such values would overflow, or lose all digits."""
    norm = GhostBatchNorm(2, groups=4)
    x = (300 + torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(0))).to(dtype)
    y = norm(x)
    expected = torch.cat([F.batch_norm(group, None, None, training=True) for group in x.double().chunk(4)])
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.02)
    mean, variance = norm.batch_statistics
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean[0].double(), x[:16].double().mean((0, 2, 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 2), (torch.bfloat16, 3), (torch.float64, 6)])
def test_pooling_and_its_gradient_are_pytorchs_also_for_equal_values(dtype, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (5, 3, 6, 12), generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    ours, expected = MaxPoolFunction.apply(x, size), F.max_pool2d(x, size)
    factors = torch.randn(expected.shape, generator=generator).to(dtype)
    assert torch.equal(ours, expected)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(y, x, factors) for y in (ours, expected))
    assert torch.equal(gradient, expected_gradient)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("program", "count"), [(apple2019, 10_000), (muon, 5_000)], ids=["apple2019", "muon2024"])
@torch.no_grad()
def test_whitening_looks_at_the_first_images(program, count):
    images = torch.rand(count + 50, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    filters = []
    for seen in (count + 50, count, count - 1):
        filters.append(program.filters_of(images[:seen]))
    assert torch.equal(filters[0], filters[1])
    assert not torch.equal(filters[1], filters[2])


@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("side", [3, 4, 31])
def test_convolutions_and_their_gradients_are_pytorchs_without_what_pooling_drops(side, pooled, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    ours = Convolution(3, 4, pooled).double()
    x = torch.randn(2, 3, side, side, dtype=torch.float64).requires_grad_()
    kept = side // 2 * 2 if pooled else side
    expected = F.conv2d(x, ours.weight, padding=1)[..., :kept, :kept]
    factors = torch.randn_like(expected)
    found = ours(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((y * factors).sum(), (x, ours.weight)) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_whitening_through_32_channels_gives_what_27_give(monkeypatch):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    filters = torch.randn(27, 3, 3, 3, dtype=torch.float64)
    weight = torch.randn(5, 27, 1, 1, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(F.conv2d(images, filters, padding=1), weight)
    pads = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "pad", lambda x, widths, pad=F.pad: pads.append(pad(x, widths)) or pads[-1])
    padded = apple2019.whiten_and_mix(images, filters, weight)
    assert [tuple(x.shape) for x in pads] == [(32, 3, 3, 3), (5, 32, 1, 1)]
    torch.testing.assert_close(padded, expected)
    gradients = [torch.autograd.grad(y.square().sum(), weight) for y in (padded, expected)]
    torch.testing.assert_close(*gradients)


def test_matrices_in_padded_batches_are_orthogonalized_as_each_alone():
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 147), *4 * [(64, 576)], (128, 64), (512, 256), (512, 2304), (512, 4608)]  # of resnet18
    matrices = [torch.randn(rows // 8, columns // 8, generator=generator).double() for rows, columns in shapes]
    for x, matrix in zip(orthogonal_each(matrices), matrices, strict=True):
        torch.testing.assert_close(x, orthogonal(matrix), rtol=1e-9, atol=1e-9)


def test_all_filters_of_muon_are_one_batch():
    for hyp, batch in ((muon.Hyp(), [5, 4, 3, 2, 0, 1]), (muon.Hyp2024(), [3, 4, 5, 2, 1, 0])):
        filters = [w for w in muon.Network(hyp, 10).members.parameters() if w.ndim == 4]
        assert batches_of([w.flatten(1).shape for w in filters]) == [batch]


def test_each_norm_moves_its_statistics_by_its_own_momentum():
    norms = torch.nn.Sequential(GhostBatchNorm(2, momentum=0.1), GhostBatchNorm(2, momentum=0.5))
    latest = [torch.ones(1, 2) for _ in range(4)]
    layers.update_running_statistics(norms, latest)
    assert [norm.running_mean.tolist() for norm in norms] == [[pytest.approx([0.1, 0.1])], [pytest.approx([0.5, 0.5])]]
