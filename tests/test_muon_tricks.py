"""What the Muon recipe does to weights and images besides: flips, sizes, views."""

import pytest
import torch
from conftest import train_here

from large_batch_cifar_10_fast.data.augment import CropAndAlternateFlip, assign_independent, downscale
from large_batch_cifar_10_fast.data.shards import shuffle_shards
from large_batch_cifar_10_fast.metrics import ONE_VIEW, SIX_VIEWS, TWO_VIEWS
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe


def test_flips_alternate_from_epoch_to_epoch_and_differ_from_run_to_run():
    rows, augmentation = torch.arange(200)[None], CropAndAlternateFlip(padding=2, assign=assign_independent)

    def flips(seed, worker, epoch):
        [order], crops, [mirrored] = shuffle_shards(rows, augmentation, seed, [worker], epoch)
        assert crops.min() == 0
        assert crops.max() == 24
        return mirrored[order.argsort()]

    assert MuonRecipe().augmentation == augmentation
    first = flips(1, 0, 1)
    assert 60 < first.sum() < 140
    assert torch.equal(flips(1, 0, 2), 1 - first)
    assert torch.equal(flips(1, 0, 3), first)
    for other in (flips(2, 0, 1), flips(1, 1, 1)):
        assert 60 < (other == first).sum() < 140


def test_images_are_scaled_down_bilinearly_and_whole():
    ramp = torch.linspace(0, 31, 32, dtype=torch.float64).expand(1, 3, 32, 32).contiguous()
    small = downscale(ramp.to(memory_format=torch.channels_last), 24)
    torch.testing.assert_close(small[0, 0, 0], (torch.arange(24, dtype=torch.float64) + 0.5) * 32 / 24 - 0.5)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert downscale(ramp, 32) is ramp


def test_six_views_are_weighted_and_shifted_by_a_pixel():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    seen = {}

    def network(view):
        seen[tuple(view[0, 0, 0].tolist())] = view[0, 0, :, 0].tolist()
        return view[0, 0, 0, :1]

    logits = SIX_VIEWS(network, image.permute(0, 2, 3, 1))
    assert seen == {
        (0, 1, 2, 3): [0, 4, 8, 12],
        (3, 2, 1, 0): [3, 7, 11, 15],
        (5, 6, 7, 6): [5, 9, 13, 9],  # up and left: reflected at the far ends
        (6, 7, 6, 5): [6, 10, 14, 10],
        (5, 4, 5, 6): [5, 1, 5, 9],
        (6, 5, 4, 5): [6, 2, 6, 10],
    }
    assert logits.item() == (0 + 3) / 4 + (5 + 6 + 5 + 6) / 8


def test_views_of_half_precision_are_averaged_in_float32():
    def network(batch):
        return (1 + batch[:, 0, 0, :1] / 128).to(torch.bfloat16)

    image = torch.tensor([0.0, 1]).view(1, 1, 2, 1)
    assert TWO_VIEWS(network, image).item() == 1 + 1 / 256, "which bfloat16 would round to 1"


@pytest.mark.parametrize(("epochs", "seen"), [(1, ["all"]), (3, ["one", "one", "all"])])
def test_all_views_are_taken_after_the_last_epoch_alone(epochs, seen, tiny_npz, tmp_path, monkeypatch):
    """Five more of each image after every epoch would take a CPU minutes of a run."""
    taken = []

    def looking(name):
        return staticmethod(lambda *arguments: taken.append(name) or ONE_VIEW(*arguments))

    monkeypatch.setattr(MuonRecipe, "tta", looking("all"))
    monkeypatch.setattr(MuonRecipe, "tta_early", looking("one"))
    options = ["--recipe", "muon", "--width", 2, "--batch_size", 200, "--epochs", epochs, "--pixels", "9"]
    train_here(*options, "--no_warmup", "--precision", "fp32", "--data", tiny_npz, "--out", tmp_path)
    assert taken == seen
