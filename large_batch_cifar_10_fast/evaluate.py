"""What saved weights say of the test images, by the views or the statistics that are asked for now.

    python -m large_batch_cifar_10_fast.evaluate WEIGHTS [options of train.py]

WEIGHTS is what --save wrote; the options are those it was trained with, but for --views or --precision, which may be
others, and --eval_stats first for what was trained with average. Exit status: 0, or 2 where the weights do not fit.
"""

import argparse
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .checks import check_processes, holds_weights, precision_on
from .clock import Clock
from .command_line import read_request
from .data.cifar10 import load_images
from .data.shards import normalise, upload_test
from .distributed import init_distributed, launched_world_size
from .environment import utc_now
from .log import data_line, recipe_line, version_line
from .networks import weight_dtype
from .options import ConfigError, Settings, exit_on_config_error
from .recipe import Recipe
from .train import evaluate, make_learner


def load_weights(network: nn.Module, path: Path) -> None:
    """Weights, and the statistics of every norm; of those of all groups (--eval_stats average) the first's where one is
    enough. Raises ConfigError for what is no such file, or of another network."""
    try:
        if not holds_weights(path):
            raise ConfigError(f"{path} is no file that --save wrote")
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}") from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise ConfigError(f"{path} holds no weights by name")
    expected = network.state_dict()
    for name in expected.keys() & weights.keys():
        if name.endswith(("running_mean", "running_var")):
            weights[name] = weights[name][: len(expected[name])]
    for name in sorted(expected.keys() | weights.keys()):
        there, here = (tuple(d[name].shape) if name in d else "none" for d in (weights, expected))
        if there != here:
            raise ConfigError(f"{path} has {name} {there}, not {here}: give the recipe and options it was trained with")
    network.load_state_dict(weights)


def evaluate_weights(path: Path, settings: Settings, recipe: Recipe) -> None:
    check_processes(settings, recipe, launched_world_size())
    images = load_images(settings.data)
    with init_distributed(recipe.workers, device=settings.device) as ctx:
        precision = precision_on(ctx, settings, recipe, len(images.train_images))
        learner = make_learner(replace(settings, precision=precision, compile=False), recipe, ctx)
        load_weights(learner.network, path)
        test_images, labels = upload_test(*images.test, ctx)
        test = normalise(test_images, weight_dtype(recipe, learner.settings.precision)), labels
        clock = Clock(ctx.synchronize)
        with clock.counting("validation"):
            score = evaluate(learner, test)
        if ctx.is_main:
            print(version_line(utc_now()))
            print(data_line(images.metadata()))
            print(recipe_line(recipe))
            result = f"validation acc {score.accuracy:.4f} loss {score.loss:.5f} of {path}"
            print(f"{result}, {learner.settings.precision}, in {clock.last['validation']:.3f}s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.evaluate", description=__doc__)
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.add_argument("weights", metavar="WEIGHTS", help="what --save wrote")
    options = parser.parse_args(sys.argv[1:2])  # the others are train.py's
    with exit_on_config_error("evaluate"):
        evaluate_weights(Path(options.weights), *read_request(sys.argv[2:]))


if __name__ == "__main__":
    main()
