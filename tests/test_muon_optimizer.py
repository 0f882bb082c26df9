"""Muon, the optimiser, against its formula; and the rates that the recipe gives it."""

import pytest
import torch
from conftest import ALONE, CPU

from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.optim import follow_schedules, orthogonal, orthogonal_directions
from large_batch_cifar_10_fast.recipes.muon import Muon2024


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (3, 8, 20), (20, 8)])
def test_orthogonal_keeps_directions_and_levels_their_sizes(shape):
    random = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(random, full_matrices=False)
    # Well-conditioned, which a random square one is not.
    s = torch.linspace(3, 1, s.shape[-1], dtype=torch.float64).expand_as(s)
    matrix = u * s[..., None, :] @ v
    made = orthogonal(matrix)
    levelled = u.mT @ made @ v.mT
    sizes = levelled.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(levelled, torch.diag_embed(sizes), rtol=0, atol=1e-9)
    expected = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(3):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(sizes, expected)
    assert 0.5 < sizes.min() < sizes.max() < 1.3
    torch.testing.assert_close(orthogonal(1000 * matrix), made)


def test_over_its_200_steps_rates_fall_from_the_published_ones_to_zero():
    network = Muon2024().network()
    optimizers = Muon2024().optimizers(network, ALONE)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {id(weight): group for group in groups for weight in group["params"]}
    filters, bias = network.groups[2][4].weight, network.groups[2][5].bias
    watched = [rates[id(weight)] for weight in (filters, bias, network.whitening.bias, network.linear.weight)]
    assert len(rates) == len(list(network.parameters())) - 1, "all but the whitening's filters"
    for step, expected in {
        1: (0.24, 0.053, 0.053, 0.67),
        26: (0.21, 0.046375, 0.053 * 2 / 3, 0.58625),
        76: (0.15, 0.033125, 0, 0.41875),  # the first of the fourth epoch, from which on it rests
        101: (0.12, 0.0265, 0, 0.335),
        200: (0.0012, 0.000265, 0, 0.00335),
        201: (0, 0, 0, 0),
    }.items():
        follow_schedules(optimizers, step / 25)
        assert [group["lr"] for group in watched] == pytest.approx(expected, abs=1e-12), step


def test_the_processes_share_the_matrices_and_their_sum_is_that_of_one():
    generator, shapes = torch.Generator().manual_seed(0), [(6, 36), (5, 18), (6, 36), (7, 63)]
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def directions(ctx):
        momenta = [torch.ones_like(gradient) for gradient in gradients]
        return orthogonal_directions(gradients, momenta, 0.6, ctx)

    shares = [directions(DistContext(rank, 3, CPU, 3)) for rank in range(3)]
    makers = [[bool(share[i].any()) for share in shares] for i in range(4)]
    assert [sum(made) for made in makers] == [1, 1, 1, 1], "each matrix by one process"
    assert makers[3] == [True, False, False], "the largest first"
    for expected, *made in zip(directions(ALONE), *shares, strict=True):
        torch.testing.assert_close(sum(made), expected, rtol=1e-12, atol=1e-12)


def test_muon_multiplies_in_the_precision_of_autocast():
    matrix = torch.randn(8, 20)
    with torch.autocast("cpu", torch.bfloat16):
        half = orthogonal(matrix)
    assert half.dtype == torch.float32
    assert 1e-4 < (half - orthogonal(matrix)).abs().max() < 0.05
