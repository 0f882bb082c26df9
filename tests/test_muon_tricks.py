"""What the Muon recipe does to weights and images besides: averages, flips, shades, sizes, views."""

import pytest
import torch
from conftest import train_here
from torch import nn

from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.training.augmentation import CropAndAlternate, Shaded, draw_independently, scaled_down
from large_batch_cifar_10_fast.training.averaging import PulledToAverage
from large_batch_cifar_10_fast.training.shards import deal_epoch
from large_batch_cifar_10_fast.training.views import ONE_VIEW, SIX_VIEWS, TWO_VIEWS, AgainWhereUnsure, Averaged
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, 1)


def test_weights_are_pulled_to_their_average_every_few_steps_once_it_begins():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer, seen = PulledToAverage([{"params": [weight]}], decay=0.7, every=2), []
    for step in range(6):
        optimizer.param_groups[0]["averaging"] = float(step >= 1)
        with torch.no_grad():
            weight += 1
        optimizer.step()
        seen.append(weight.item())
    # begins with 3; two steps later it is 0.7 * 3 + 0.3 * 5; and again
    assert seen == pytest.approx([2, 3, 4, 3.6, 4.6, 0.7 * 3.6 + 0.3 * 5.6])


def test_a_tail_has_a_constant_small_rate_and_averages_what_is_trained():
    recipe = MuonRecipe(epochs=8, tail_epochs=0.5)
    network = recipe.network()
    muon, sgd, average = recipe.optimizers(network, ALONE)
    falling = muon.param_groups[0]["schedules"]["lr"]
    known = {0.04: 0.24, 3.79: 0.24 * (1 - 0.95 / 2), 7.54: 0.24 * 0.05, 8: 0.24 * 0.05}
    assert {epoch: falling(epoch) for epoch in known} == pytest.approx(known)
    (group,) = average.param_groups
    assert [group["schedules"]["averaging"](epoch) for epoch in (7.46, 7.5, 8)] == [0, 1, 1]
    averaged = {id(weight) for weight in group["params"]}
    trained = {id(weight) for o in (muon, sgd) for g in o.param_groups for weight in g["params"]}
    assert averaged == trained - {id(network.whitening.bias)}
    assert len(MuonRecipe(tail_epochs=0).optimizers(network, ALONE)) == 2


def test_flips_alternate_from_epoch_to_epoch_and_differ_from_run_to_run():
    rows, augmentation = torch.arange(200), CropAndAlternate(padding=2, deal=draw_independently)

    def flips(seed, worker, epoch):
        order, crops, mirrored = deal_epoch(rows, augmentation, seed, worker, epoch)
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


def test_shades_change_contrast_and_brightness_of_each_image():
    augmentation = MuonRecipe(brightness=0.14, contrast=0.13).augmentation
    assert augmentation == Shaded(CropAndAlternate(2, draw_independently), brightness=0.14, contrast=0.13)
    images, generator = torch.randn(400, 32, 32, 3), torch.Generator()
    _, flips, factors, offsets = augmentation.choose(400, generator, torch.Generator(), 1)
    assert 0.87 <= factors.min() < 0.88 < 1.12 < factors.max() <= 1.13
    assert -0.14 <= offsets.min() < -0.13 < 0.13 < offsets.max() <= 0.14
    batch = augmentation(images, torch.arange(400), torch.full((400,), 12), torch.zeros_like(flips), factors, offsets)
    torch.testing.assert_close(batch[7], images[7].permute(2, 0, 1) * factors[7] + offsets[7])
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_images_are_scaled_down_bilinearly_and_whole():
    ramp = torch.linspace(0, 31, 32, dtype=torch.float64).expand(1, 3, 32, 32).contiguous()
    small = scaled_down(ramp.to(memory_format=torch.channels_last), 24)
    torch.testing.assert_close(small[0, 0, 0], (torch.arange(24, dtype=torch.float64) + 0.5) * 32 / 24 - 0.5)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert scaled_down(ramp, 32) is ramp


def test_six_views_are_weighted_and_shifted_by_a_pixel():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    seen = {}

    def network(view):
        seen[tuple(view[0, 0, 0].tolist())] = view[0, 0, :, 0].tolist()
        return view[0, 0, 0, :1]

    logits = SIX_VIEWS(network, image.permute(0, 2, 3, 1), ALONE)
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
    assert TWO_VIEWS(network, image, ALONE).item() == 1 + 1 / 256, "which bfloat16 would round to 1"


def test_each_option_of_views_is_what_it_says():
    predictions = {views: MuonRecipe(views=views).predict for views in ("one", "two", "six", "unsure")}
    unsure = AgainWhereUnsure(ONE_VIEW, SIX_VIEWS, share=1 / 4)
    assert predictions == {"one": ONE_VIEW, "two": TWO_VIEWS, "six": SIX_VIEWS, "unsure": unsure}


@pytest.mark.parametrize(("epochs", "seen"), [(1, ["all"]), (3, ["one", "one", "all"])])
def test_all_views_are_taken_after_the_last_epoch_alone(epochs, seen, tiny_npz, tmp_path, monkeypatch):
    """Five more of each image after every epoch would take a CPU minutes of a run."""
    taken = []

    def looking(name):
        return staticmethod(lambda *arguments: taken.append(name) or ONE_VIEW(*arguments))

    monkeypatch.setattr(MuonRecipe, "predict", looking("all"))
    monkeypatch.setattr(MuonRecipe, "predict_early", looking("one"))
    options = ["--recipe", "muon", "--width", 2, "--batch_size", 200, "--epochs", epochs, "--pixels", "9"]
    train_here(*options, "--no_warmup", "--precision", "fp32", "--data", tiny_npz, "--out", tmp_path)
    assert taken == seen


def test_a_second_look_at_the_unsure_quarter_of_all_processes_images():
    """Images of one grey each, of which the network is the surer the brighter they are."""
    greys = torch.tensor([5.0, 1, 7, 2, 8, 3, 6, 4])
    looked = []

    def network(batch):
        grey = batch[:, 0, 0, 0]
        return torch.stack([grey, torch.zeros_like(grey)], 1)

    def noted(batch):
        looked.extend(batch[:, 0, 0, 0].tolist())
        return -batch

    again = AgainWhereUnsure(ONE_VIEW, Averaged({noted: 1.0}), share=1 / 4)
    images = greys.view(8, 1, 1, 1).expand(8, 32, 32, 3)
    assert again(network, images, ALONE)[:, 0].tolist() == [5, -1, 7, -2, 8, 3, 6, 4]
    assert looked == [1, 2]

    class OneOfTwo:
        """Of two processes one, which has every other image."""

        def __init__(self, rank):
            self.rank, self.world_size = rank, 2

        def all_reduce(self, tensor):
            if tensor.ndim == 0:
                return tensor + 4
            others = images[1 - self.rank :: 2].permute(0, 3, 1, 2)
            tensor[1 - self.rank :: 2] = network(others).softmax(1).amax(1)
            return tensor

    assert again(network, images[::2], OneOfTwo(0))[:, 0].tolist() == [5, 7, 8, 6]
    assert again(network, images[1::2], OneOfTwo(1))[:, 0].tolist() == [-1, -2, 3, 4]
