"""Shards and augmentation: balanced, within the shard, the same on any number of processes."""

import numpy as np
import pytest
import torch
from conftest import CPU

from large_batch_cifar_10_fast.data.shards import assign_balanced, normalize, upload_shards
from large_batch_cifar_10_fast.devices import Precision
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.recipe import CIFAR_10_NORMALIZATION, images_of_an_epoch
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.basenet import Basenet
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe

APPLE = Apple2019(batch_size=16)
CROP_AND_FLIP = APPLE.augmentation


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


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
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


def test_a_batch_of_fewer_pixels_is_channels_last():
    recipe = MuonRecipe(epochs=1, batch_size=40, pixels="24", kept="1")
    for images, _ in _batches(_shards(recipe=recipe, images=_numbered(120)).epoch(0, 1)):
        assert images.shape == (40, 3, 24, 24)
        assert images.is_contiguous(memory_format=torch.channels_last)


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
