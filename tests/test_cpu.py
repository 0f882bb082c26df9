"""The CPU's fast paths give the results of PyTorch's convolution, with their gradients."""

import pytest
import torch
import torch.nn.functional as F

from large_batch_cifar_10_fast import cpu
from large_batch_cifar_10_fast.cpu import Convolution, ConvolutionToPool


@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("kind", [Convolution, ConvolutionToPool])
@pytest.mark.parametrize("side", [2, 3, 4, 5, 8, 31])
def test_convolutions_and_their_gradients_are_pytorchs_without_what_pooling_drops(side, kind, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    ours = kind(3, 4, 3, padding=1, bias=False, dtype=torch.float64)
    x = torch.randn(2, 3, side, side, dtype=torch.float64).requires_grad_()
    kept = side if kind is Convolution else side // 2 * 2
    expected = F.conv2d(x, ours.weight, padding=1)[..., :kept, :kept]
    factors = torch.randn_like(expected)
    found = ours(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((y * factors).sum(), (x, ours.weight)) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("device", "compiling"), [("cpu", True), ("cpu", False), ("meta", True)])
def test_fast_paths_are_taken_only_where_a_network_is_compiled_for_a_cpu(device, compiling, monkeypatch):
    fast, sides = device == "cpu" and compiling, []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(cpu, "convolve_by_position", lambda x, weight, side: sides.append(side))
    for side in (2, 4, 5):
        images = torch.empty(1, 3, side, side, device=device, requires_grad=True)
        for kind in (Convolution, ConvolutionToPool):
            kind(3, 4, 3, padding=1, bias=False, device=device)(images)
    assert sides == ([2, 2, 4, 4, 4] if fast else [])
