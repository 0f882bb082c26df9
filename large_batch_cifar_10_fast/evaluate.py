"""Evaluate a network on the test images; as a command, evaluate saved weights:

    python -m large_batch_cifar_10_fast.evaluate WEIGHTS [options of train.py]

WEIGHTS is a file that --save wrote. Give the options it was trained with; only --views and --precision may differ, and
--eval_stats first also evaluates weights trained with average. Exit status: 0, or 2 if the weights do not fit.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from .checks import precision_on
from .command_line import read_request
from .data.cifar10 import load_images
from .data.shards import normalize_for, upload_test
from .devices import allow_tf32, out_of_memory_hint
from .distributed import DistContext, init_distributed
from .layers import norms_of
from .log import Clock, data_line, recipe_line, version_line
from .metrics import Logits, Metrics, Prediction, Score, most_at_once
from .options import ConfigError, RunConfig, exit_on_config_error
from .recipe import Recipe, autocast, cast, make_network, sums_of, weight_dtype


@torch.no_grad()
def evaluate(
    network: nn.Module,
    recipe: Recipe,
    predict: Prediction,
    precision: str,
    test: tuple[Tensor, Tensor],
    ctx: DistContext,
    compiled: Logits | None = None,
) -> Score:
    """Return the score on all test images, of which each process evaluates its part `test`.

    `compiled` is the network, compiled for evaluation.
    """
    network.eval()
    ctx.broadcast(*(buffer for norm in norms_of(network) for buffer in norm.buffers()))
    (images, labels), metrics = test, Metrics(ctx)
    with evaluation_memory_hint("evaluation", ctx.device), autocast(recipe, precision, ctx.device):
        logits = predict(compiled or network, images)
    metrics.sums += sums_of(logits, labels, recipe.loss(logits, labels))
    network.train()
    return metrics.read()


def evaluation_memory_hint(doing: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an out-of-memory error says how evaluations need less memory."""
    advice = "end other programs that use its memory, use a --precision of fewer bits, or a smaller --width"
    return out_of_memory_hint(doing, f"up to {most_at_once(device)} images at once", device, advice)


def load_weights(network: nn.Module, path: Path) -> None:
    """Load weights and running statistics; raise ConfigError if the file is damaged or of another network.

    If the file has statistics of all ghost groups (--eval_stats average), a network with one group takes the first.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        for name, expected in network.state_dict().items():
            if name.endswith(("running_mean", "running_var")):
                weights[name] = weights[name][: len(expected)]
        network.load_state_dict(weights)
    except Exception as error:  # torch raises nearly anything for a damaged or foreign file
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} does not fit ({reason}): give the recipe and options it was trained with") from error


def evaluate_weights(path: Path, config: RunConfig, recipe: Recipe) -> None:
    """Print the score of saved weights on the test images."""
    images = load_images(config.data)
    with init_distributed(recipe.workers, device=config.device) as ctx:
        precision = precision_on(ctx, config.precision, recipe, len(images.train_images))
        allow_tf32(precision == "tf32")
        network = cast(make_network(recipe, seed=0), weight_dtype(recipe, precision), ctx.device)
        load_weights(network, path)
        test_images, labels = upload_test(*images.test, ctx)
        clock = Clock(ctx.synchronize)
        with clock.timed("validation"):
            test = normalize_for(recipe, precision, test_images), labels
            score = evaluate(network, recipe, recipe.tta, precision, test, ctx)
        if ctx.is_main:
            print(version_line(), data_line(images.metadata()), recipe_line(recipe), sep="\n")
            result = f"validation acc {score.accuracy:.4f} loss {score.loss:.5f} of {path}"
            print(f"{result}, {precision}, in {clock.seconds['validation']:.3f}s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.evaluate", description=__doc__)
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.add_argument("weights", metavar="WEIGHTS", help="a file that --save wrote")
    options = parser.parse_args(sys.argv[1:2])  # the others are train.py's
    with exit_on_config_error("evaluate"):
        evaluate_weights(Path(options.weights), *read_request(sys.argv[2:]))


if __name__ == "__main__":
    main()
