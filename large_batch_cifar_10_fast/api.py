"""The door for other programs and notebooks: train as the command line does, load and evaluate saved weights.

from large_batch_cifar_10_fast import api
rows = api.train("muon", data="cifar10.npz", save="w.pt")
score = api.evaluate("w.pt", "muon", data="cifar10.npz")
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import ConfigError
from . import train as training
from .config import choose_computation, parse
from .data.cifar10 import load_images
from .data.shards import normalize, upload_test
from .distributed import init_distributed
from .evaluate import Score
from .evaluate import evaluate as evaluate_model
from .recipe import Recipe, make_network
from .runs import Row


def train(recipe: str = "apple2019", **options: Any) -> list[Row]:
    """Train in this process with options of the command line; return the rows of its runs, as in runs.tsv.

    Raise ConfigError for invalid options.
    """
    return training.main(_arguments(recipe, options))


def load(weights: Path | str, recipe: str = "apple2019", **options: Any) -> nn.Module:
    """Return a trained network on the CPU, in evaluation mode: images [B, 3, 32, 32], normalized, to logits.

    Give the recipe and the options it was trained with. Raise ConfigError if the file does not fit.
    """
    return _load(Path(weights), parse(_arguments(recipe, options))[1]).float().eval()


def evaluate(weights: Path | str, recipe: str = "apple2019", **options: Any) -> Score:
    """Return the score of saved weights on the test images, as after the last epoch; other `views` may be given."""
    given, made = parse(_arguments(recipe, options))
    network = _load(Path(weights), made)  # before a download
    images = load_images(given.data)
    made = made.for_images(images.classes, images.normalization)
    with init_distributed(made.workers, given.device) as ctx:
        precision = choose_computation(given, made, ctx, len(images.train_images)).precision
        model = training.make_model(made, ctx, precision)
        try:
            model.network.load_state_dict(network.state_dict())
        except RuntimeError as error:
            raise ConfigError(f"{weights} is not for the {made.classes} classes of --data {given.data}") from error
        test_images, labels = upload_test(*images.test, ctx)
        return evaluate_model(model, made.tta, (normalize(test_images, made.normalization, model.precision), labels))


def _arguments(recipe: str, options: dict[str, Any]) -> list[str]:
    """Return the command line of these options."""
    given = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value is not False
    ]
    return ["--recipe", recipe, *given]


def _load(path: Path, recipe: Recipe) -> nn.Module:
    """Return the recipe's network with saved weights, whose last matrix has a row for each class.

    Of statistics of more ghost groups it takes the first.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        classes = [len(weight) for weight in weights.values() if weight.ndim == 2][-1]
        network = make_network(recipe.for_images(classes, recipe.normalization), seed=0)
        for name, expected in network.state_dict().items():
            if name.endswith(("running_mean", "running_var")):
                weights[name] = weights[name][: len(expected)]
        network.load_state_dict(weights, assign=True)  # in the file's precision
        return network
    except Exception as error:  # torch raises nearly anything for a damaged or foreign file
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} does not fit ({reason}): give the recipe and options it was trained with") from error
