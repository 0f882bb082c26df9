"""The base class of each program's `Hyp`: all that the command line, the tables and saved weights ask of settings."""

from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class BaseHyp:
    """Settings of a program. Its `Hyp` is a frozen dataclass that inherits from this class.

    Each field `name: type = default  # help` is an option. A field keeps the value that was given. If a default means
    "derived from others", the property `actual_NAME` has the value that is used.

    A program may set the attributes below or override the methods. Other constants of its own are annotated with
    ClassVar, and its own methods begin with _: a misspelt name is an error (lab/options.py).
    """

    epochs: int
    batch_size: int  # images that a worker takes each step
    views: str = "one"  # views of a test image after the last epoch, for evaluation (evaluation.average_over_views)
    gpu_precision: str = "fp16"  # on a GPU, without --precision; fp16 if a GPU has no bf16
    small: str = ""  # the options that --small stands for
    demo: str = ""  # the options that --demo stands for

    @property
    def workers(self) -> int:
        """Replicas, each with its own training images."""
        return 1

    @property
    def actual_epochs(self) -> int:
        return self.epochs

    @property
    def actual_batch_size(self) -> int:
        return self.batch_size

    @property
    def images_of_step(self) -> int:
        return self.workers * self.actual_batch_size

    def fit_to(self, images: int, given: dict) -> dict:
        """Return further defaults for so many training images, fewer than CIFAR-10's. `given` has the given options."""
        return {}

    def flop(self, network: nn.Module, train_images: int) -> float:
        """Return the floating-point operations of a run's training steps. By default, all epochs are alike."""
        return train_images * self.actual_epochs * count_flop(network)


def settings_of(hyp: Any) -> dict[str, object]:
    """Return all settings by name, with the values that are used."""
    return {field.name: getattr(hyp, f"actual_{field.name}", getattr(hyp, field.name)) for field in fields(hyp)}


def count_flop(network: nn.Module, pixels: int = 32, *stage: Any) -> float:
    """Return the floating-point operations of an image's forward and backward pass, by torch's counter.

    `stage` are further arguments of the network, which loses its values.
    """
    network.eval().to("meta")  # in evaluation mode norms accept one image; on "meta" nothing is computed
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, pixels, pixels, device="meta"), *stage).sum().backward()
    return counter.get_total_flops()
