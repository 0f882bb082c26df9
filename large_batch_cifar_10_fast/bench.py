"""Measure speed on random images: where the time of a run goes, or which of two recipes is faster.

    python -m large_batch_cifar_10_fast.bench [--repeats N] [options of train.py]
    python -m large_batch_cifar_10_fast.bench --against RECIPE [--repeats N] [options of train.py, for both recipes]

A step is the one that training takes: on a GPU a CUDA graph where training uses them. torchrun can start the first.
Without a GPU a step has one worker per process, unless --workers is given: eight would take half a minute.
"""

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from scipy import stats

from . import ConfigError, exit_on_config_error
from .compiling import CudaGraphs, Step, compiled
from .config import Options, Parser, check_images, check_processes, choose_computation, parse
from .data.cifar10 import random_images
from .data.shards import Sample
from .devices import allow_tf32, count_gpus, hardware_name, matrix_rate, peak_memory
from .distributed import DistContext, init_distributed, launched_world_size, on_one_machine
from .evaluate import AT_ONCE, evaluate
from .log import Clock
from .optim import follow_schedules, update_weights
from .recipe import Model, Recipe, apply_stage, images_of_an_epoch, reset, run_flop, stage_of, training_flop
from .recipes import RECIPES
from .runs import commit
from .train import Data, distinct_samples, make_model, make_step, prepare

TRAIN, TEST = 50_000, 10_000  # images of CIFAR-10
SAMPLING = "sampling of an epoch"

Laps = dict[Hashable, list[float]]  # seconds of a part of a run, or of a step in a stage (its signature), by repetition


@dataclass(frozen=True)
class Bench:
    """A recipe that is ready to train, with a sample of each distinct stage (resolution, frozen parameters)."""

    model: Model
    data: Data
    step: Step
    samples: list[Sample]
    laps: Laps  # of the set-up

    def __str__(self) -> str:
        recipe, model, graph = self.model.recipe, self.model, isinstance(self.step, CudaGraphs)
        how = f"{model.precision.name}, {'' if model.compiled else 'un'}compiled, {'a' if graph else 'no'} CUDA graph"
        return f"{recipe.name}: {recipe.workers} x {recipe.batch_size} images a step, {how}"


def set_up(options: Options, recipe: Recipe, ctx: DistContext) -> Bench:
    """Prepare network, images and graphs as training does."""
    options, ctx = choose_computation(options, recipe, ctx, TRAIN), replace(ctx, total_workers=recipe.workers)
    clock, images = Clock(ctx.synchronize), random_images(TRAIN, TEST)
    images = images.pinned() if ctx.on_gpu and ctx.world_size == 1 else images
    with clock.timed("compilation"):
        model = make_model(recipe, ctx, options.precision, options.micro_batches)
        if options.compile:
            model = compiled(model, test_images=TEST)
    for _ in range(3):
        data = prepare(images, model, clock)
    if ctx.on_gpu:
        torch.cuda.reset_peak_memory_stats(ctx.device)
    samples: dict[Hashable, Sample] = {}
    for sample in distinct_samples(model, data.train):
        samples.setdefault(sample.stage.signature, sample)  # a short batch comes last
    step = make_step(model, data, use_graphs=ctx.on_gpu and on_one_machine() and not options.no_graph)
    return Bench(model, data, step, list(samples.values()), clock.laps)


def time_in_turn(benches: list[Bench], repeats: int) -> list[Laps]:
    """Return the seconds of sampling and steps of each recipe, taken in turn, without a first round, the warm-up."""
    clocks = [Clock(bench.model.ctx.synchronize) for bench in benches]
    count = 10 if benches[0].model.ctx.on_gpu else 1  # between two readings: training does not wait for a GPU's steps
    for _ in range(1 + repeats):
        for bench, clock in zip(benches, clocks, strict=True):
            model, data = bench.model, bench.data
            allow_tf32(model.precision.name == "tf32")
            reset(model.network, model.recipe, seed=0)
            with clock.timed(SAMPLING):
                for _ in range(count):
                    data.train.epoch(seed=0, epoch=1)
            for sample in bench.samples:
                apply_stage(model.network, sample.stage)
                with clock.timed(sample.stage.signature):
                    for _ in range(count):
                        follow_schedules(model.optimizers, epoch=1)
                        bench.step(sample)
    return [{part: [lap / count for lap in laps[1:]] for part, laps in clock.laps.items()} for clock in clocks]


def time_parts(bench: Bench, repeats: int) -> Laps:
    """Return the seconds of the parts of a step of the last stage, each synchronized and in no graph, and of validation
    after the last epoch; on a CPU, where it takes minutes, that is extrapolated."""
    model, sample, clock = bench.model, bench.samples[-1], Clock(bench.model.ctx.synchronize)
    recipe, ctx = model.recipe, model.ctx
    images, labels = test = bench.data.test
    some = test if ctx.on_gpu else (images[: AT_ONCE // 4], labels[: AT_ONCE // 4])
    for _ in range(1 + repeats):
        with clock.timed("augmentation"):
            images, labels = next(sample.micro_batches())  # with several micro-batches, of the first one
        with clock.timed("forward"):
            loss = model.forward(images, labels).loss
        with clock.timed("backward"):
            loss.backward()
        with clock.timed("averaging"):
            ctx.average_gradients(model.network, recipe.loss_scale)
        with clock.timed("update"), model.precision.autocast():
            update_weights(model.optimizers)
        with clock.timed("validation"):
            evaluate(model, recipe.tta, some)
    clock.laps["validation"] = [lap * len(test[0]) / len(some[0]) for lap in clock.laps["validation"]]
    return {part: laps[1:] for part, laps in clock.laps.items()}


def seconds_of_run(run: Recipe, measured: Recipe, laps: Laps) -> np.ndarray:
    """Return the training seconds of a run by each repetition. `measured` may have fewer workers than `run`."""
    images = {epoch: run.workers * images_of_an_epoch(run, TRAIN, epoch) for epoch in range(1, run.epochs + 1)}
    of_an_image = {part: np.array(seconds) / (measured.workers * measured.batch_size) for part, seconds in laps.items()}
    training = sum(count * of_an_image[stage_of(run, epoch).signature] for epoch, count in images.items())
    return training + run.epochs * np.array(laps[SAMPLING])


def measure_run(options: Options, recipe: Recipe, repeats: int, ctx: DistContext) -> list[str]:
    """Return lines on the parts of a run and of a step, and on the speed that follows from them."""
    bench = set_up(options, recipe, ctx)
    (laps,) = time_in_turn([bench], repeats)
    peak, last = peak_memory(ctx.device) / 2**30, recipe.stages[-1].signature
    names: dict[Hashable, str] = {s.signature: f"step from epoch {s.first_epoch} on" for s in reversed(recipe.stages)}
    parts = bench.laps | laps | time_parts(bench, repeats)
    lines = [f"{names.get(part, part):26}{with_range(seconds)}" for part, seconds in parts.items()]
    run = with_range(seconds_of_run(recipe, recipe, laps))
    speed = recipe.workers * recipe.batch_size / median(laps[last])
    rate = speed * training_flop(recipe, last)
    largest = matrix_rate(bench.model.precision.name, ctx.device) * ctx.world_size
    lines += ["", f"peak memory of a process  {peak:.3g} GiB"]
    lines += [f"training of a run         {run} s, {run_flop(recipe, TRAIN) / 1e15:.4g} PFLOP"]
    lines += [f"speed of the last step    {speed:.0f} images/s, {rate / 1e12:.4g} TFLOP/s"]
    lines += [f"share of the matrix rate  {rate / largest:.1%}"]
    return [str(bench), "", "seconds: median (least to most)", *lines]


def compare_recipes(requests: list[list[str]], repeats: int, ctx: DistContext) -> list[str]:
    """Return lines on the training times of two recipes, and on which is faster."""
    runs = [parse(request)[1] for request in requests]
    benches = [set_up(*read_to_measure(request), ctx) for request in requests]
    both = zip(runs, benches, time_in_turn(benches, repeats), strict=True)
    one, other = (seconds_of_run(run, bench.model.recipe, laps) for run, bench, laps in both)
    lines = [f"{bench}: training of a run {with_range(s)} s" for bench, s in zip(benches, (one, other), strict=True)]
    return [*lines, "", which_is_faster(runs[0].name, runs[1].name, other / one)]


def which_is_faster(one: str, other: str, ratios: np.ndarray) -> str:
    """Return a sentence on the ratios of the times of `other` to those of `one`, in pairs."""
    rank = int(stats.binom.ppf(0.025, len(ratios), 0.5))  # of the sign test, for any distribution; 0 below six ratios
    low, high = np.sort(ratios)[[rank - 1, -rank]] if rank else (-np.inf, np.inf)
    verdict = f"{one} is faster" if low > 1 else f"{other} is faster" if high < 1 else "No difference is shown"
    text = f"{other} takes {with_range(ratios)} times as long as {one}, n = {len(ratios)}"
    return f"{verdict}: {text}, 95% confidence interval of the median [{low:.4g}, {high:.4g}]"


def with_range(values: Sequence[float] | np.ndarray) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def read_to_measure(arguments: list[str]) -> tuple[Options, Recipe]:
    """Return the options and the recipe; without a GPU with one worker per process, unless --workers is given."""
    processes, (options, recipe) = launched_world_size(), parse(arguments)
    if "workers" in vars(recipe) and not count_gpus(options.device):
        options, recipe = parse(["--workers", str(processes), *arguments])  # the last one counts
    check_processes(recipe, processes, options.micro_batches)
    check_images(recipe, TRAIN, TEST, processes)
    return options, recipe


@exit_on_config_error("bench")
def main() -> None:
    parser = Parser(prog="python -m large_batch_cifar_10_fast.bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--against", choices=RECIPES, metavar="RECIPE", help="compare --recipe with another recipe")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions (default 7)")
    asked, others = parser.parse_known_args()
    if asked.repeats < 1:
        raise ConfigError(f"--repeats {asked.repeats} must be at least 1")
    if launched_world_size() > 1 and asked.against:
        raise ConfigError("--against needs one process: start without torchrun")
    options, recipe = read_to_measure(others)
    with init_distributed(recipe.workers, options.device) as ctx:
        hardware = f"{ctx.world_size} x {hardware_name(ctx.device)}"
        head = f"# commit {commit()}, torch {torch.__version__}, {hardware}, {asked.repeats} repetitions"
        both, repeats = [others, [*others, "--recipe", asked.against]], asked.repeats
        lines = compare_recipes(both, repeats, ctx) if asked.against else measure_run(options, recipe, repeats, ctx)
        if ctx.is_main:
            print(head, *lines, sep="\n")


if __name__ == "__main__":
    main()
