"""Shards are balanced and the same on any number of processes. Augmentation is that of one image by torchvision."""

import math

import numpy as np
import pytest
import torch
from conftest import CPU
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from large_batch_cifar_10_fast.data.shards import (
    assign_balanced,
    color_jitter,
    normalize,
    rotate_and_flip,
    upload_shards,
)
from large_batch_cifar_10_fast.core.devices import Precision
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.recipe import CIFAR_10_NORMALIZATION, images_of_an_epoch
from large_batch_cifar_10_fast.recipes import Apple2019, Basenet, FastAI, MuonRecipe

APPLE = Apple2019(batch_size=16)
MEAN, STD = NORMALIZATION = (100.5, 90.0, 140.0), (50.0, 40.0, 70.0)  # not CIFAR-10's
AUGMENTATION = FastAI().for_images(10, NORMALIZATION).augmentation


def _numbered(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images that carry their own number in every pixel (two digits to base 256), and labels."""
    numbers = np.arange(count)
    pixels = np.stack([numbers // 256, numbers % 256, numbers % 7], 1).astype(np.uint8)
    return np.broadcast_to(pixels[:, None, None], (count, 32, 32, 3)).copy(), numbers % 10


def _number(image: torch.Tensor) -> torch.Tensor:
    return image[:, 0, 0, 0].long() * 256 + image[:, 1, 0, 0].long()


def _indices(samples) -> torch.Tensor:
    return torch.cat([sample.indices for sample in samples])


def _batches(samples) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch for sample in samples for batch in sample.micro_batches()]


def _shards(rank=0, processes=1, micro_batches=1, recipe=APPLE, images=None):
    ctx = DistContext(rank, processes, CPU, recipe.workers)
    return upload_shards(*(images or _numbered(643)), recipe, ctx, micro_batches, compile=False)


@pytest.mark.parametrize("processes", [1, 4])
def test_shards_are_strided_disjoint_and_complete(processes):
    seen = {}
    for shards in (_shards(rank, processes) for rank in range(processes)):
        for workers, rows in shards.by_size():
            for worker, mine in zip(workers, rows, strict=True):
                seen[worker] = _number(shards.images[mine].permute(0, 3, 1, 2)).tolist()
    assert seen == {worker: list(range(worker, 643, 8)) for worker in range(8)}


def test_hard_examples_have_the_highest_losses_or_none_yet_and_keep_their_order_crops_and_flips():
    whole, half = (
        _shards(recipe=MuonRecipe(epochs=1, batch_size=10, workers=4, kept=kept), images=_numbered(640))
        for kept in ("1", "0.5")
    )
    losses = half.losses  # at first infinite
    losses[40:] = torch.rand(600, generator=torch.Generator().manual_seed(0))
    epochs = whole.epoch(3, 1), half.epoch(3, 1)
    assert [len(epoch) for epoch in epochs] == [16, 8]
    assert {*range(40)} <= {*_indices(epochs[1]).tolist()}, "images never seen"
    for worker in range(4):
        everything, found = (
            torch.stack([torch.cat([sample.tensors[i].view(4, 10)[worker] for sample in epoch]) for i in range(3)])
            for epoch in epochs
        )
        hard = losses[everything[0]] > losses[everything[0]].median()
        assert torch.equal(found, everything[:, hard])


def test_hard_examples_are_rounded_to_images_and_then_to_full_batches():
    recipe = MuonRecipe(epochs=2, batch_size=29, kept="1,0.29")
    assert [images_of_an_epoch(recipe, 100, epoch) for epoch in (1, 2)] == [87, 29], "0.29 * 100 is 28.999..."


@pytest.mark.parametrize("recipe", [APPLE, Basenet(batch_size=100), FastAI(batch_size=24), FastAI(batch_size=20)])
def test_a_batch_has_images_of_each_workers_shard_and_an_epoch_no_image_twice(recipe):
    shards, workers, size = _shards(recipe=recipe), recipe.workers, recipe.batch_size
    epoch, (full, last) = shards.epoch(seed=0, epoch=1), divmod(643 // workers, size)
    sizes = [size] * full + [last] * (last > 0 and recipe.whole_epochs)
    assert len(sizes) == len(epoch)
    indices = _indices(epoch).split(workers * size)
    for (images, labels), numbers, count in zip(_batches(epoch), indices, sizes, strict=True):
        assert (numbers % workers).tolist() == [worker for worker in range(workers) for _ in range(count)]
        assert torch.equal(labels, numbers % 10)
        assert images.shape == (workers * count, 3, 32, 32)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert isinstance(recipe, FastAI) or torch.equal(_number(images), numbers), "FastAI changes colors"
    assert len(_indices(epoch).unique()) == len(_indices(epoch))


@pytest.mark.parametrize("kept", ["1", "0.5"])
def test_all_but_the_draws_of_an_epoch_is_done_for_all_workers_at_once(kept):
    counts = []
    for workers in (2, 8):
        recipe = MuonRecipe(epochs=1, batch_size=10, workers=workers, kept=kept)
        shards = _shards(recipe=recipe, images=_numbered(40 * workers))
        with torch.autograd.profiler.profile() as profile:
            shards.epoch(0, 1)
        operations = [event.name for event in profile.function_events if event.cpu_parent is None]
        counts.append(sum("rand" not in name for name in operations))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("count", "options", "counts"),
    [(6250, 81, [77] * 68 + [78] * 13), (6250, 2, [3125] * 2), (1000, 300, [5] * 200)],  # 6250 = 81 x 77 + 13
)
def test_at_most_200_options_are_assigned_equally_often(count, options, counts):
    assigned, often = assign_balanced(count, options, [torch.Generator().manual_seed(0)]).unique(return_counts=True)
    assert sorted(often.tolist()) == counts
    assert assigned.max() > options - 50, "not the first 200 of 300"


def test_images_are_normalized_in_the_precision_of_the_weights():
    """As published (docs/method.md, section 2). NumPy rounds each of its operations to half precision, too."""
    pixels = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
    mean, deviation = np.array([125.31, 122.95, 113.87]), np.array([62.99, 62.09, 66.70])
    half, single = (
        (pixels.astype(dtype) - mean.astype(dtype)) / deviation.astype(dtype) for dtype in (np.float16, np.float32)
    )
    assert (half != single.astype(np.float16)).mean() > 0.2
    for precision, half_weights, expected in (("fp16", True, half), ("fp16", False, single), ("fp32", True, single)):
        found = normalize(torch.from_numpy(pixels), CIFAR_10_NORMALIZATION, Precision(precision, CPU, half_weights))
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0)


def _pixels(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_colours_change_as_torchvisions_do():
    images, factors = _pixels(6), torch.rand(3, 6, dtype=torch.float64) / 2 + 0.75
    changed = color_jitter(images, *factors)
    for image, brightness, contrast, saturation, ours in zip(images, *factors.tolist(), changed, strict=True):
        theirs = tv.adjust_contrast(tv.adjust_brightness(image, brightness), contrast)
        theirs = tv.adjust_saturation(theirs, saturation)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)  # whose weight of red is 0.2989, not 0.299
        assert not torch.allclose(ours, image, atol=0.01)


@pytest.mark.parametrize(("degrees", "flip"), [(-2.0, 0), (1.3, 1), (30.0, 1)])
def test_rotation_and_then_flip_are_torchvisions(degrees, flip):
    images = _pixels(2)
    ours = rotate_and_flip(images, torch.full((2,), degrees * math.pi / 180), torch.tensor([flip, 1 - flip]))
    theirs = tv.rotate(images, degrees, interpolation=InterpolationMode.NEAREST)
    theirs[1 - flip] = tv.horizontal_flip(theirs[1 - flip])
    same = (ours == theirs).all(1).double().mean()
    assert same > 0.995, "but for pixels half-way between two"
    assert (ours == 0).any() == (abs(degrees) > 1.9), "corners from outside are black"


def test_an_augmented_batch_is_normalised_again_and_nothing_is_drawn_twice():
    bytes_ = (255 * _pixels(50)).round().to(torch.uint8).permute(0, 2, 3, 1)
    images, rows = normalize(bytes_, NORMALIZATION, Precision("fp64", CPU)), torch.arange(50)
    choices = [column[0] for column in AUGMENTATION.sample(50, [torch.Generator().manual_seed(3)], [], 1)]
    batch = AUGMENTATION(images, rows, *choices)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    pixels = batch * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert pixels.min() > -1e-3
    assert pixels.max() < 255.001
    nothing = (torch.full((50,), 40), torch.zeros(50, dtype=torch.int64), *torch.ones(3, 50), torch.zeros(50))
    torch.testing.assert_close(AUGMENTATION(images, rows, *nothing), images.permute(0, 3, 1, 2))
    for drawn, low, high in zip(choices[2:], [0.75] * 3 + [-math.pi / 90], [1.25] * 3 + [math.pi / 90], strict=True):
        assert low <= drawn.min() < low + (high - low) / 5
        assert high - (high - low) / 5 < drawn.max() <= high
    assert len({tuple(drawn.tolist()) for drawn in choices}) == 6


def test_half_precision_images_are_augmented_in_float32():
    """As on GPUs, which store them so."""
    precision = Precision("fp16", CPU, half_weights=False)
    images = normalize((255 * _pixels(20)).to(torch.uint8).permute(0, 2, 3, 1), NORMALIZATION, precision).half()
    choices = [column[0] for column in AUGMENTATION.sample(20, [torch.Generator().manual_seed(3)], [], 1)]
    assert Precision("fp16", torch.device("cuda"), half_weights=False).images == images.dtype
    expected = AUGMENTATION(images.float(), torch.arange(20), *choices).half()
    assert torch.equal(AUGMENTATION(images, torch.arange(20), *choices), expected)
