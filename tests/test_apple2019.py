"""The default recipe: its shapes and seeds. For its composition see test_oracle.py."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU

from large_batch_cifar_10_fast.layers import norms_of, prepare_norms
from large_batch_cifar_10_fast.recipe import cast, frozen_weights, make_network, reset, run_flop
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019, whiten_and_mix

SMALL = Apple2019(width=4, batch_size=16, ghost_batch=8)


@pytest.mark.parametrize(("batch_size", "ghost_batch"), [(256, 16), (512, 32), (64, 4)])
def test_a_batch_is_sixteen_ghost_groups_unless_told_otherwise(batch_size, ghost_batch):
    assert Apple2019(batch_size=batch_size).ghost_batch == ghost_batch
    assert {norm.ghost_batch for norm in norms_of(Apple2019(batch_size=batch_size, width=4).network())} == {ghost_batch}
    assert Apple2019(batch_size=batch_size, ghost_batch=8).ghost_batch == 8


def test_parameters_work_and_shapes_are_the_methods():
    network = Apple2019().network()
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == 6_570_880
    assert run_flop(Apple2019(), 50_000) == pytest.approx(2.01e15, rel=0.002)
    shapes = []
    for part in network.children():
        part.register_forward_hook(lambda module, images, y: shapes.append(tuple(y.shape[1:])))
    network.prep(network.whitening(images := torch.randn(16, 3, 32, 32)))
    network(images)
    assert shapes == [(27, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4), (10,)]


def test_half_precision_keeps_norms_and_losses_in_float32():
    network = cast(SMALL.network(), torch.float16, CPU)
    kinds = {name: p.dtype for name, p in network.named_parameters()}
    assert {kind for name, kind in kinds.items() if name.endswith("bias")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if name.endswith("weight")} == {torch.float16}
    assert norms_of(network)[0].running_var.dtype == torch.float32
    assert network.prep(torch.randn(8, 27, 4, 4).half()).dtype == torch.float16
    assert SMALL.loss(torch.zeros(1, 10).half(), torch.tensor([0])).dtype == torch.float32


def test_seed_alone_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed * 7)  # the global stream must not matter
        trained = [p for p in make_network(SMALL, seed).parameters() if p.requires_grad]
        return torch.cat([p.detach().flatten() for p in trained])

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_network(SMALL, 0)
    assert torch.equal(torch.rand(1), expected), "building a network must leave the global stream alone"
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_reset_network_is_a_fresh_one_but_for_its_whitening():
    used = cast(make_network(SMALL, seed=3), torch.float64, CPU)
    SMALL.whiten(used, torch.randn(9, 32, 32, 3, dtype=torch.float64))
    whitening = used.whitening.weight.clone()
    prepare_norms(used, 1, tracking=True)
    used(torch.randn(16, 3, 32, 32, dtype=torch.float64)).sum().backward()
    reset(used, SMALL, seed=4)
    assert list(frozen_weights(used)) == ["whitening.weight"]
    fresh = cast(make_network(SMALL, seed=4), torch.float64, CPU).state_dict() | {"whitening.weight": whitening}
    for name, tensor in fresh.items():
        assert torch.equal(used.state_dict()[name], tensor), name


def test_whitening_looks_at_the_first_ten_thousand_images():
    images = torch.rand(10_050, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    filters = []
    for seen in (images, images[:10_000]):
        Apple2019(width=4).whiten(network := Apple2019(width=4).network(), seen)
        filters.append(network.whitening.weight)
    assert torch.equal(*filters)


def test_whitening_through_32_channels_gives_what_27_give():
    draw = partial(torch.randn, dtype=torch.float64)
    images, filters, weight = draw(2, 3, 8, 8), draw(27, 3, 3, 3), draw(5, 27, 1, 1).requires_grad_()
    for channels in (27, 32):
        mixed = whiten_and_mix(images, filters, weight, channels)
        expected = torch.einsum("bchw,oc->bohw", F.conv2d(images, filters, padding=1), weight[:, :, 0, 0])
        torch.testing.assert_close(mixed, expected)
        gradients = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (mixed, expected)]
        torch.testing.assert_close(*gradients)
