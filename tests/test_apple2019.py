"""apple2019 against the method as docs/method.md says it, of stock layers and plain formulas, in float64.

The reference takes the ghost groups of the workers one after the other, each by itself through nn.BatchNorm2d. Shared
with the program are the signs of the whitening filters, and which image gets which crop and side; what is promised of
that is tested below.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU
from test_oracle import SEED, as_input, check_run, crops_of, hyp_of, initial_weights, trained_by, trained_weights
from torch import nn
from torch.testing import assert_close

from large_batch_cifar_10_fast import apple2019
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes

WIDTH, EPOCHS, BATCH = 3, 3, 16
COMMAND = f"apple2019 --workers 2 --batch_size {BATCH} --ghost_batch 8 --width {WIDTH} --epochs {EPOCHS} --ema_ep 1"


def conv_norm(channels_in, channels_out, size=3, pool=1):
    convolution = nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False)
    norm = nn.BatchNorm2d(channels_out)
    norm.weight.requires_grad_(False)  # stays 1
    return nn.Sequential(convolution, nn.MaxPool2d(pool), norm, nn.CELU(0.3))


class Reference(nn.Module):
    """Section 3."""

    def __init__(self, filters) -> None:
        super().__init__()
        w = WIDTH
        self.filters = filters
        self.prep = conv_norm(27, w, size=1)
        self.layer1 = conv_norm(w, 2 * w, pool=2)
        self.residual1 = nn.Sequential(conv_norm(2 * w, 2 * w), conv_norm(2 * w, 2 * w))
        self.layer2 = conv_norm(2 * w, 4 * w, pool=2)
        self.layer3 = conv_norm(4 * w, 8 * w, pool=2)
        self.residual3 = nn.Sequential(conv_norm(8 * w, 8 * w), conv_norm(8 * w, 8 * w))
        self.head = nn.Linear(8 * w, 10, bias=False)

    def forward(self, images):
        x = self.layer1(self.prep(F.conv2d(images, self.filters, padding=1)))
        x = self.layer3(self.layer2(x + self.residual1(x)))
        x = F.max_pool2d(x + self.residual3(x), 4).flatten(1)
        return self.head(x) / 16


def rate(epoch):
    """Return L in section 4: to 1.5 at a fifth of the epochs, to 0.15 at `ema_ep` before the end, then constant."""
    peak, constant = EPOCHS / 5, EPOCHS - 1
    if epoch < peak:
        return 1.5 * epoch / peak
    return 1.5 + (0.15 - 1.5) * min(1, (epoch - peak) / (constant - peak))


def update(name, w, g, v, epoch):
    lr, decay = rate(epoch) / BATCH, 5e-4 * 1.5 * BATCH
    if w.ndim == 1:
        lr, decay = 64 * lr, decay / 64
    d = -lr * (g + decay * w)
    v[:] = 0.9 * v + d
    return w + d + 0.9 * v


def whitening_filters(images):
    """Return the eigenvectors of section 3, scaled, of images [n, 3, 32, 32]; their signs are anyone's."""
    patches = F.unfold(images, 3).transpose(1, 2).flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    filters = (vectors / np.sqrt(values + 0.01)).T[::-1].copy()
    return torch.from_numpy(filters).view(27, 3, 3, 3)


def plan(hyp, images, epoch, workers):
    steps = images // workers // hyp.batch_size
    return apple2019.plan_epoch(hyp, images, steps, Team(0, 1, CPU, workers), SEED, epoch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistics", "momenta"),
    [
        ("first", [0.1, 0, 0, 0]),  # only worker 0's first group counts, section 5
        ("average", [0.05 / 0.95, 0.05, 0, 0]),  # both of worker 0's groups count for a twentieth
    ],
)
def test_a_whole_run_is_the_method_to_nine_digits(statistics, momenta):
    command = f"{COMMAND} --eval_stats {statistics}"
    _, hyp = hyp_of(command)
    arrays = draw_shapes(2 * BATCH * 3 + 7, 41)
    epochs = trained_by(command, arrays)
    filters = whitening_filters(as_input(arrays[0][::2]))
    found = epochs[-1].network.whitening.weight
    signs = (found * filters).sum((1, 2, 3)).sign().view(-1, 1, 1, 1)
    assert_close(found, signs * filters, rtol=1e-7, atol=1e-9)

    torch.manual_seed(SEED)
    network = Reference(found)  # whose stock layers have PyTorch's initial weights
    for weight, value in zip(trained_weights(network).values(), initial_weights(apple2019, hyp).values(), strict=True):
        assert torch.equal(weight, value)

    def batches(epoch, latest_losses):
        return [(batch[0], crops_of(arrays[0], batch)) for batch in plan(hyp, len(arrays[0]), epoch, workers=2)]

    def evaluate(network, x, is_last):
        return (network(x) + network(x.flip(3))) / 2

    check_run(command, arrays, epochs, network, update, torch.sum, batches, momenta, 0.2, evaluate)


def test_each_worker_takes_its_own_images_once_an_epoch_cropped_and_mirrored_evenly():
    """Section 2."""
    hyp = apple2019.Hyp(batch_size=4, ghost_batch=2)
    seen = [torch.stack(plan(hyp, 8 * 100, epoch, workers=8)) for epoch in (1, 2)]  # [steps, 3, 8 * 4]
    assert not torch.equal(*seen)
    orders = set()
    for worker, (rows, crops, flips) in enumerate(seen[0].view(25, 3, 8, 4).permute(2, 1, 0, 3).flatten(2)):
        assert (rows % 8 == worker).all()
        assert len(rows.unique()) == 100
        assert crops.bincount(minlength=81).tolist() == pytest.approx([100 / 81] * 81, abs=1)
        assert flips.sum().item() == pytest.approx(50, abs=1)
        assert rows.diff().abs().float().mean() > 100, "they are shuffled"
        orders.add(tuple((rows // 8).tolist()))
    assert len(orders) == 8, "each worker has random numbers of its own"


def test_offsets_in_random_order_are_dealt_to_images_in_random_order():
    """Section 2. In order, the first offsets would have the images left over, and neighbours the same crop."""
    draws = torch.Generator().manual_seed(1)
    first, second = ({*apple2019.balanced_assignment(40, 81, draws).tolist()} for _ in range(2))
    assert len(first) == len(second) == 40
    assert first != second
    crops = apple2019.balanced_assignment(810, 81, draws)
    assert (crops.diff() == 0).double().mean() < 0.1


def test_a_batch_is_sixteen_ghost_groups():
    assert [apple2019.Hyp(batch_size=size).actual_ghost_batch for size in (64, 256, 512)] == [4, 16, 32]
