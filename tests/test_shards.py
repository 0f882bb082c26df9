"""Shards and augmentation: balanced, within the shard, the same on any number of processes."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, random_pictures

from large_batch_cifar_10_fast.data.augment import CropAndAlternateFlip, assign_balanced, assign_independent
from large_batch_cifar_10_fast.data.shards import normalize, shuffle_shards, upload_shards, upload_test
from large_batch_cifar_10_fast.devices import Precision
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.recipe import images_of_an_epoch
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


def test_an_epoch_of_fewer_pixels_has_the_batches_of_32_scaled_down():
    images = random_pictures(120)
    large, small = (
        _shards(recipe=MuonRecipe(epochs=2, batch_size=40, pixels=pixels, kept="1"), images=images)
        for pixels in ("32", "24,32")
    )
    both = (_batches(shards.epoch(0, 1)) for shards in (large, small))
    for (whole, labels), (scaled, same_labels) in zip(*both, strict=True):
        torch.testing.assert_close(scaled, F.interpolate(whole, (24, 24), mode="bilinear"))
        assert scaled.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, same_labels)


def test_hard_examples_have_the_highest_losses_or_none_yet_and_keep_their_order_crops_and_flips():
    whole, half = (
        _shards(recipe=MuonRecipe(epochs=1, batch_size=10, workers=4, kept=kept), images=_numbered(640))
        for kept in ("1", "0.5")
    )
    losses = half.initial_losses()
    losses[40:] = torch.rand(600, generator=torch.Generator().manual_seed(0))
    epochs = whole.epoch(3, 1, losses), half.epoch(3, 1, losses)
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


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (4, 1), (8, 1), (1, 2), (1, 8), (2, 4)])
def test_batches_do_not_depend_on_processes_or_micro_batches(processes, micro_batches):
    parts = [_shards(rank, processes, micro_batches).epoch(seed=5, epoch=3) for rank in range(processes)]
    for (images, labels), *samples in zip(_batches(_shards().epoch(seed=5, epoch=3)), *parts, strict=True):
        pieces = _batches(samples)
        assert torch.equal(torch.cat([piece[0] for piece in pieces]), images)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), labels)


def test_each_worker_draws_from_a_stream_of_its_own_by_seed_and_epoch():
    recipe = Apple2019(batch_size=100, ghost_batch=10)
    [sample] = _shards(recipe=recipe, images=_numbered(800)).epoch(seed=5, epoch=3)
    for worker, *found in zip(range(8), *(tensor.view(8, 100) for tensor in sample.tensors), strict=True):
        [key] = np.random.SeedSequence([5, worker, 3]).generate_state(1, np.uint64)
        randperm = partial(torch.randperm, generator=torch.Generator().manual_seed(int(key) // 2))
        crops, flips = (randperm(options)[randperm(100).argsort() * options // 100] for options in (81, 2))
        order = randperm(100)
        for tensor, expected in zip(found, (torch.arange(worker, 800, 8), crops, flips), strict=True):
            assert torch.equal(tensor, expected[order])


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


def test_crops_and_flips_are_independent_of_the_order():
    [rows], [offsets], [flips] = shuffle_shards(torch.arange(81 * 200)[None], CROP_AND_FLIP, 1, [0], epoch=1)
    for a, b in ((rows, offsets), (rows, flips), (offsets, flips)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_flips_alternate_from_epoch_to_epoch_and_differ_from_run_to_run():
    rows, augmentation = torch.arange(200)[None], MuonRecipe().augmentation
    assert augmentation == CropAndAlternateFlip(padding=2, assign=assign_independent)

    def flips(seed, worker, epoch):
        [order], crops, [mirrored] = shuffle_shards(rows, augmentation, seed, [worker], epoch)
        assert crops.min() == 0
        assert crops.max() == 24
        return mirrored[order.argsort()]

    first = flips(1, 0, 1)
    assert 60 < first.sum() < 140
    assert torch.equal(flips(1, 0, 2), 1 - first)
    assert torch.equal(flips(1, 0, 3), first)
    for other in (flips(2, 0, 1), flips(1, 1, 1)):
        assert 60 < (other == first).sum() < 140


def test_one_gather_is_reflection_padding_then_crop_then_flip():
    images = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 32, 32, 3)))
    rows = torch.tensor([2, 0, 3, 3, 1])
    offsets, flips = torch.tensor([0, 80, 40, 13, 67]), torch.tensor([0, 1, 1, 0, 1])
    padded = F.pad(images.permute(0, 3, 1, 2), (4, 4, 4, 4), mode="reflect")
    batch = CROP_AND_FLIP(images, rows, offsets, flips)
    for found, row, offset, flip in zip(batch, rows, offsets, flips, strict=True):
        y, x = divmod(int(offset), 9)
        crop = padded[row, :, y : y + 32, x : x + 32]
        assert torch.equal(found, crop.flip(2) if flip else crop)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_images_are_normalized_in_the_precision_of_the_weights():
    """As published (docs/method.md, section 2). NumPy rounds each of its operations to half precision, too."""
    pixels = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
    mean, deviation = np.array([125.31, 122.95, 113.87]), np.array([62.99, 62.09, 66.70])
    half, single = (
        (pixels.astype(dtype) - mean.astype(dtype)) / deviation.astype(dtype) for dtype in (np.float16, np.float32)
    )
    assert (half != single.astype(np.float16)).mean() > 0.2
    for precision, half_weights, expected in (("fp16", True, half), ("fp16", False, single), ("fp32", True, single)):
        found = normalize(torch.from_numpy(pixels), Precision(precision, CPU, half_weights))
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0)


def test_the_test_images_are_shared_out_once_each():
    worlds = [DistContext(rank, 4, CPU, 8) for rank in range(4)]
    shares = [upload_test(*_numbered(11), ctx)[0].permute(0, 3, 1, 2) for ctx in worlds]
    assert sorted(torch.cat([_number(share) for share in shares]).tolist()) == list(range(11))
