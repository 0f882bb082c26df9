"""Pooling with a gradient of its own gives what PyTorch's gives."""

import pytest
import torch
import torch.nn.functional as F

from large_batch_cifar_10_fast.cpu import HalvingPool, LargestOfFour


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_largest_of_four_and_its_gradient_are_pytorchs_also_where_some_are_equal(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (5, 3, 6, 10), generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    ours, theirs = LargestOfFour.apply(x), F.max_pool2d(x, 2)
    factors = torch.randn(theirs.shape, generator=generator).to(dtype)
    assert torch.equal(ours, theirs)
    (gradient,), (expected,) = (torch.autograd.grad(y, x, factors) for y in (ours, theirs))
    assert torch.equal(gradient, expected)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_it_is_taken_where_a_network_is_compiled_for_a_cpu_and_sides_are_even(monkeypatch):
    def way(side, device):
        return type(HalvingPool()(torch.empty(2, 3, side, side, device=device, requires_grad=True)).grad_fn).__name__

    assert "MaxPool2D" in way(4, "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "LargestOfFour" in way(4, "cpu")
    assert "MaxPool2D" in way(5, "cpu")
    assert "MaxPool2D" in way(4, "meta"), "any other device"
