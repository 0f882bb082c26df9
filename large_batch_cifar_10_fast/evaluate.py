"""Evaluate a network on the test images."""

import torch
from torch import Tensor, nn

from .devices import out_of_memory_hint
from .distributed import DistContext
from .layers import norms_of
from .metrics import Logits, Metrics, Prediction, Score
from .recipe import Recipe, autocast, sums_of


@torch.no_grad()
@out_of_memory_hint("evaluation")
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
    with autocast(recipe, precision, ctx.device):
        logits = predict(compiled or network, images)
    metrics.sums += sums_of(logits, labels, recipe.loss(logits, labels))
    network.train()
    return metrics.read()
