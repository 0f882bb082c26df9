"""Evaluation: logits of all test images, averaged over views, in chunks that a device computes at once."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ConfigError
from .precision import at_least_float32

AT_ONCE = 1000  # images evaluated at once: on a CPU, or per 4 GiB of a GPU. Each takes up to 1.6 MiB in fp32


def predict(network: nn.Module, images: Tensor) -> Tensor:
    """Return logits of at least float32."""
    return at_least_float32(network(images))


def predict_all(predict: Callable[[Tensor], Tensor], images: Tensor, views: str) -> Tensor:
    """Return the logits [n, C] of images [n, 32, 32, 3], averaged over views."""
    return torch.cat([average_over_views(predict, chunk, views) for chunk in chunks(images)])


def chunks(images: Tensor) -> Iterator[Tensor]:
    """Yield images [n, 32, 32, 3] as chunks [B, 3, 32, 32], channels last, that a device evaluates at once.

    Most memory remains free for training.
    """
    device = images.device
    gib = torch.cuda.get_device_properties(device).total_memory >> 30 if device.type == "cuda" else 4
    for chunk in images.split(AT_ONCE * max(1, gib) // 4):
        yield chunk.permute(0, 3, 1, 2)


# ---- Views


def shifted(images: Tensor, pixels: int) -> Tensor:
    """Shift images [B, 3, H, W] up and left by `pixels` (if negative, down and right), padded by reflection."""
    before = max(-pixels, 0)
    after = max(pixels, 0)
    size = images.shape[-1]
    padded = F.pad(images, (before, after, before, after), "reflect")
    view = padded[:, :, after : after + size, after : after + size]
    return view.contiguous(memory_format=torch.channels_last)  # compiled code takes no other memory layout


def mirrored(images: Tensor) -> Tensor:
    return images.flip(3)


def average_over_views(predict: Callable[[Tensor], Tensor], x: Tensor, views: str) -> Tensor:
    """Return the mean logits of images [B, 3, 32, 32] over one, two or six views of each image.

    Two views: the image and its mirror image. Six views: also both shifted by a pixel up and left, and
    both shifted down and right, with half the weight. A mean is wrong less often than one view: six views gain muon 1.1
    points (docs/why_it_is_fast.md#several-views).
    """
    if views == "one":
        return predict(x)
    if views == "two":
        return predict(x) / 2 + predict(mirrored(x)) / 2
    if views != "six":
        raise ConfigError(f"views {views}: use one, two or six")
    up_left = shifted(x, 1)
    down_right = shifted(x, -1)
    total = predict(x) / 4 + predict(mirrored(x)) / 4
    for view in (up_left, down_right, mirrored(up_left), mirrored(down_right)):
        total = total + predict(view) / 8
    return total
