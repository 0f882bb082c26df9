"""Measure speed on random images, in one of three ways:

    python -m large_batch_cifar_10_fast.bench [--repeats N] [options of train.py]
    python -m large_batch_cifar_10_fast.bench --against RECIPE [--repeats N] [options of train.py, for both recipes]
    python -m large_batch_cifar_10_fast.bench --input_pipelines [--steps N] [--repeats N] [options of train.py]

By default: the parts of a run, and a training step in turn with the baseline's. The baseline computes the same
uncompiled, in contiguous NCHW memory, with norm and update written as their formulas. torchrun can start it, too.
--against: steps of --recipe and of another recipe in turn, scaled to whole runs, and the ratio of their times.
--input_pipelines: an epoch of images loaded in each way of Page's first article of 2018 (docs/recipes.md).
Without CUDA a step has one worker per process, unless --workers is given: eight would take half a minute.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from . import __version__
from .checks import check_images, check_processes, precision_on, resolve_defaults
from .command_line import RECIPES, Parser, read_request
from .data.cifar10 import random_images
from .data.shards import MEAN, STD, Batch, Shards
from .devices import DTYPES, allow_tf32, count_cores, count_gpus, matrix_rate
from .distributed import DistContext, init_distributed, launched_world_size, on_one_machine
from .environment import code_digest, commit, device_name, peak_memory, utc_now
from .evaluate import evaluate
from .graphs import graphed
from .layers import GhostBatchNorm, norms_of, prepare_norms
from .log import Clock
from .metrics import AT_ONCE, Metrics
from .optim import NesterovSGD, Tensors, follow_schedules, step_all
from .options import ConfigError, RunConfig, check_positive, exit_on_config_error, has_option
from .recipe import Recipe, Stage, apply_stage, autocast, images_of_an_epoch, reset, run_flop, stage_of, training_flop
from .train import Data, Model, make_model, make_step, prepare, steps_of_every_kind, take_step, warm_up

TRAIN, TEST = 50_000, 10_000  # images of CIFAR-10
PADDING, SIZE = 4, 32  # pixels
CROPS = (2 * PADDING + 1, 2 * PADDING + 1, 2)  # offsets down and across, mirrored or not
PAGE_2018 = (323, 308, 301, 297, "-")  # seconds of Page's whole run on a V100 with each input pipeline

Steps = dict[Stage, list[Batch]]  # the micro-batches of a step of each kind of stage (resolution, frozen parameters)
Seconds = dict[Stage | str, list[float]]  # of a step of a kind, or of a part of a run: one entry for each repetition


def first_steps(model: Model, shards: Shards) -> Steps:
    steps = {}
    for step in steps_of_every_kind(model, shards):
        steps.setdefault(step.kind, list(step))  # a short batch comes last
    return steps


def time_in_turn(models: list[tuple[Model, Steps]], repeats: int, in_parts: bool = False) -> list[Seconds]:
    """Return the seconds of the steps of each model, taken in turn, without those of a first round, the warm-up."""
    clocks = [Clock(model.ctx.synchronize) for model, _ in models]
    for _ in range(1 + repeats):
        for (model, steps), clock in zip(models, clocks, strict=True):
            allow_tf32(model.precision == "tf32")
            reset(model.network, model.recipe, seed=0)
            follow_schedules(model.optimizers, epoch=1)
            for kind, micro_batches in steps.items():
                apply_stage(model.network, kind)
                metrics = Metrics(model.ctx)
                with clock.timed(kind):
                    take_step(model, micro_batches, metrics)
            if in_parts and len(micro_batches) == 1:
                time_step_in_parts(model, *micro_batches[0], clock)
    return [{part: laps[1:] for part, laps in clock.laps.items()} for clock in clocks]


def seconds_of_run(run: Recipe, epochs: int, measured: Recipe, steps: Mapping[Stage, float | np.ndarray]):
    """Return the seconds of a run's first epochs, from those of a step of the measured recipe in each kind of stage."""
    images = {epoch: run.workers * images_of_an_epoch(run, TRAIN, epoch) for epoch in range(1, epochs + 1)}
    total = sum(count * steps[stage_of(run, epoch).kind] for epoch, count in images.items())
    return total / (measured.workers * measured.batch_size)


def conditions(ctx: DistContext) -> dict[str, object]:
    """Return what a measurement was made with. All processes must call it."""
    code = {"version": __version__, "commit": commit(), "code": code_digest(), "started": utc_now()}
    return {**code, "device": device_name(ctx), "torch": torch.__version__}


def settings(model: Model) -> dict[str, object]:
    recipe, how = model.recipe, {"precision": model.precision, "compiled": model.compiled}
    return {"recipe": recipe.name, "workers": recipe.workers, "batch": recipe.batch_size, **how}


def report(result: dict, table: pd.DataFrame, *lines: str) -> str:
    head = "# " + ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    return "\n".join([head, "", table.to_string(float_format="%.4f", na_rep="-"), "", *lines])


def with_range(values: list[float], digits: int) -> str:
    low, middle, high = (f"{function(values):.{digits}f}" for function in (min, median, max))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


# The parts of a run, and the baseline


class BaselineNorm(GhostBatchNorm):
    """Ghost batch norm, written as its formula."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.ghost_batch, *x.shape[1:]).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, correction=0)
        if self.tracking:
            self.keep_statistics(mean.flatten(1), variance.flatten(1), groups[0, :, 0].numel())
        x_hat = (groups - mean) / torch.sqrt(variance + self.eps)
        if self.weight is not None:
            x_hat = x_hat * self.weight.view(-1, 1, 1)
        return (x_hat + self.bias.view(-1, 1, 1)).reshape(x.shape).to(x.dtype)


def baseline_nesterov(weights: Tensors, gradients: Tensors, velocities: Tensors, lr, weight_decay, momentum) -> None:
    """Apply the update of NesterovSGD, one parameter and one operation at a time."""
    for w, gradient, v in zip(weights, gradients, velocities, strict=True):
        d = -lr * (gradient + weight_decay * w)
        v.copy_(momentum * v + d)
        w.copy_(w + d + momentum * v)


def make_baseline(ours: Model, steps: Steps, precision: str) -> tuple[Model, Steps]:
    """Return the same model uncompiled, in contiguous NCHW memory, with a step of the last stage as one batch."""
    model, (last, micro_batches) = make_model(ours.recipe, ours.ctx, precision), [*steps.items()][-1]
    model.network.load_state_dict(ours.network.state_dict())
    for norm in norms_of(model.network):
        norm.__class__ = BaselineNorm
    model.network.to(memory_format=torch.contiguous_format)
    for optimizer in model.optimizers:
        if isinstance(optimizer, NesterovSGD):
            optimizer.update = baseline_nesterov
    images, labels = map(torch.cat, zip(*micro_batches, strict=True))
    return model, {last: [(images.to(next(model.network.parameters())).contiguous(), labels)]}  # of the weights' type


def measure_run(config: RunConfig, recipe: Recipe, repeats: int, baseline_precision: str, ctx: DistContext) -> dict:
    """Return conditions, seconds of every part and figures derived from them; {} on all processes but the main one."""
    config, clock = resolve_defaults(config, recipe, ctx, TRAIN), Clock(ctx.synchronize)
    noise = random_images(TRAIN, TEST)
    if ctx.on_gpu and ctx.world_size == 1:  # as in training
        noise = noise.pinned()
    with clock.timed("compilation"):
        model = make_model(recipe, ctx, config.precision, config.compile, config.micro_batches, test_images=TEST)
    for _ in range(min(repeats, 3)):
        data = prepare(noise, model, clock)
    if ctx.on_gpu:
        torch.cuda.reset_peak_memory_stats(ctx.device)
    steps = first_steps(model, data.train)
    time_in_turn([(model, steps)], repeats=0)
    peak = peak_memory(ctx.device)  # before graphs and the baseline take memory
    if ctx.on_gpu:
        time_launches(model, data, repeats, clock)
    for seed in range(repeats):
        with clock.timed("augmentation of an epoch"):  # sampling counts, too
            for step in data.train.epoch(seed, epoch=1):
                list(step)
    count = len(data.test[0]) if ctx.on_gpu else AT_ONCE // 4  # a CPU takes minutes for 10,000 test images
    some = tuple(part[:count] for part in data.test)
    for _ in range(min(repeats, 3)):
        with clock.timed("validation"):
            evaluate(model.network, recipe, recipe.tta, model.precision, some, ctx, model.evaluation)
    clock.laps["validation"] = [lap * len(data.test[0]) / count for lap in clock.laps["validation"]]
    models = [(model, steps), make_baseline(model, steps, baseline_precision)]
    ours, theirs = time_in_turn(models, repeats, in_parts=True)
    metadata = conditions(ctx) | settings(model) | {"baseline precision": baseline_precision, "repeats": repeats}
    return {"conditions": metadata, **figures(model, clock.laps | ours, theirs, peak)} if ctx.is_main else {}


def time_launches(model: Model, data: Data, repeats: int, clock: Clock) -> None:
    """Measure when the host has launched a step of training, and on one machine the step as one CUDA graph."""
    take, step = make_step(model, data), data.train.epoch(0, epoch=model.recipe.stages[-1].first_epoch)[0]
    take(step)
    graph = graphed(take, [step], model.ctx) if on_one_machine() else take
    for _ in range(repeats):
        model.ctx.synchronize()
        start = time.perf_counter()
        take(step)
        clock.laps["launching of a step"].append(time.perf_counter() - start)
        if graph is not take:
            with clock.timed("step as one CUDA graph"):
                graph(step)


def time_step_in_parts(model: Model, images: Tensor, labels: Tensor, clock: Clock) -> None:
    """Take a step on images [B, 3, H, W] and labels [B], synchronized after each part."""
    recipe, ctx = model.recipe, model.ctx
    prepare_norms(model.network, len(ctx.workers), tracking=False)
    with clock.timed("forward"):
        loss = model.forward(images, labels, len(ctx.workers)).loss
    with clock.timed("backward"):
        loss.backward()
    with clock.timed("averaging"):
        ctx.average_gradients(model.network, recipe.loss_scale)
    with clock.timed("update"), autocast(recipe, model.precision, ctx.device):
        step_all(model.optimizers)


def figures(model: Model, seconds: Seconds, of_baseline: Seconds, peak: int) -> dict:
    """Return a table of seconds, and the speed, work and training time that follow from it."""
    recipe, ctx, last = model.recipe, model.ctx, model.recipe.stages[-1].kind
    names = {stage.kind: f"step from epoch {stage.first_epoch} on" for stage in reversed(recipe.stages)}
    names[last] = "step"
    table = {}
    for part, ours in seconds.items():
        row = table[names.get(part, part)] = {"median": median(ours), "min": min(ours), "max": max(ours)}
        if part in of_baseline:
            ratios = [theirs / mine for theirs, mine in zip(of_baseline[part], ours, strict=True)]
            row |= {"baseline": median(of_baseline[part]), "speedup": median(ratios)}
    steps = {kind: table[name]["median"] for kind, name in names.items()}
    speed = recipe.workers * recipe.batch_size / steps[last]
    rate = speed * training_flop(recipe, last)
    augmentation = table["augmentation of an epoch"]["median"]
    return {
        "seconds": table,
        "images per second": speed,
        "work of a run, PFLOP": run_flop(recipe, TRAIN) / 1e15,
        "training of a run, s": seconds_of_run(recipe, recipe.epochs, recipe, steps),
        "TFLOP/s": rate / 1e12,
        "utilization, of the matrix product's rate": rate / matrix_rate(model.precision, ctx.device) / ctx.world_size,
        "augmentation, share of an epoch": augmentation / seconds_of_run(recipe, 1, recipe, steps),
        "peak memory per process, GiB": peak / 2**30,
    }


def run_as_text(result: dict) -> str:
    table = pd.DataFrame(result["seconds"]).T.rename(columns={"median": "seconds"})
    return report(result, table, *(f"{n:42}{v:12.4g}" for n, v in result.items() if isinstance(v, float)))


def compare_recipes(requests: list[list[str]], repeats: int, ctx: DistContext) -> dict:
    """Measure steps of two recipes in turn, scaled to whole runs."""
    models, runs, rows = [], [], []
    for arguments in requests:
        (config, recipe), (_, run) = read_to_measure(arguments), read_request(arguments)
        precision, alone = precision_on(ctx, config.precision, run, TRAIN), replace(ctx, total_workers=recipe.workers)
        model = make_model(recipe, alone, precision, not config.no_compile, config.micro_batches)
        shards = prepare(random_images(TRAIN, 1), model, Clock(ctx.synchronize)).train
        models.append((model, first_steps(model, shards)))
        runs.append(run)
        rows.append(settings(model) | {"work of a run, PFLOP": run_flop(run, TRAIN) / 1e15})
    for row, run, (model, _), laps in zip(rows, runs, models, time_in_turn(models, repeats), strict=True):
        steps = {kind: np.array(took) for kind, took in laps.items()}
        row["training of a run, s"] = seconds_of_run(run, run.epochs, model.recipe, steps).tolist()
    ratios = [other / one for one, other in zip(*(row["training of a run, s"] for row in rows), strict=True)]
    return {"conditions": conditions(ctx), "recipes": rows, "ratios": ratios, "interval": interval(ratios)}


def interval(values: list[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median by ranks (any distribution); None below six values."""
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    return (float(low), float(high)) if low <= high else None


def comparison_as_text(result: dict) -> str:
    ratios, one, other = result["ratios"], *(row["recipe"] for row in result["recipes"])
    table = pd.DataFrame(result["recipes"]).set_index("recipe")
    table["training of a run, s"] = [with_range(took, 1) for took in table["training of a run, s"]]
    text = f"{other} takes {with_range(ratios, 2)} times as long as {one}: median (range), n = {len(ratios)}"
    if result["interval"]:
        text += "; 95% confidence interval [{:.2f}, {:.2f}]".format(*result["interval"])
    return report(result, table, text)


# Input pipelines


def load_batch(images: np.ndarray, labels: np.ndarray, crops: list | None, indices: list[int]) -> Batch:
    """Crop and mirror images on the CPU, one after the other: float32 [B, 3, 32, 32], and labels int64 [B].

    `images` are uint8 [n, 32, 32, 3], or come from `pad_and_normalize`. Without `crops` [n, 3] each image samples one.
    """
    batch = []
    for index in indices:
        image = images[index] if images.dtype == np.float32 else pad_and_normalize(images[index])
        down, across, mirrored = crops[index] if crops else map(random.randrange, CROPS)
        image = image[:, down : down + SIZE, across : across + SIZE]
        image = np.ascontiguousarray(image[:, :, ::-1] if mirrored else image)
        batch.append((torch.from_numpy(image), int(labels[index])))
    return default_collate(batch)


def pad_and_normalize(images: np.ndarray) -> np.ndarray:
    """Turn bytes [..., 32, 32, 3] into float32 [..., 3, 40, 40], padded by reflection, normalized by channel."""
    border = (PADDING, PADDING)
    padded = np.pad(images, [(0, 0)] * (images.ndim - 3) + [border, border, (0, 0)], mode="reflect")
    return np.ascontiguousarray(np.moveaxis((padded - np.float32(MEAN)) / np.float32(STD), -1, -3))


def load_epoch(images: np.ndarray, labels: np.ndarray, bulk: bool, processes: int, shards: Shards) -> Iterator[Batch]:
    """Load an epoch on the CPU, all crops sampled at once if `bulk`, and copy each batch to the device."""
    crops = np.random.default_rng().integers(0, CROPS, (len(images), 3)).tolist() if bulk else None
    device, dtype, size = shards.images.device, shards.images.dtype, shards.recipe.batch_size
    how = {"shuffle": True, "num_workers": processes, "pin_memory": device.type == "cuda"}
    how["collate_fn"] = partial(load_batch, images, labels, crops)
    for batch, targets in DataLoader(range(len(images)), size, **how):
        # Copy the pinned memory before casting: cast on the host, the batch would no longer be pinned.
        moved = batch.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
        yield moved, targets.to(device, non_blocking=True)


def input_pipelines(images: np.ndarray, labels: np.ndarray, shards: Shards) -> dict[str, Callable]:
    """Return functions that load an epoch in each of Page's ways, and in ours from `shards`, by name."""
    ready, processes = pad_and_normalize(images), min(4, count_cores())
    return {
        f"(a) all for each image, {processes} processes": partial(load_epoch, images, labels, False, processes, shards),
        "(b) prepared once, one process": partial(load_epoch, ready, labels, False, 1, shards),
        "(c) crops sampled in bulk": partial(load_epoch, ready, labels, True, 1, shards),
        "(d) on the main thread": partial(load_epoch, ready, labels, True, 0, shards),
        "(e) ours, all on the device": lambda: (step[0] for step in shards.epoch(seed=0, epoch=1)),
    }


def time_epoch(batches: Iterable[Batch], use: Callable, most: int, steps: int, ctx: DistContext) -> float:
    """Return the seconds of an epoch of `steps` batches; if `most` is smaller, measure as many and extrapolate."""
    clock, batches = Clock(ctx.synchronize), iter(batches)
    with clock.timed("first"):
        use(next(batches))
    with clock.timed("others"):
        for batch in islice(batches, most - 1):
            use(batch)
    return clock.seconds["first"] + clock.seconds["others"] * (steps - 1) / max(1, most - 1)


def compare_pipelines(config: RunConfig, recipe: Recipe, repeats: int, steps: int | None, ctx: DistContext) -> dict:
    """Measure an epoch of every input pipeline in turn, without training and with at most `steps` training steps."""
    if recipe.workers > 1:
        raise ConfigError("--input_pipelines needs one worker: use --recipe page")
    config, noise = resolve_defaults(config, recipe, ctx, TRAIN), random_images(TRAIN, 1)
    model = make_model(recipe, ctx, config.precision, config.compile, config.micro_batches)
    shards = prepare(noise, model, Clock(ctx.synchronize)).train
    warm_up(model, TRAIN, 1)  # with the short last batch
    metrics, whole = Metrics(ctx), len(shards.epoch(seed=0, epoch=1))
    most = min(max(2, steps or (whole if ctx.on_gpu else 5)), whole)
    pipelines = input_pipelines(*noise.train, shards)
    seconds = {name: {"loading": [], "with training": []} for name in pipelines}
    for repeat in range(repeats):
        for name, load in [*pipelines.items()][:: -1 if repeat % 2 else 1]:  # a drift of speed falls on all
            seconds[name]["loading"].append(time_epoch(load(), lambda batch: None, whole, whole, ctx))
            trained = time_epoch(load(), lambda b: take_step(model, [b], metrics), most, whole, ctx)
            seconds[name]["with training"].append(trained)
    return {"conditions": conditions(ctx) | settings(model) | {"training steps": most}, "pipelines": seconds}


def pipelines_as_text(result: dict) -> str:
    rows = result["pipelines"].values()
    columns = {f"{part}, s": [with_range(row[part], 2) for row in rows] for part in ("loading", "with training")}
    return report(result, pd.DataFrame(columns | {"Page's run on a V100, s": PAGE_2018}, index=result["pipelines"]))


def read_to_measure(arguments: list[str]) -> tuple[RunConfig, Recipe]:
    """Return config and recipe; without a GPU with one worker per process, unless --workers is given."""
    processes, (config, recipe) = launched_world_size(), read_request(arguments)
    if has_option(recipe, "workers") and not count_gpus(config.device):
        config, recipe = read_request(["--workers", str(processes), *arguments])  # the last one counts
    check_processes(config.micro_batches, recipe, processes)
    check_images(recipe, TRAIN)
    return config, recipe


def main() -> None:
    parser = Parser(prog="python -m large_batch_cifar_10_fast.bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, ways = parser.add_argument, parser.add_mutually_exclusive_group()
    ways.add_argument("--against", choices=RECIPES, metavar="RECIPE", help="compare --recipe with another recipe")
    ways.add_argument("--input_pipelines", action="store_true", help="compare ways to load images")
    ways.add_argument("--baseline_precision", choices=DTYPES, default="fp32", help="of the baseline (default fp32)")
    add("--json", action="store_true", help="print JSON")
    add("--repeats", type=int, help="repetitions (default 5; 7 with --against, 1 with --input_pipelines)")
    add("--steps", type=int, help="with --input_pipelines: training steps (default all; 5 without CUDA)")
    with exit_on_config_error("bench"):
        options, others = parser.parse_known_args()
        result, as_text = measure(options, others)
    if result:
        print(json.dumps(result, indent=2) if options.json else as_text(result))


def measure(options: argparse.Namespace, others: list[str]) -> tuple[dict, Callable[[dict], str]]:
    """Measure in the way that the options choose. Return the result, and the function that formats it."""
    if options.steps is not None and not options.input_pipelines:
        raise ConfigError("--steps is for --input_pipelines: leave it out")
    if launched_world_size() > 1 and (options.against or options.input_pipelines):
        raise ConfigError("--against and --input_pipelines need one process: start without torchrun")
    check_positive(options, *(name for name in ("repeats", "steps") if getattr(options, name) is not None))
    repeats = options.repeats or (7 if options.against else 1 if options.input_pipelines else 5)
    config, recipe = read_to_measure(["--recipe", "page", *others] if options.input_pipelines else others)
    with init_distributed(recipe.workers, config.device) as ctx:
        if options.against:
            return compare_recipes([others, [*others, "--recipe", options.against]], repeats, ctx), comparison_as_text
        if options.input_pipelines:
            return compare_pipelines(config, recipe, repeats, options.steps, ctx), pipelines_as_text
        return measure_run(config, recipe, repeats, options.baseline_precision, ctx), run_as_text


if __name__ == "__main__":
    main()
