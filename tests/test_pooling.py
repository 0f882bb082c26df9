"""Pooling with a gradient of its own is PyTorch's, and is taken where a network is compiled for a CPU."""

import pytest
import torch
import torch.nn.functional as F

from large_batch_cifar_10_fast.training.pooling import HalvingPool, LargestOfFour


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


def test_pooling_scatters_nothing_where_it_is_compiled_for_a_cpu():
    graphs = []

    def compiler(graph, _):
        graphs.append(graph.code)
        return graph

    pool, x = HalvingPool(), torch.randn(2, 3, 4, 4, requires_grad=True)
    made = torch.compile(pool, backend=compiler)(x)
    assert torch.equal(made, pool(x))
    assert len(graphs) == 1
    assert "LargestOfFour" in graphs[0] or "autograd_function" in graphs[0]
    assert "max_pool2d" not in graphs[0]
