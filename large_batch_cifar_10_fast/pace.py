"""How much longer training takes with one recipe than with another: steps of both, in turn.

    python -m large_batch_cifar_10_fast.pace RECIPE OTHER [--rounds N] [options of train.py, for both]

A round takes a step of each kind that a run has (of each resolution, say), of both recipes, so that a drift of the
machine's speed falls on both, and scales it to the images of a whole run. They are noise. One process; without CUDA a
step is of one worker's batch, unless WORKERS says otherwise. As in long runs, half precision where the device has it,
and compiled, unless told otherwise. From 6 rounds on the ratio's median has a 95% interval.
"""

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from scipy import stats

from . import __version__
from .data.cifar10 import random_images
from .measuring.figures import timed
from .request.advice import precision_on
from .request.checks import check_images, check_processes
from .request.command_line import RECIPES, read_request, read_to_measure
from .results import lines
from .results.clock import Clock
from .results.provenance import code_digest, commit, utc_now
from .settings.settings import Refusal, Settings, refusals_end
from .train import Learner, make_learner, prepare, take_step
from .training.meeting import join_world, launched_world_size
from .training.networks import enter, reset, work
from .training.optimizers import follow_schedules
from .training.recipe import Recipe, Stage, images_of_an_epoch, images_to_warm_up, stage_of
from .training.tally import Tally

TRAINING_IMAGES = 50_000


def images_by_kind(recipe: Recipe) -> Counter[Stage]:
    """How many images of a run each kind of step takes, of all workers."""
    counts: Counter[Stage] = Counter()
    for epoch in range(1, recipe.epochs + 1):
        counts[stage_of(recipe, epoch).kind] += recipe.workers * images_of_an_epoch(recipe, TRAINING_IMAGES, epoch)
    return counts


def steps_of_each_kind(learner: Learner, images: Mapping[Stage, int]) -> Callable[[], float]:
    """What takes them, and returns the seconds that a run of so many images would take."""
    recipe, world = learner.recipe, learner.world
    noise = random_images(images_to_warm_up(recipe, TRAINING_IMAGES), 1)
    shards = prepare(noise, learner, Clock(world.synchronize)).train
    batches = {stage.kind: next(iter(shards.epoch(seed=0, epoch=stage.first_epoch))) for stage in recipe.stages}
    optimizers = recipe.optimizers(learner.network, world)
    follow_schedules(optimizers, epoch=1)

    def seconds_of_a_run() -> float:
        reset(learner.network, recipe, seed=0)  # what rested in the last kind is awake again
        total = 0.0
        for kind, batch in batches.items():
            enter(learner.network, kind)
            timed(world, took := [], lambda b=batch: take_step(learner, optimizers, b, Tally(world)))
            total += took[0] / sum(len(labels) for _, labels in batch) * images[kind]
        return total

    return seconds_of_a_run


def pace(asked: list[tuple[Settings, Recipe]], measured: list[Recipe], rounds: int) -> str:
    """`asked` are the runs, `measured` the same recipes with as many workers as a step is taken of."""
    with join_world(1, device=asked[0][0].device) as world:
        learners = []
        for (settings, recipe), small in zip(asked, measured, strict=True):
            check_processes(settings, small, 1)
            check_images(small, TRAINING_IMAGES)
            precision = precision_on(world, settings, recipe, TRAINING_IMAGES)
            settings = replace(settings, precision=precision, compile=not settings.no_compile, data="noise")
            learners.append(make_learner(settings, small, replace(world, total_workers=small.workers)))
        runs = [
            steps_of_each_kind(made, images_by_kind(recipe)) for made, (_, recipe) in zip(learners, asked, strict=True)
        ]
        seconds = [[run() for run in runs] for _ in range(rounds + 1)][1:]  # what came before was the warm-up
        head = lines.HEAD.write(version=__version__, commit=commit(), code=code_digest(), started=utc_now())
        told = [head, f"# {world.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"]
        for made, (_, recipe), took in zip(learners, asked, zip(*seconds, strict=True), strict=True):
            step = f"steps of {made.recipe.workers} x {made.recipe.batch_size} images, {made.settings.precision}"
            how = "compiled" if made.forward is not made.network else "not compiled"
            run = f"{work(recipe, TRAINING_IMAGES) / 1e15:.4f} PFLOP, {statistics.median(took):.1f} s of training"
            told.append(f"{recipe.name}: {step}, {how}; a run has {run}{spread(took, '.1f')}")
        ratios, names = [other / one for one, other in seconds], [recipe.name for _, recipe in asked]
        times = f"{statistics.median(ratios):.2f} times as long as {names[0]}{spread(ratios, '.2f')}"
        return "\n".join([*told, f"{names[1]} takes {times}{interval_of_median(ratios)}"])


def spread(values: list[float], form: str) -> str:
    return f", median of {len(values)} ({min(values):{form}} to {max(values):{form}})"


def interval_of_median(values: list[float]) -> str:
    """By ranks, so that no distribution need be assumed; nothing where the values are too few for one."""
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    return f"; 95% interval {low:.2f} to {high:.2f}" if low <= high else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m large_batch_cifar_10_fast.pace", description=__doc__)
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.add_argument("recipes", nargs=2, choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are measured (default 7)")
    options, others = parser.parse_known_args(sys.argv[1:])
    with refusals_end("pace"):
        if options.rounds < 1:
            raise Refusal(f"--rounds {options.rounds} must be at least 1")
        if launched_world_size() > 1:
            raise Refusal("pace is of one process: start it without torchrun")
        asked = [read_request(["--recipe", name, *others], os.environ) for name in options.recipes]
        measured = [read_to_measure(["--recipe", name, *others], os.environ, 1)[1] for name in options.recipes]
        print(pace(asked, measured, options.rounds))


if __name__ == "__main__":
    main()
