"""Where the time goes: the parts of a run, and a step against the baseline's, measured in turn.

    python -m large_batch_cifar_10_fast.bench [--json] [--repeats N] [options of train.py]
    python -m large_batch_cifar_10_fast.bench --ladder [--ladder_steps N] [--repeats N] [--picture FILE] [--json] [...]

The baseline is the same mathematics without any of our speed: contiguous NCHW, eager, the norm as its formula
stands, the update parameter by parameter, and float32 unless --baseline_precision says otherwise. Without CUDA the
bench takes one worker a process, or a step would last half a minute. Works under torchrun too.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from .data.cifar10 import Images, random_images
from .data.shards import Batch
from .measuring.baseline import baseline_network, baseline_optimizers
from .measuring.figures import Figures, as_text, ratio, seconds_since_start, summary, timed
from .measuring.ladder import Seconds, as_table, draw_ladder, rungs, seconds_of_rungs
from .measuring.launches import measure_launches
from .plot import check_picture
from .request.advice import count_cores, settle
from .request.checks import check_images, check_processes
from .request.command_line import read_request, read_to_measure
from .results.clock import Clock
from .results.provenance import peak_memory
from .settings.settings import Refusal, Settings, refusals_end
from .train import Data, Learner, evaluate, make_learner, prepare, take_step, warm_up
from .training.meeting import join_world, launched_world_size
from .training.networks import DTYPES, autocast, enter, reset, training_flop, weight_dtype, work
from .training.norm import prepare_norms
from .training.optimizers import follow_schedules, step_all
from .training.process import allow_tf32, matrix_rate
from .training.recipe import Recipe, Stage, reduced, stage_of
from .training.tally import Tally
from .training.views import MOST_AT_ONCE


def step_in_parts(learner: Learner, optimizers: Sequence[Optimizer], batch: Batch, figures: Figures) -> None:
    """Forward, backward, averaging and update, each waited for."""
    allow_tf32(learner.settings.precision == "tf32")
    (images, labels), world, recipe = batch, learner.world, learner.recipe
    parts = {name: figures.setdefault(name, []) for name in ("forward", "backward", "averaging", "update")}

    def forward() -> Tensor:
        with autocast(recipe, learner.settings.precision, world.device):
            losses = recipe.loss(learner.forward(images), labels)
        return reduced(recipe, losses, len(world.workers))

    loss = timed(world, parts["forward"], forward)
    timed(world, parts["backward"], loss.backward)
    timed(world, parts["averaging"], lambda: world.average_gradients(learner.network, recipe.loss_scale))
    with autocast(recipe, learner.settings.precision, world.device):
        timed(world, parts["update"], lambda: step_all(optimizers))


def measure_steps(ours: Learner, baseline: Learner, batches: list[Batch], repeats: int) -> tuple[Figures, Figures]:
    """Steps of ours and of the baseline in turn, so that a drift of the machine's speed falls on both."""
    optimizers = ours.recipe.optimizers(ours.network, ours.world)
    slow_optimizers = baseline_optimizers(baseline.recipe, baseline.network, baseline.world)
    follow_schedules([*optimizers, *slow_optimizers], epoch=1)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    baseline_batch = (whole[0].to(weight_dtype(ours.recipe, baseline.settings.precision)).contiguous(), whole[1])
    for repeat in range(repeats + 1):
        if repeat <= 1:  # what came before was the warm-up
            our_figures, baseline_figures = {"step": []}, {"step": []}
        for learner, opts, parts, figures in (
            (ours, optimizers, batches, our_figures),
            (baseline, slow_optimizers, [baseline_batch], baseline_figures),
        ):
            tally = Tally(learner.world)
            allow_tf32(learner.settings.precision == "tf32")
            timed(learner.world, figures["step"], lambda a=(learner, opts, parts, tally): take_step(*a))
        prepare_norms(ours.network, len(ours.world.workers), tracking=False)
        if len(batches) == 1:
            step_in_parts(ours, optimizers, batches[0], our_figures)
        step_in_parts(baseline, slow_optimizers, baseline_batch, baseline_figures)
    return our_figures, baseline_figures


def bench(settings: Settings, recipe: Recipe, baseline_precision: str, repeats: int, start_up: float) -> dict | None:
    """All figures; None on all processes but the main one."""
    check_processes(settings, recipe, launched_world_size())
    check_images(recipe, 50_000)
    with join_world(recipe.workers, device=settings.device) as world:
        settings = settle(replace(settings, data="noise"), recipe, world, 50_000)
        baseline_settings = replace(settings, precision=baseline_precision or "fp32", compile=False, micro_batches=1)
        figures: Figures = {}
        learner = timed(world, figures.setdefault("compilation", []), lambda: make_learner(settings, recipe, world))
        data = measure_set_up(random_images(50_000, 10_000), learner, repeats, figures)
        reset(learner.network, recipe, seed=0)
        if world.on_gpu:
            torch.cuda.reset_peak_memory_stats(world.device)
        earlier, stage = measure_earlier_stages(learner, data, repeats, figures), recipe.stages[-1]
        enter(learner.network, stage)
        batches = next(iter(data.train.epoch(seed=0, epoch=stage.first_epoch)))
        peak = measure_first_steps(learner, batches, repeats, figures)
        network = baseline_network(recipe, baseline_settings.precision, world)
        recipe.whiten(network, data.train.images)
        enter(network, stage)
        baseline = Learner(network, network, recipe, baseline_settings, world)
        for seed in range(repeats):
            part = figures.setdefault("augmentation of an epoch", [])
            timed(world, part, lambda s=seed: [None for _ in data.train.epoch(s, epoch=1)])
        ours, theirs = measure_steps(learner, baseline, batches, repeats)
        allow_tf32(settings.precision == "tf32")  # again as in training
        # A CPU would take minutes over 10,000 test images: a chunk, scaled, tells the same.
        chunk = len(data.test[0]) if world.on_gpu else MOST_AT_ONCE // 4
        test = data.test[0][:chunk], data.test[1][:chunk]
        for _ in range(min(repeats, 3)):
            timed(world, validation := [], lambda: evaluate(learner, test))
            figures.setdefault("validation", []).append(validation[0] * len(data.test[0]) / chunk)
        if not world.is_main:
            return None
        step, count = statistics.median(ours["step"]), recipe.batch_size * recipe.workers
        rate, done = matrix_rate(settings.precision, world.device), training_flop(recipe, stage) * count
        steps = {**earlier, stage.kind: step}
        epochs = [steps[stage_of(recipe, n).kind] * data.train.steps_of(n) for n in range(1, recipe.epochs + 1)]
        return {
            "conditions": {
                "recipe": recipe.name,
                "device": str(world.device),
                "processes": world.world_size,
                "workers": recipe.workers,
                "batch": recipe.batch_size,
                "width": getattr(recipe, "width", "-"),
                "precision": settings.precision,
                "compiled": learner.forward is not learner.network,
                "baseline precision": baseline_settings.precision,
                "repeats": repeats,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            **{name: summary(values) for name, values in {**figures, **ours}.items()},
            "start-up": summary([start_up]),
            "baseline": {name: summary(values) for name, values in theirs.items()},
            "step": {**summary(ours["step"]), "ratio": ratio(theirs["step"], ours["step"])},
            "images per second": count / step,
            "work of a run, PFLOP": work(recipe, 50_000) / 1e15,
            "training of a run at this pace, s": sum(epochs),
            "TFLOP/s": done / step / 1e12,
            "utilization, of the matrix product's rate": done / step / rate / world.world_size,
            "augmentation, share of an epoch": statistics.median(figures["augmentation of an epoch"]) / epochs[0],
            "peak memory per process, GiB": peak / 2**30,
        }


def climb(settings: Settings, recipe: Recipe, most: int, rounds: int) -> Seconds:
    """The ladder's seconds, in so many rounds, of at most so many training steps a rung."""
    if recipe.workers > 1 or launched_world_size() > 1:
        raise Refusal(f"--ladder is of one worker on one process, recipe {recipe.name} has more: use --recipe page")
    check_processes(settings, recipe, 1)
    check_images(recipe, 50_000)
    with join_world(recipe.workers, device=settings.device) as world:
        settings = settle(replace(settings, data="noise"), recipe, world, 50_000)
        learner, noise = make_learner(settings, recipe, world), random_images(50_000, 1)
        shards = prepare(noise, learner, Clock(world.synchronize)).train
        warm_up(learner, len(noise.train_images), 1)  # the short last batch, too
        optimizers, tally = recipe.optimizers(learner.network, world), Tally(world)
        reset(learner.network, recipe, seed=0)

        def train(batch: Batch) -> None:
            take_step(learner, optimizers, [batch], tally)

        ladder, steps = rungs(*noise.train, shards, count_cores()), shards.steps_of(epoch=1)
        most = most or (steps if world.on_gpu else 5)
        return seconds_of_rungs(ladder, train, most, steps, rounds, world)


def measure_set_up(noise: Images, learner: Learner, repeats: int, figures: Figures) -> Data:
    for _ in range(min(repeats, 3)):
        clock = Clock(learner.world.synchronize)
        data = prepare(noise, learner, clock)
        for part, seconds in clock.seconds.items():
            figures.setdefault(part, []).append(seconds)
    return data


def measure_earlier_stages(learner: Learner, data: Data, repeats: int, figures: Figures) -> dict[Stage, float]:
    """Median seconds of a step of each kind but the last stage's, which is measured at length."""
    world, medians = learner.world, {}
    optimizers, tally = learner.recipe.optimizers(learner.network, world), Tally(world)
    follow_schedules(optimizers, epoch=1)
    *earlier, last = learner.recipe.stages
    for stage in earlier:
        if stage.kind in (*medians, last.kind):
            continue
        enter(learner.network, stage)
        batches = next(iter(data.train.epoch(seed=0, epoch=stage.first_epoch)))
        take_step(learner, optimizers, batches, tally)
        part = figures[f"step from epoch {stage.first_epoch} on"] = []
        for _ in range(repeats):
            timed(world, part, lambda b=batches: take_step(learner, optimizers, b, tally))
        medians[stage.kind] = statistics.median(part)
    return medians


def measure_first_steps(learner: Learner, batches: list[Batch], repeats: int, figures: Figures) -> int:
    """The peak memory, in bytes, of a step of ours before anything of the baseline has run; on a GPU also what
    launches cost."""
    world = learner.world
    optimizers, tally = learner.recipe.optimizers(learner.network, world), Tally(world)

    def step() -> None:
        take_step(learner, optimizers, batches, tally)

    step()
    world.synchronize()
    peak = peak_memory(world.device)
    if world.on_gpu:
        measure_launches(step, world, repeats, figures)
    return peak


def main() -> None:
    start_up = seconds_since_start()
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.bench", description=__doc__)
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    text = "measured repetitions of a step, or of the ladder (default 5, of the ladder 1)"
    parser.add_argument("--repeats", type=int, help=text)
    text = "precision of the baseline (default fp32)"
    parser.add_argument("--baseline_precision", choices=list(DTYPES), default="", help=text)
    text = "instead: an epoch of images handed over, in each way that Page's first article tried (docs/lineage.md)"
    parser.add_argument("--ladder", action="store_true", help=text)
    parser.add_argument("--picture", default="", help="file for a picture of the ladder: .png, .svg or .pdf")
    text = "training steps timed on each rung of the ladder (default an epoch's; 5 without CUDA)"
    parser.add_argument("--ladder_steps", type=int, default=0, help=text)
    options, others = parser.parse_known_args()
    with refusals_end("bench"):
        repeats = options.repeats if options.repeats is not None else 1 if options.ladder else 5
        if repeats < 1:
            raise Refusal(f"--repeats {repeats} must be at least 1")
        if options.ladder_steps and options.ladder_steps < 2:
            raise Refusal(f"--ladder_steps {options.ladder_steps} must be at least 2")
        if (options.ladder_steps or options.picture) and not options.ladder:
            raise Refusal("--ladder_steps and --picture belong to --ladder: add it, or leave them out")
        if options.picture:
            check_picture("--picture", Path(options.picture))
        if options.ladder:
            settings, recipe = read_request(["--recipe", "page", *others], os.environ)
            seconds = climb(settings, recipe, options.ladder_steps, repeats)
            if options.picture:
                draw_ladder(seconds, Path(options.picture))
            print(json.dumps(seconds, indent=2) if options.json else as_table(seconds))
            return
        settings, recipe = read_to_measure(others, os.environ, launched_world_size())
        figures = bench(settings, recipe, options.baseline_precision, repeats, start_up)
    if figures:
        print(json.dumps(figures, indent=2) if options.json else as_text(figures))


if __name__ == "__main__":
    main()
