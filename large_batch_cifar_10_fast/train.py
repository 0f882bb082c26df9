"""CIFAR-10 to 94%: the whole story, from the command line to the summary.

Start it with train_cifar_parallel.sh (all devices), with torchrun, or as `python -m large_batch_cifar_10_fast.train`
(one process). A recipe (recipes/) decides what is trained and how. "Section 6" is that of docs/method.md.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .compiling import Forward, compiled, compiled_evaluation
from .config import Options, check_images, check_processes, check_save, choose_computation, parse
from .data.cifar10 import Images, load_images, random_images
from .data.shards import Batch, Shards, Step, normalize_for, upload_shards, upload_test
from .devices import allow_tf32, out_of_memory_hint
from .distributed import DistContext, exit_process, init_distributed, on_one_machine
from .evaluate import evaluate
from .graphs import StepGraphs, TakeStep, graphed
from .layers import prepare_norms, update_statistics
from .log import Clock, RunLog
from .metrics import Logits, Metrics, chunk_sizes
from .optim import follow_schedules, prepare_for_gpu, restart, step_all
from .recipe import (
    Recipe,
    apply_stage,
    autocast,
    cast,
    frozen_weights,
    images_for_every_step,
    images_of_an_epoch,
    make_network,
    reset,
    stage_of,
    training_pass,
    weight_dtype,
)


def main(arguments: Sequence[str]) -> None:
    """Make the missing runs of a campaign."""
    options, recipe = parse(arguments)
    check_save(options.save)
    with init_distributed(recipe.workers, options.device, options.timeout) as ctx:
        check_processes(recipe, ctx.world_size, options.micro_batches)
        images = load_images(options.data)
        check_images(recipe, len(images.train_images))
        options = choose_computation(options, recipe, ctx, len(images.train_images))
        log = RunLog(options, recipe, ctx, images)
        if log.missing:
            make_runs(options, recipe, images, ctx, log)
        log.summary()


@out_of_memory_hint("training")
def make_runs(options: Options, recipe: Recipe, images: Images, ctx: DistContext, log: RunLog) -> None:
    """Make each missing run. They share images and network; nothing before `clock` is timed."""
    if ctx.on_gpu and ctx.world_size == 1:  # with several each copies its share
        images = images.pinned()
    short = images_of_an_epoch(recipe, len(images.train_images), epoch=1) % recipe.batch_size
    test_images = len(images.test_images)
    model = make_model(recipe, ctx, options.precision, options.compile, options.micro_batches, short, test_images)
    if not options.no_warmup:
        if ctx.on_gpu:  # which has kernels for certain sizes
            warm_up(model, len(images.train_images), test_images)
        else:
            warm_up(model, images_for_every_step(recipe, len(images.train_images)), ctx.world_size)

    clock = Clock(ctx.synchronize)
    data = prepare(images, model, clock)
    if ctx.on_gpu:
        torch.cuda.reset_peak_memory_stats(ctx.device)  # before the capture: a replay allocates nothing
    # NCCL has no timeout inside a graph: on several machines a lost process would leave the others waiting for ever.
    step = make_step(model, data, use_graphs=ctx.on_gpu and on_one_machine() and not options.no_graph)
    log.set_up(clock, compiled=model.compiled, graphs=isinstance(step, StepGraphs))
    for run in log.missing:
        train_once(run, options.seed + run, model, data, step, clock.fork(), log)


@dataclass(frozen=True)
class Model:
    """A recipe's network on this process's device, trained by all runs one after the other from fresh weights."""

    recipe: Recipe
    network: nn.Module
    optimizers: list[Optimizer]
    forward: Forward  # the training pass, compiled or not
    compiled: bool
    precision: str
    micro_batches: int  # forward and backward passes of a step
    ctx: DistContext
    evaluation: Logits | None = None  # the network compiled for evaluation


def make_model(
    recipe: Recipe,
    ctx: DistContext,
    precision: str,
    compile: bool = False,
    micro_batches: int = 1,
    short: int = 0,
    test_images: int = 0,
) -> Model:
    """Make the network, and compile its training pass if asked to; on a GPU also the evaluation of `test_images`.

    `short` is the size of a worker's short last batch, if there is one. On a CPU evaluations gain less than compiling
    them takes.
    """
    allow_tf32(precision == "tf32")
    network = cast(make_network(recipe, seed=0), weight_dtype(recipe, precision), ctx.device)
    eager: Forward = partial(training_pass, network, recipe, precision)
    forward = eager
    if compile:
        sizes = [size for size in (recipe.batch_size, short) if size]
        forward = compiled(eager, network, recipe, precision, sizes, micro_batches, ctx)
    is_compiled = forward is not eager
    optimizers, evaluation = recipe.optimizers(network, ctx), None
    if ctx.on_gpu:
        prepare_for_gpu(optimizers, compile=is_compiled)
        if is_compiled and test_images:
            sizes = chunk_sizes(len(range(ctx.rank, test_images, ctx.world_size)), ctx.device)
            evaluation = compiled_evaluation(network, recipe, precision, sizes, ctx)
    return Model(recipe, network, optimizers, forward, is_compiled, precision, micro_batches, ctx, evaluation)


@dataclass(frozen=True)
class Data:
    """What all runs share on the device: the shards of this process's workers, and its part of the test images."""

    train: Shards
    test: Batch
    metrics: Metrics  # of the epoch
    losses: Tensor  # of each image, when it was last seen


def prepare(images: Images, model: Model, clock: Clock) -> Data:
    """Upload and normalize the images, compute the whitening filters. All of it counts as training (section 6)."""
    recipe, network, ctx, precision = model.recipe, model.network, model.ctx, model.precision
    with clock.timed("upload"):
        train = upload_shards(*images.train, recipe, ctx, model.micro_batches, compile=model.compiled and ctx.on_gpu)
        test_images, test_labels = upload_test(*images.test, ctx)
    with clock.timed("preprocessing"):
        train = replace(train, images=normalize_for(recipe, precision, train.images))
        test_images = normalize_for(recipe, precision, test_images)
    with clock.timed("whitening"):
        if ctx.is_main:
            recipe.whiten(network, train.images[:: len(ctx.workers)])  # worker 0's
        ctx.broadcast(*frozen_weights(network).values())
    return Data(train, (test_images, test_labels), Metrics(ctx), train.initial_losses())


def make_step(model: Model, data: Data, use_graphs: bool = False) -> TakeStep:
    """Return a function that takes a training step, by replaying CUDA graphs if asked to and possible."""

    def take(step: Step) -> None:
        data.losses[step.rows] = take_step(model, step, data.metrics)

    groups = (group for optimizer in model.optimizers for group in optimizer.param_groups)
    if not use_graphs or any(group["schedules"].keys() - {"lr"} for group in groups):  # a graph keeps other rates
        return take
    return graphed(take, steps_of_every_kind(model, data.train), model.ctx)


def train_once(run: int, seed: int, model: Model, data: Data, take: TakeStep, clock: Clock, log: RunLog) -> None:
    """Train from fresh weights. The seed alone decides the weights and all shuffles, crops and flips."""
    recipe, network, ctx = model.recipe, model.network, model.ctx
    reset(network, recipe, seed)
    restart(model.optimizers)
    data.losses.fill_(math.inf)
    for epoch in range(1, recipe.epochs + 1):
        with clock.timed("training"):
            apply_stage(network, stage_of(recipe, epoch))
            data.metrics.sums.zero_()
            steps = data.train.epoch(seed, epoch, data.losses)
            for number, step in enumerate(log.progress(steps, run, epoch), 1):
                follow_schedules(model.optimizers, epoch - 1 + number / len(steps))
                take(step)
        with clock.timed("validation"):  # shown, but not part of the training time (section 6)
            predict = recipe.tta if epoch == recipe.epochs else recipe.tta_early
            validation = evaluate(network, recipe, predict, model.precision, data.test, ctx, model.evaluation)
        train = data.metrics.read()
        log.epoch(clock, train, validation)
        if not math.isfinite(train.loss + validation.loss):  # such weights never recover
            break
    log.run(run, clock, train, validation, network)


def take_step(model: Model, micro_batches: Step | Sequence[Batch], metrics: Metrics) -> Tensor:
    """Update the weights once, from one batch of every worker. Return the losses of the images."""
    recipe, network, ctx = model.recipe, model.network, model.ctx
    workers = len(ctx.workers) // len(micro_batches)  # whose batches a micro-batch holds, one after the other
    all_losses = []
    for index, (images, labels) in enumerate(micro_batches):
        prepare_norms(network, workers, tracking=ctx.is_main and index == 0)  # worker 0's statistics alone
        loss, losses, sums = model.forward(images, labels, workers)
        loss.backward()
        update_statistics(network)
        metrics.sums += sums
        all_losses.append(losses)
    ctx.average_gradients(network, recipe.loss_scale)  # over all workers, here and nowhere else
    with autocast(recipe, model.precision, ctx.device):  # for the matrix products of Muon
        step_all(model.optimizers)
    return torch.cat(all_losses)


def warm_up(model: Model, train_images: int, test_images: int) -> None:
    """Train on noise with steps of every kind and batch size, and evaluate. Each run resets the network.

    The timed runs then find kernels chosen, memory allocated and processes connected.
    """
    recipe, ctx = model.recipe, model.ctx
    data = prepare(random_images(train_images, test_images), model, Clock(ctx.synchronize))
    for step in steps_of_every_kind(model, data.train):
        take_step(model, step, data.metrics)
    for predict in (recipe.tta_early, recipe.tta):
        evaluate(model.network, recipe, predict, model.precision, data.test, ctx, model.evaluation)


def steps_of_every_kind(model: Model, shards: Shards) -> Iterator[Step]:
    """Yield a step of every kind of stage and batch size, with the stage applied to a fresh network."""
    reset(model.network, model.recipe, seed=0)
    for stage in {stage.kind: stage for stage in model.recipe.stages}.values():
        apply_stage(model.network, stage)
        steps = shards.epoch(seed=0, epoch=stage.first_epoch)
        yield from {step.columns[0].shape: step for step in steps}.values()


if __name__ == "__main__":
    with exit_process():
        main(sys.argv[1:])
