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

if not __package__:  # started as a file, not with -m
    sys.path[0], __package__ = __file__.rsplit("/", 2)[0], "large_batch_cifar_10_fast"

from .compiling import CudaGraphs, Step, compiled, graphed
from .config import Options, check_images, check_processes, check_request, choose_computation, parse
from .data.cifar10 import Images, load_images, random_images
from .data.shards import Batch, Sample, Shards, normalize, upload_shards, upload_test
from .devices import Precision, allow_tf32, out_of_memory_hint
from .distributed import DistContext, exit_process, init_distributed, on_one_machine, show
from .evaluate import evaluate, read_score, sums_of
from .layers import norms_of, update_running_statistics, whitening_buffers
from .log import Clock, RunLog
from .optim import follow_schedules, prepare_for_gpu, restart, update_weights
from .recipe import Model, Recipe, TrainingPass, apply_stage, distinct_stages, make_network, place, reset, stage_of
from .runs import Row


def main(arguments: Sequence[str]) -> list[Row]:
    return train_campaign(*parse(arguments))


def train_campaign(options: Options, recipe: Recipe) -> list[Row]:
    """Make the missing runs of a campaign. Return the rows of all runs of this launch, on rank 0."""
    check_request(options, recipe)
    with init_distributed(recipe.workers, options.device, options.timeout) as ctx:
        check_processes(recipe, ctx.world_size, options.micro_batches)
        images = load_images(options.data)
        recipe = recipe.for_images(images.classes, images.normalization)
        check_images(recipe, len(images.train_images), len(images.test_images), ctx.world_size)
        options = choose_computation(options, recipe, ctx, len(images.train_images))
        log = RunLog(options, recipe, ctx, images)
        if log.missing:
            make_runs(options, recipe, images, ctx, log)
        log.summary()
    return list(log.rows.values())


@out_of_memory_hint("training")
def make_runs(options: Options, recipe: Recipe, images: Images, ctx: DistContext, log: RunLog) -> None:
    """Make each missing run. They share images and network; nothing before `clock` is timed."""
    train_images, test_images = len(images.train_images), len(images.test_images)
    if ctx.on_gpu and ctx.world_size == 1:  # each of several processes copies its share of the images anyway
        images = images.pinned()
    model = make_model(recipe, ctx, options.precision, options.micro_batches)
    if options.compile:
        if log.prints_head:
            show("compiling, which takes about a minute; a cache makes the next launch faster")
        model = compiled(model, train_images, test_images)
    if not options.no_warmup:
        few = 2 * recipe.workers * recipe.batch_size, ctx.world_size
        counts = (train_images, test_images) if ctx.on_gpu else few  # a GPU chooses kernels by sizes
        warm_up(model, *counts)

    clock = Clock(ctx.synchronize)
    data = prepare(images, model, clock)
    if ctx.on_gpu:
        torch.cuda.reset_peak_memory_stats(ctx.device)  # before the capture: a replay allocates nothing
    # NCCL has no timeout inside a graph: on several machines a lost process would leave the others waiting for ever.
    step = make_step(model, data, use_graphs=ctx.on_gpu and on_one_machine() and not options.no_graph)
    log.set_up(clock, compiled=model.compiled, graphs=isinstance(step, CudaGraphs))
    for run in log.missing:
        train_once(run, options.seed + run, model, data, step, clock.fork(), log)


def make_model(recipe: Recipe, ctx: DistContext, precision: str, micro_batches: int = 1) -> Model:
    """Make the network and its optimizers, on this process's device."""
    allow_tf32(precision == "tf32")
    types = Precision(precision, ctx.device, recipe.half_weights)
    network = place(make_network(recipe, seed=0), types)
    workers = len(ctx.workers) // micro_batches
    for norm in norms_of(network):
        norm.workers = workers
    optimizers = recipe.optimizers(network, ctx)
    if ctx.on_gpu:
        prepare_for_gpu(optimizers)
    forward = partial(training_pass, network, recipe, types, workers)
    return Model(recipe, ctx, types, network, optimizers, forward, micro_batches)


@dataclass(frozen=True)
class Data:
    """What all runs share on the device: the shards of this process's workers, and its part of the test images."""

    train: Shards
    test: Batch
    sums: Tensor  # correct images, images, and their summed losses in this epoch, float64 [3]


def prepare(images: Images, model: Model, clock: Clock) -> Data:
    """Upload and normalize the images, compute the whitening filters. All of it counts as training (section 6)."""
    recipe, network, ctx = model.recipe, model.network, model.ctx
    with clock.timed("upload"):
        train = upload_shards(*images.train, recipe, ctx, model.micro_batches, compile=model.compiled and ctx.on_gpu)
        test_images, test_labels = upload_test(*images.test, ctx)
    with clock.timed("preprocessing"):
        train = replace(train, images=normalize(train.images, recipe.normalization, model.precision))
        test_images = normalize(test_images, recipe.normalization, model.precision)
    with clock.timed("whitening"):
        if ctx.is_main:
            recipe.whiten(network, train.images[:: len(ctx.workers)])  # worker 0's
        ctx.broadcast(*whitening_buffers(network))
    return Data(train, (test_images, test_labels), torch.zeros(3, dtype=torch.float64, device=ctx.device))


def make_step(model: Model, data: Data, use_graphs: bool = False) -> Step:
    """Return a function that trains on a sample, by replaying a CUDA graph if asked to and possible."""
    step = partial(train_step, model, data)
    changed = {name for each in model.optimizers for group in each.param_groups for name in group["schedules"]}
    if use_graphs and changed == {"lr"}:  # a graph would keep the momentum it was captured with
        return graphed(step, distinct_samples(model, data.train), model.ctx)
    return step


def train_once(run: int, seed: int, model: Model, data: Data, step: Step, clock: Clock, log: RunLog) -> None:
    """Train from fresh weights. The seed alone decides the weights and all shuffles, crops and flips."""
    recipe, network = model.recipe, model.network
    reset(network, recipe, seed)
    restart(model.optimizers)
    data.train.losses.fill_(math.inf)
    for epoch in range(1, recipe.epochs + 1):
        with clock.timed("training"):
            apply_stage(network, stage_of(recipe, epoch))
            data.sums.zero_()
            samples = data.train.epoch(seed, epoch)
            for number, sample in enumerate(log.progress(samples, run, epoch), 1):
                follow_schedules(model.optimizers, epoch - 1 + number / len(samples))
                step(sample)
        with clock.timed("validation"):  # shown, but not part of the training time (section 6)
            views = recipe.tta if epoch == recipe.epochs else recipe.tta_early
            validation = evaluate(model, views, data.test)
        train = read_score(data.sums, model.ctx)
        log.epoch(clock, train, validation)
        if not math.isfinite(train.loss + validation.loss):  # such weights never recover
            break
    log.run(run, clock, train, validation, network)


def train_step(model: Model, data: Data, sample: Sample) -> None:
    """Update the weights once, from one batch of every worker."""
    network, ctx, losses = model.network, model.ctx, []
    for index, (images, labels) in enumerate(sample.micro_batches()):
        result = model.forward(images, labels)
        result.loss.backward()
        if index == 0:  # which begins with the first worker's images; evaluation takes rank 0's, those of worker 0
            update_running_statistics(network)
        data.sums.add_(result.sums)
        losses.append(result.losses)
    ctx.average_gradients(network, model.recipe.loss_scale)  # over all workers, here and nowhere else
    with model.precision.autocast():  # for the matrix products of Muon
        update_weights(model.optimizers)
    data.train.losses[sample.indices] = torch.cat(losses)


def training_pass(
    network: nn.Module, recipe: Recipe, precision: Precision, workers: int, images: Tensor, labels: Tensor
) -> TrainingPass:
    """Compute loss and metrics of images [B, 3, H, W], the batches of so many workers one after the other."""
    with precision.autocast():
        logits = network(images)
    losses = recipe.loss(logits, labels)
    loss = losses.sum() if recipe.reduction == "sum" else losses.sum() / (len(losses) // workers)
    return TrainingPass(loss * recipe.loss_scale, losses.detach().float(), sums_of(logits, labels, losses))


def warm_up(model: Model, train_images: int, test_images: int) -> None:
    """Train on noise with samples of every stage and batch size, and evaluate. Each run resets the network.

    The timed runs then find kernels chosen, memory allocated and processes connected.
    """
    data = prepare(random_images(train_images, test_images, model.recipe.classes), model, Clock(model.ctx.synchronize))
    for sample in distinct_samples(model, data.train):
        train_step(model, data, sample)
    for views in (model.recipe.tta_early, model.recipe.tta):
        evaluate(model, views, data.test)


def distinct_samples(model: Model, shards: Shards) -> Iterator[Sample]:
    """Yield a sample of each distinct stage and batch size, with the stage applied to a fresh network."""
    reset(model.network, model.recipe, seed=0)
    for stage in distinct_stages(model.recipe):
        apply_stage(model.network, stage)
        samples = shards.epoch(seed=0, epoch=stage.first_epoch)
        yield from {sample.signature: sample for sample in samples}.values()


if __name__ == "__main__":
    with exit_process():
        main(sys.argv[1:])
