"""fast.ai's augmentation of a whole batch against torchvision's of one image."""

import math

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from large_batch_cifar_10_fast.data.shards import color_jitter, normalize, rotate_and_flip
from large_batch_cifar_10_fast.devices import Precision
from large_batch_cifar_10_fast.recipes.fastai import FastAI

MEAN, STD = NORMALIZATION = (100.5, 90.0, 140.0), (50.0, 40.0, 70.0)  # not CIFAR-10's
AUGMENTATION = FastAI().for_images(12, NORMALIZATION).augmentation


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


@pytest.mark.parametrize("degrees", [-2.0, -0.7, 1.3, 2.0, 30.0])
@pytest.mark.parametrize("flip", [0, 1])
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
    images, rows = normalize(bytes_, NORMALIZATION, Precision("fp64", torch.device("cpu"))), torch.arange(50)
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
    precision = Precision("fp16", torch.device("cpu"), half_weights=False)
    images = normalize((255 * _pixels(20)).to(torch.uint8).permute(0, 2, 3, 1), NORMALIZATION, precision).half()
    choices = [column[0] for column in AUGMENTATION.sample(20, [torch.Generator().manual_seed(3)], [], 1)]
    assert Precision("fp16", torch.device("cuda"), half_weights=False).images == images.dtype
    expected = AUGMENTATION(images.float(), torch.arange(20), *choices).half()
    assert torch.equal(AUGMENTATION(images, torch.arange(20), *choices), expected)
