"""The ladder: every rung hands over the same images, and is timed to its end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from large_batch_cifar_10_fast.data.shards import MEAN, STD, normalise, upload_shards
from large_batch_cifar_10_fast.measuring import ladder
from large_batch_cifar_10_fast.recipes.page import Page
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, 1)


def _ladder(images, labels):
    shards = upload_shards(images, labels, Page(batch_size=16), ALONE, 1)
    return ladder.rungs(images, labels, replace(shards, images=normalise(shards.images, torch.float32)), 1)


@pytest.mark.slow
def test_every_rung_of_the_ladder_hands_over_every_image_cut_and_mirrored():
    """Images that differ in one grey each: what is handed over can be told by it."""
    greys = np.arange(40) * 6
    images = np.broadcast_to(greys[:, None, None, None], (40, 32, 32, 3)).astype(np.uint8).copy()
    for rung in _ladder(images, np.arange(40) % 10):
        batches = list(rung.epoch())
        assert [len(labels) for _, labels in batches] == [16, 16, 8], rung.name
        pixels = torch.cat([batch[:, 0, 5, 5] for batch, _ in batches]) * STD[0] + MEAN[0]
        numbers = (pixels / 6).round().long()
        assert sorted(numbers.tolist()) == list(range(40)), rung.name
        assert torch.equal(numbers % 10, torch.cat([labels for _, labels in batches])), rung.name


def test_crops_by_hand_are_those_of_the_padded_image():
    image = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)), mode="reflect")
    dataset = ladder.Prepared(image, np.array([3]), in_bulk=True)
    dataset.choices = [[2, 7, 1]]
    crop, label = dataset[0]
    expected = (padded[2:34, 7:39][:, ::-1] - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(crop.permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert label == 3


def test_a_rung_is_timed_to_its_end_or_at_the_pace_seen(monkeypatch):
    """Three seconds to start, one a batch."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def epoch():
        now[0] += 3
        yield from range(10)

    def work(batch):
        now[0] += 1

    rung, world = ladder.Rung("", None, epoch), ALONE
    assert ladder.seconds_of_an_epoch(rung, work, 10, 10, world) == 13
    assert ladder.seconds_of_an_epoch(rung, work, 4, 10, world) == 13


def test_rounds_go_up_and_down_and_the_table_tells_their_medians(monkeypatch):
    climbed, pace = [], iter(range(100))
    monkeypatch.setattr(ladder, "seconds_of_an_epoch", lambda rung, *_: climbed.append(rung.name) or next(pace))
    both = [ladder.Rung(name, published, None) for name, published in (("low", 323), ("high", None))]
    seconds = ladder.seconds_of_rungs(both, None, 1, 1, 3, ALONE)
    assert climbed == ["low"] * 2 + ["high"] * 4 + ["low"] * 4 + ["high"] * 2
    assert seconds == {"low": ([0, 6, 8], [1, 7, 9], 323), "high": ([2, 4, 10], [3, 5, 11], None)}
    assert "| low | 6.00 (0.00 to 8.00) | 7.0 (1.0 to 9.0) | 323 |" in ladder.as_table(seconds)
    assert "| low | 6.00 | 7.0 | 323 |" in ladder.as_table({"low": ([6], [7], 323)})
