"""What the oracles of the recipes do not show of the optimizers."""

import torch
from conftest import ALONE, CPU

from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.optim import orthogonal, orthogonal_directions


def test_muon_levels_the_singular_values_of_a_batch_of_matrices():
    matrices = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonal(1000 * matrices))
    assert 0.5 < singular.min() < singular.max() < 1.3
    with torch.autocast("cpu", torch.bfloat16):
        assert orthogonal(matrices).dtype == torch.float32, "as the weights, whatever the products are in"


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
