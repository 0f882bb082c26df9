"""CIFAR-10 to 94%: the whole story, from the command line to the summary.

Start it with train_cifar_parallel.sh (all devices), or as `python -m large_batch_cifar_10_fast.train` (one process).
What is trained, and how, is a recipe (recipes/). "Section 6" is that of docs/method.md.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from .campaign import Row, rows_from_main
from .checks import check_agreement, check_request, explaining_memory, resolve_defaults
from .clock import Clock
from .command_line import read_launch, read_request
from .compiling import compiled
from .data.cifar10 import Images, load_images, random_images
from .data.shards import Batch, Shards, normalise, upload_shards, upload_test
from .devices import allow_tf32
from .distributed import DistContext, init_distributed, leaving
from .layers import norms_of, prepare_norms
from .log import RunLog
from .metrics import Metrics, Score
from .networks import apply_stage, autocast, cast, frozen_weights, make_network, reset, weight_dtype
from .optim import follow_schedules, step_all
from .options import Settings
from .recipe import Recipe, images_to_warm_up, reduced, stage_of


def main(arguments: Sequence[str]) -> None:
    launch, asked = read_launch(arguments)
    with init_distributed(device=asked.device, timeout=launch.timeout) as ctx:
        finished = rows_from_main(asked, ctx)
        settings, recipe = read_request(arguments, finished)
        check_request(settings, recipe, ctx.world_size, ctx.is_main, finished)
        ctx = replace(ctx, total_workers=recipe.workers)
        with explaining_memory(settings, recipe, ctx):
            train_campaign(settings, recipe, ctx, finished, launch.team)


def train_campaign(settings: Settings, recipe: Recipe, ctx: DistContext, finished: list[Row], team: str) -> None:
    """All runs of a launch: what they share is made once; what comes before `clock` is not timed."""
    images = load_images(settings.data)
    settings = resolve_defaults(settings, recipe, ctx, len(images.train_images))
    check_agreement(settings, recipe, images, finished, ctx)
    log = RunLog(settings, recipe, ctx, images.metadata, finished, team)
    learner = make_learner(settings, recipe, ctx)
    if not settings.no_warmup:
        warm_up(learner, len(images.train_images), len(images.test_images) if ctx.on_gpu else ctx.world_size)

    clock = Clock(ctx.synchronize)
    data = prepare(images, learner, clock)
    log.set_up(clock, len(images.train_images), compiled=learner.forward is not learner.network)
    for run in log.runs_to_make:
        train_once(run, learner, data, clock.fork(), log)
    log.summary()


@dataclass(frozen=True)
class Learner:
    """What all runs train, one after the other from fresh weights; `forward` is the network, compiled or not."""

    network: nn.Module
    forward: nn.Module
    recipe: Recipe
    settings: Settings
    ctx: DistContext


def make_learner(settings: Settings, recipe: Recipe, ctx: DistContext) -> Learner:
    allow_tf32(settings.precision == "tf32")
    dtype = weight_dtype(recipe, settings.precision)
    forward = network = cast(make_network(recipe, settings.seed), dtype, ctx.device)
    if settings.compile:
        forward = compiled(network, recipe, settings.precision, settings.micro_batches, ctx)
    return Learner(network, forward, recipe, settings, ctx)


@dataclass(frozen=True)
class Data:
    """What all runs share, on the device: this process's training shards and its part of the test images."""

    train: Shards
    test: Batch


def prepare(images: Images, learner: Learner, clock: Clock) -> Data:
    """Upload, normalise, find the whitening filters: all of it counts as training time (section 6)."""
    ctx, dtype = learner.ctx, weight_dtype(learner.recipe, learner.settings.precision)
    with clock.counting("upload"):
        train = upload_shards(*images.train, learner.recipe, ctx, learner.settings.micro_batches)
        test_images, test_labels = upload_test(*images.test, ctx)
    with clock.counting("preprocessing"):
        train = replace(train, images=normalise(train.images, dtype))
        test_images = normalise(test_images, dtype)
    with clock.counting("whitening"):
        if ctx.is_main:
            learner.recipe.whiten(learner.network, train.images[:: len(ctx.workers)])  # worker 0's
        ctx.broadcast(*frozen_weights(learner.network).values())
    return Data(train, (test_images, test_labels))


def train_once(run: int, learner: Learner, data: Data, clock: Clock, log: RunLog) -> None:
    """One run from fresh weights; its seed alone decides them, every shuffle, crop and flip."""
    recipe, ctx, seed = learner.recipe, learner.ctx, learner.settings.seed + run
    reset(learner.network, recipe, seed)
    optimizers, losses = recipe.optimizers(learner.network, ctx), data.train.initial_losses()
    for epoch in range(1, recipe.epochs + 1):
        metrics = Metrics(ctx)
        with clock.counting("training"):
            apply_stage(learner.network, stage_of(recipe, epoch))
            batches = data.train.epoch(seed, epoch, losses)
            for step, micro_batches in enumerate(log.progress(batches, run, epoch), 1):
                follow_schedules(optimizers, epoch - 1 + step / len(batches))
                take_step(learner, optimizers, micro_batches, metrics)
            losses[batches.rows] = torch.cat(metrics.losses)
        with clock.counting("validation"):  # a part that is told, but not counted (section 6)
            validation = evaluate(learner, data.test, at_end=epoch == recipe.epochs)
        train = metrics.read()
        log.epoch(clock, train, validation)
        if not math.isfinite(train.loss + validation.loss):  # the weights will not recover: the log warns of it
            break
    log.run(run, clock, train, validation, learner.network)


def take_step(learner: Learner, optimizers: list[Optimizer], micro_batches: list[Batch], metrics: Metrics) -> None:
    """One update from one batch of every worker, in one forward and backward pass or several."""
    network, recipe, ctx = learner.network, learner.recipe, learner.ctx
    workers = len(ctx.workers) // len(micro_batches)  # whose images stand one after the other in a micro-batch
    for index, (images, labels) in enumerate(micro_batches):
        prepare_norms(network, workers, tracking=ctx.is_main and index == 0)  # worker 0's statistics alone
        with autocast(recipe, learner.settings.precision, ctx.device):
            logits = learner.forward(images)
        losses = recipe.loss(logits, labels)
        reduced(recipe, losses, workers).backward()
        metrics.count(logits, labels, losses)
    ctx.average_gradients(network, recipe.loss_scale)  # over the workers; the mean is taken here and nowhere else
    with autocast(recipe, learner.settings.precision, ctx.device):  # for what an optimizer multiplies, as Muon does
        step_all(optimizers)


@torch.no_grad()
def evaluate(learner: Learner, test: Batch, at_end: bool = True) -> Score:
    """All test images once, shared by the processes, each in the views that the recipe takes at the end, or before."""
    network, recipe, ctx = learner.network, learner.recipe, learner.ctx
    network.eval()
    ctx.broadcast(*(buffer for norm in norms_of(network) for buffer in norm.buffers()))
    (images, labels), metrics = test, Metrics(ctx)
    with autocast(recipe, learner.settings.precision, ctx.device):
        logits = (recipe.predict if at_end else recipe.predict_early)(network, images)
    metrics.count(logits, labels, recipe.loss(logits, labels))
    network.train()
    return metrics.read()


def warm_up(learner: Learner, train_images: int, test_images: int) -> None:
    """Steps of every kind, of every size there is, and an evaluation, on random data of the right shapes and thrown
    away: the timed runs then find kernels chosen, memory at hand and the processes connected."""
    recipe = learner.recipe
    noise = random_images(images_to_warm_up(recipe, train_images), test_images)
    data = prepare(noise, learner, Clock(learner.ctx.synchronize))
    optimizers = recipe.optimizers(learner.network, learner.ctx)
    for stage in {stage.kind: stage for stage in recipe.stages}.values():
        apply_stage(learner.network, stage)
        for micro_batches in data.train.epoch(seed=0, epoch=stage.first_epoch):
            take_step(learner, optimizers, micro_batches, Metrics(learner.ctx))
    evaluate(learner, data.test)


if __name__ == "__main__":
    with leaving():
        main(sys.argv[1:])
