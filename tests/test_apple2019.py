"""The default recipe: its ghost groups, precision and seeds. For its composition see test_oracle.py."""

import pytest
import torch
from conftest import CPU

from large_batch_cifar_10_fast.layers import norms_of, prepare_norms
from large_batch_cifar_10_fast.recipe import cast, frozen_weights, make_network, reset
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

SMALL = Apple2019(width=4, batch_size=16, ghost_batch=8)


@pytest.mark.parametrize(("batch_size", "ghost_batch"), [(256, 16), (512, 32), (64, 4)])
def test_a_batch_is_sixteen_ghost_groups_unless_told_otherwise(batch_size, ghost_batch):
    assert Apple2019(batch_size=batch_size).ghost_batch == ghost_batch
    assert {norm.ghost_batch for norm in norms_of(Apple2019(batch_size=batch_size, width=4).network())} == {ghost_batch}
    assert Apple2019(batch_size=batch_size, ghost_batch=8).ghost_batch == 8


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
