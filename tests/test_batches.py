"""Batches: each worker's own images, hard examples, normalization; augmentation is that of one image by torchvision."""

import math

import numpy as np
import pytest
import torch
from conftest import CPU
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from large_batch_cifar_10_fast import fastai, muon, page
from large_batch_cifar_10_fast.core import data
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.core.data import CIFAR_10_NORMALIZATION, Images
from large_batch_cifar_10_fast.core.precision import Precision
from large_batch_cifar_10_fast.core.team import Team

MEAN, STD = NORMALIZATION = (100.5, 90.0, 140.0), (50.0, 40.0, 70.0)  # not CIFAR-10's
DOUBLE = Precision("fp64", CPU, half_weights=False)


@pytest.mark.parametrize("processes", [1, 4])
def test_image_i_belongs_to_worker_i_mod_8_whatever_process_has_it(processes):
    """Images carry their own number in every pixel, two digits to base 256."""
    numbers = np.arange(643)
    pixels = np.stack([numbers // 256, numbers % 256, numbers % 7], 1).astype(np.uint8)
    images = np.broadcast_to(pixels[:, None, None], (643, 32, 32, 3))
    whole = Images("", images, numbers % 10, images, numbers % 10, [], NORMALIZATION)
    seen = {}
    for rank in range(processes):
        team = Team(rank, processes, CPU, 8)
        shards = data.upload(whole, Clock(lambda: None), team, DOUBLE)
        found = (shards.images[:, 0, 0] * torch.tensor(STD) + torch.tensor(MEAN)).round().long()
        assert data.count_own(643, team) == len(found)
        for number, worker in enumerate(team.workers):
            rows = data.shard(number, len(team.workers), len(found), CPU)
            seen[worker] = (256 * found[rows, 0] + found[rows, 1]).tolist()
            assert torch.equal(shards.labels[rows], torch.tensor(seen[worker]) % 10)
    assert seen == {worker: list(range(worker, 643, 8)) for worker in range(8)}


def test_kept_images_are_rounded_to_images_and_then_to_full_batches():
    hyp = muon.Hyp(epochs=2, batch_size=29, kept=(1, 0.29))
    assert muon.steps_by_epoch(hyp, 100) == [3, 1], "0.29 * 100 is 28.999..."


def test_an_image_is_mirrored_in_every_other_epoch():
    """At random in the first epoch, then on the other side."""
    hyp = muon.Hyp(epochs=3, batch_size=1000, kept=(1,))
    sides = []
    for epoch in (1, 2, 3):
        [(rows, _, flips)] = muon.plan_epoch(hyp, torch.zeros(1000), 1, Team(0, 1, CPU, 1), 3, epoch)
        sides.append(flips[rows.argsort()])
    assert torch.equal(sides[1], 1 - sides[0])
    assert torch.equal(sides[2], sides[0])
    assert 450 < sides[0].sum() < 550


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (1, page.plan_epoch(page.Basenet(batch_size=100), 643, CPU, seed=0, epoch=1)),
        (8, fastai.plan_epoch(fastai.Hyp(batch_size=24), 643, Team(0, 1, CPU, 8), seed=0, epoch=1)),
        (8, fastai.plan_epoch(fastai.Hyp(batch_size=20), 643, Team(0, 1, CPU, 8), seed=0, epoch=1)),
    ],
    ids=["basenet", "fastai", "fastai without a short batch"],
)
def test_an_epoch_takes_each_image_once_with_a_short_last_batch_of_all_workers(workers, plan):
    """Shards count as long as the shortest: 643 images are 80 for each of eight workers."""
    rows = [batch[0].long() for batch in plan]
    size = len(rows[0])
    full, last = divmod(643 // workers * workers, size)
    assert [len(step) for step in rows] == full * [size] + [last] * (last > 0)
    for step in rows:
        assert (step % workers).tolist() == [worker for worker in range(workers) for _ in range(len(step) // workers)]
    assert len(torch.cat(rows).unique()) == 643 // workers * workers
    assert all(batch.is_contiguous() for batch in plan)


def test_images_are_normalized_in_the_precision_of_the_weights():
    """As published (docs/method.md, section 2). NumPy rounds each of its operations to half precision, too."""
    pixels = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
    expected = {}
    for dtype in (np.float16, np.float32):
        mean = np.array([125.31, 122.95, 113.87]).astype(dtype)
        deviation = np.array([62.99, 62.09, 66.70]).astype(dtype)
        expected[dtype] = (pixels.astype(dtype) - mean) / deviation
    assert (expected[np.float16] != expected[np.float32].astype(np.float16)).mean() > 0.2
    for name, half_weights, dtype in (
        ("fp16", True, np.float16),
        ("fp16", False, np.float32),
        ("fp32", True, np.float32),
    ):
        precision = Precision(name, CPU, half_weights)
        found = data.normalize(torch.from_numpy(pixels), CIFAR_10_NORMALIZATION, precision)
        torch.testing.assert_close(found, torch.from_numpy(expected[dtype]), rtol=0, atol=0)


def random_pixels(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_colors_change_as_torchvisions_do():
    images = random_pixels(6)
    factors = torch.rand(3, 6, dtype=torch.float64) / 2 + 0.75
    changed = fastai.color_jitter(images, *factors)
    for image, brightness, contrast, saturation, ours in zip(images, *factors.tolist(), changed, strict=True):
        theirs = tv.adjust_contrast(tv.adjust_brightness(image, brightness), contrast)
        theirs = tv.adjust_saturation(theirs, saturation)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)  # whose weight of red is 0.2989, not 0.299
        assert not torch.allclose(ours, image, atol=0.01)


@pytest.mark.parametrize(("degrees", "flip"), [(-2.0, 0), (1.3, 1), (30.0, 1)])
def test_rotation_and_then_flip_are_torchvisions(degrees, flip):
    images = random_pixels(2)
    angles = torch.full((2,), degrees * math.pi / 180)
    ours = fastai.rotate_and_flip(images, angles, torch.tensor([flip, 1 - flip]))
    theirs = tv.rotate(images, degrees, interpolation=InterpolationMode.NEAREST)
    theirs[1 - flip] = tv.horizontal_flip(theirs[1 - flip])
    same = (ours == theirs).all(1).double().mean()
    assert same > 0.995, "but for pixels half-way between two"
    assert (ours == 0).any() == (abs(degrees) > 1.9), "corners from outside are black"


def batch_of_fastai(images: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return fastai.make_batch(images, torch.zeros(len(images), dtype=torch.int64), plan, NORMALIZATION)[0]


def test_fastais_batch_is_normalized_again_and_its_changes_have_their_limits():
    pixels = (255 * random_pixels(50)).round().to(torch.uint8).permute(0, 2, 3, 1)
    images = data.normalize(pixels, NORMALIZATION, DOUBLE)
    plan = fastai.plan_epoch(fastai.Hyp(batch_size=50, entry="one_gpu"), 50, Team(0, 1, CPU, 1), seed=3, epoch=1)[0]
    batch = batch_of_fastai(images, plan)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    values = batch * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert values.min() > -1e-3
    assert values.max() < 255.001
    nothing = torch.zeros(7, 50, dtype=torch.float64)
    nothing[0] = torch.arange(50)
    nothing[1] = 40  # the crop in the middle
    nothing[3:6] = 1  # factors
    torch.testing.assert_close(batch_of_fastai(images, nothing), images.permute(0, 3, 1, 2))
    for drawn, low, high in zip(plan[3:], [0.75] * 3 + [-math.pi / 90], [1.25] * 3 + [math.pi / 90], strict=True):
        assert low <= drawn.min() < low + (high - low) / 5
        assert high - (high - low) / 5 < drawn.max() <= high
    assert len({tuple(drawn.tolist()) for drawn in plan}) == 7, "nothing is drawn twice"
