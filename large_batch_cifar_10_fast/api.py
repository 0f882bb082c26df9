"""The door for other programs and notebooks: train as the command line does, load and evaluate saved weights.

from large_batch_cifar_10_fast import api
rows = api.train("muon", data="cifar10.npz", save="w.pt")
score = api.evaluate("w.pt", "muon", data="cifar10.npz")
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import ConfigError, first_line
from . import train as training
from .config import choose_computation, parse
from .data.cifar10 import load_images
from .data.shards import normalize, upload_test
from .distributed import init_distributed
from .evaluate import Score
from .evaluate import evaluate as evaluate_model
from .recipe import make_network
from .runs import Row


def train(recipe: str = "apple2019", **options: Any) -> list[Row]:
    """Train in this process with options of the command line; return the rows of its runs, as in runs.tsv.

    Raise ConfigError for invalid options.
    """
    return training.main(_arguments(recipe, options))


def load(weights: Path | str, recipe: str = "apple2019", classes: int = 10, **options: Any) -> nn.Module:
    """Return a trained network on the CPU, in evaluation mode: normalized images to logits [B, classes].

    Give the recipe, options and number of classes it was trained with. Raise ConfigError if the file does not fit.
    """
    made = parse(_arguments(recipe, options))[1]
    network = make_network(made.for_images(classes, made.normalization), seed=0)
    _fit(network, _read(Path(weights)), weights)
    return network.eval()


def evaluate(weights: Path | str, recipe: str = "apple2019", **options: Any) -> Score:
    """Return the score of saved weights on the test images, as after the last epoch; other `views` may be given."""
    given, made = parse(_arguments(recipe, options))
    state = _read(Path(weights))  # before a download
    images = load_images(given.data)
    made = made.for_images(images.classes, images.normalization)
    with init_distributed(made.workers, given.device) as ctx:
        precision = choose_computation(given, made, ctx, len(images.train_images)).precision
        model = training.make_model(made, ctx, precision)
        _fit(model.network, state, weights)
        test_images, labels = upload_test(*images.test, ctx)
        return evaluate_model(model, made.tta, (normalize(test_images, made.normalization, model.precision), labels))


def _arguments(recipe: str, options: dict[str, Any]) -> list[str]:
    """Return the command line of these options."""
    given = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value is not False
    ]
    return ["--recipe", recipe, *given]


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises nearly anything for a damaged or foreign file
        raise ConfigError(f"{path} cannot be read as weights ({first_line(error)}): name a file of --save") from error


def _fit(network: nn.Module, weights: dict[str, torch.Tensor], path: Path | str) -> None:
    """Give the network saved weights. Of statistics of more ghost groups it takes the first."""
    try:
        for name, expected in network.state_dict().items():
            if name.endswith(("running_mean", "running_var")):
                weights[name] = weights[name][: len(expected)]
        network.load_state_dict(weights)
    except Exception as error:  # torch raises nearly anything for foreign weights
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} does not fit ({reason}): give the recipe and options it was trained with") from error
