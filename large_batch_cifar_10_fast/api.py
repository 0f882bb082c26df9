"""The door for other programs and notebooks: train as the command line does, load, predict with and evaluate weights.

from large_batch_cifar_10_fast import api
runs = api.train("muon", runs=5, data="cifar10.npz", save="weights.pt")
probabilities = api.load("weights.pt").predict(images)

python -m large_batch_cifar_10_fast.api weights.pt --data cifar10.npz
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from . import ConfigError, exit_on_config_error, first_line
from . import train as training
from .config import Options, as_words
from .core import program
from .data.cifar10 import DATA, load_images
from .data.shards import normalize
from .devices import Precision, take_device
from .distributed import DistContext
from .evaluate import Score, predict, read_score, sums_of
from .recipe import Recipe, make_network
from .recipes import RECIPES
from .runs import NUMBERS


def train(recipe: str | Recipe = "apple2019", **options: Any) -> pd.DataFrame:
    """Train in this process with options of the command line; return the rows of its runs, as in runs.tsv.

    A recipe of one's own is an object that has its options. Raise ConfigError for invalid options.
    """
    if isinstance(recipe, Recipe):
        rows = training.train_campaign(Options(**options), recipe)
    elif program.is_program(recipe):
        rows = program.run_program(program.load_program(recipe), ["--recipe", recipe, *as_words(options)])
    else:
        rows = training.main(["--recipe", recipe, *as_words(options)])
    table = pd.DataFrame(rows)
    numbers = ["run", "seed", *NUMBERS, "goal_epoch", "goal_seconds"]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    return table


class Classifier(nn.Module):
    """A trained network with its normalization: uint8 images [n, 32, 32, 3] to logits [n, C].

    `classes` are the names of the C classes; `about` says how it was made, as a row of runs.tsv.
    """

    def __init__(self, saved: dict[str, Any], recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.classes, self.about = recipe, saved["classes"], saved["about"]
        self.network = make_network(recipe, seed=0)
        self.network.load_state_dict(saved["weights"])
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return self.network(self.normalized(images).permute(0, 3, 1, 2))

    def normalized(self, images: Tensor) -> Tensor:
        """Normalize images as for training."""
        own = images.clone()  # which is changed in place if it is float32
        return normalize(own, self.recipe.normalization, Precision("fp32", images.device))

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return logits [n, C] with the recipe's test-time augmentation."""
        return predict(self.network, self.normalized(images), self.recipe.tta)

    def predict(self, images: Tensor) -> Tensor:
        """Return probabilities [n, C] with the recipe's test-time augmentation."""
        return self.logits(images).softmax(1)


def load(weights: Path | str, recipe: Recipe | None = None) -> Classifier:
    """Return the network that --save wrote, on the CPU, in float32 and evaluation mode.

    A recipe of one's own is given as an object. Raise ConfigError for another file.
    """
    try:
        saved = torch.load(weights, map_location="cpu", weights_only=True)
        if isinstance(saved, dict) and saved and all(isinstance(value, Tensor) for value in saved.values()):
            how = "read it with torch.load(FILE, weights_only=True) and load_state_dict of the recipe's network"
            raise ConfigError(f"{weights} has weights alone, as earlier versions wrote them: {how}")
        name = saved["about"]["recipe"]
        if recipe is None and name not in RECIPES:
            raise ConfigError(f"{weights} is of the recipe {name}: give its object, load(FILE, recipe=...)")
        # Programs save lists of numbers as tuples.
        own = {key: ",".join(map(str, v)) if isinstance(v, tuple) else v for key, v in saved["options"].items()}
        recipe = recipe or RECIPES[name](**own)
        return Classifier(saved, recipe.for_images(len(saved["classes"]), saved["normalization"])).eval()
    except ConfigError:
        raise
    except Exception as error:  # torch raises nearly anything for a damaged or foreign file
        raise ConfigError(f"{weights} cannot be loaded ({first_line(error)}): give a file that --save wrote") from error


def evaluate(weights: Path | str, data: str = str(DATA), device: str = "", recipe: Recipe | None = None) -> Score:
    """Return the score of saved weights on the test images of `data`, in float32, as after the last epoch."""
    model = load(weights, recipe)
    images, labels = map(torch.from_numpy, load_images(data).test)
    if not 0 <= int(labels.max()) < len(model.classes):
        raise ConfigError(f"{weights} knows {len(model.classes)} classes, and {data} has a label {labels.max()}")
    place = take_device(device)
    labels, logits = labels.to(place), model.to(place).logits(images.to(place))
    sums = sums_of(logits, labels, model.recipe.loss(logits, labels))
    return read_score(sums, DistContext(0, 1, place, total_workers=1))


def main() -> None:
    """Evaluate saved weights from the command line."""
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.api", description=evaluate.__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("--data", default=str(DATA), help="as for training (default: CIFAR-10)")
    parser.add_argument("--device", default="", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    with exit_on_config_error("api"):
        score = evaluate(**vars(parser.parse_args()))
        print(f"accuracy {score.accuracy:.4f} ({score.correct} of {score.images} images), loss {score.loss:.3f}")


if __name__ == "__main__":
    main()
