"""Convolutions that leave out work give what PyTorch's give."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from large_batch_cifar_10_fast import cpu
from large_batch_cifar_10_fast.cpu import Convolution, ConvolutionToPool

EXACT = {"padding": 1, "bias": False, "dtype": torch.float64}


def inputs(side):
    return torch.randn(2, 3, side, side, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("side", [2, 5, 7, 8, 31])
def test_what_pooling_drops_is_left_out_and_nothing_of_the_result(side, compiled, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    ours, x = ConvolutionToPool(3, 4, 3, **EXACT), inputs(side)
    whole = F.conv2d(x, ours.weight, padding=1)
    assert ours(x).shape[-1] == side // 2 * 2
    torch.testing.assert_close(F.max_pool2d(ours(x), 2), F.max_pool2d(whole, 2))


@pytest.mark.parametrize(
    ("kind", "side"), [*product([Convolution], [1, 2, 3, 4]), *product([ConvolutionToPool], [2, 3, 4, 5])]
)
def test_place_by_place_it_is_the_same_with_its_gradients(side, kind, monkeypatch):
    ours, x = kind(3, 4, 3, **EXACT), inputs(side)
    there = side if kind is Convolution else side // 2 * 2
    expected = F.conv2d(x, ours.weight, padding=1)[..., :there, :there]
    factors = torch.randn_like(expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = ours(x)
    torch.testing.assert_close(found, expected)
    gradients, wanted = (torch.autograd.grad((y * factors).sum(), (x, ours.weight)) for y in (found, expected))
    torch.testing.assert_close(gradients, wanted)


def test_few_places_are_taken_one_by_one_where_a_network_is_compiled_for_a_cpu(monkeypatch):
    sides = []
    monkeypatch.setattr(cpu, "convolve_by_place", lambda x, weight, side: sides.append(side))

    def run(device="cpu"):
        for side in (2, 4, 5):
            for kind in (Convolution, ConvolutionToPool):
                kind(3, 4, 3, padding=1, bias=False, device=device)(torch.empty(1, 3, side, side, device=device))
        return sides

    assert run() == []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert run("meta") == [], "any other device"
    assert run() == [2, 2, 4, 4, 4]
