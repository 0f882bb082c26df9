"""Measure speed on random images, in one of three ways:

    python -m large_batch_cifar_10_fast.bench [--repeats N] [options of train.py]
    python -m large_batch_cifar_10_fast.bench --against RECIPE [--rounds N] [options of train.py, for both recipes]
    python -m large_batch_cifar_10_fast.bench --input_pipelines [--steps N] [--repeats N] [options of train.py]

By default: the parts of a run, and a training step in turn with the baseline's. The baseline computes the same
uncompiled, in contiguous NCHW memory, with norm and update written as their formulas. torchrun can start it, too.
--against: steps of --recipe and of another recipe in turn, scaled to whole runs, and the ratio of their times.
--input_pipelines: an epoch of images loaded in each way of Page's first article of 2018 (docs/lineage.md).
Without CUDA a step has one worker per process, unless --workers is given: eight would take half a minute.
"""

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader

from . import __version__
from .checks import check_images, check_processes, precision_on, resolve_defaults
from .command_line import RECIPES, Parser, read_request
from .data.cifar10 import Images, random_images
from .data.shards import MEAN, STD, Batch, Shards
from .devices import DTYPES, allow_tf32, count_cores, count_gpus, matrix_rate
from .distributed import DistContext, init_distributed, launched_world_size
from .environment import code_digest, commit, device_name, peak_memory, utc_now
from .evaluate import evaluate
from .layers import GhostBatchNorm, norms_of, prepare_norms
from .log import Clock
from .metrics import AT_ONCE, Metrics
from .optim import NesterovSGD, follow_schedules, step_all
from .options import ConfigError, RunConfig, check_positive, exit_on_config_error, has_option
from .recipe import Recipe, apply_stage, autocast, images_of_an_epoch, reset, run_flop, stage_of, training_flop
from .train import Model, make_model, prepare, take_step, warm_up

TRAIN, TEST = 50_000, 10_000  # images of CIFAR-10
PADDING, SIZE = 4, 32  # pixels
CROPS = (2 * PADDING + 1, 2 * PADDING + 1, 2)  # offsets down and across, mirrored or not
PAGE_2018 = (323, 308, 301, 297, "-")  # seconds of Page's whole run on a V100 with each input pipeline

Side = tuple[Model, dict]  # a model, and micro-batches for each kind of stage
Seconds = dict[str, list[float]]  # of each part, one entry per repetition


def timed(ctx: DistContext, seconds: list[float], function: Callable[[], object]) -> object:
    """Call a function, append its seconds with all devices synchronized before and after, and return its result."""
    ctx.synchronize()
    start = time.perf_counter()
    result = function()
    ctx.synchronize()
    seconds.append(time.perf_counter() - start)
    return result


def make_side(model: Model, shards: Shards) -> Side:
    """Return the model with a step for each kind of stage (resolution, frozen parameters)."""
    follow_schedules(model.optimizers, epoch=1)
    steps = {}
    for stage in model.recipe.stages:
        if stage.kind not in steps:
            steps[stage.kind] = list(shards.epoch(seed=0, epoch=stage.first_epoch)[0])
    return model, steps


def time_in_turn(sides: list[Side], rounds: int, in_parts: bool = False) -> list[dict]:
    """Return the seconds of the steps of each side, taken in turn: a list for each kind of stage, or name of a part."""
    for repeat in range(rounds + 1):
        if repeat <= 1:
            seconds = [defaultdict(list) for _ in sides]  # those of the first round, a warm-up, are dropped
        for (model, batches), of_side in zip(sides, seconds, strict=True):
            allow_tf32(model.precision == "tf32")
            reset(model.network, model.recipe, seed=0)
            for kind, micro_batches in batches.items():
                apply_stage(model.network, kind)
                step = partial(take_step, model, micro_batches, Metrics(model.ctx))
                timed(model.ctx, of_side[kind], step)
        for (model, batches), of_side in zip(sides, seconds, strict=True):
            for micro_batches in batches.values():
                if in_parts and len(micro_batches) == 1:
                    time_step_in_parts(model, *micro_batches[0], of_side)
    return seconds


def seconds_of_run(recipe: Recipe, per_image: dict, epochs: int):
    """Return the seconds of a run's first epochs, from those of an image in each kind of stage."""
    images = [recipe.workers * images_of_an_epoch(recipe, TRAIN, epoch) for epoch in range(1, epochs + 1)]
    return sum(count * per_image[stage_of(recipe, epoch).kind] for epoch, count in enumerate(images, 1))


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


class BaselineNesterov(NesterovSGD):
    """The same update, one parameter and one operation at a time."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                v = self.state[w]["momentum_buffer"]
                d = -group["lr"] * (w.grad + group["weight_decay"] * w)
                v.copy_(group["momentum"] * v + d)
                w.copy_(w + d + group["momentum"] * v)


def make_baseline(recipe: Recipe, precision: str, noise: Images, ctx: DistContext) -> Side:
    """Return the same model uncompiled, in contiguous NCHW memory, with its optimizers and a step of the last stage."""
    model, last = make_model(recipe, ctx, precision), recipe.stages[-1].kind
    for norm in norms_of(model.network):
        norm.__class__ = BaselineNorm
    model.network.to(memory_format=torch.contiguous_format)
    _, steps = make_side(model, prepare(noise, model, Clock(ctx.synchronize)).train)
    for i, sgd in enumerate(model.optimizers):
        if isinstance(sgd, NesterovSGD):
            model.optimizers[i] = BaselineNesterov(sgd.param_groups, sgd.defaults["momentum"])
    [(images, labels)] = steps[last]
    return model, {last: [(images.contiguous(), labels)]}


def measure_run(config: RunConfig, recipe: Recipe, repeats: int = 5, baseline_precision: str = "fp32") -> dict:
    """Return conditions, seconds of every part and figures derived from them; {} on all processes but the main one."""
    check_processes(config.micro_batches, recipe, launched_world_size())
    check_images(recipe, TRAIN)
    with init_distributed(recipe.workers, device=config.device) as ctx:
        config, seconds = resolve_defaults(config, recipe, ctx, TRAIN), defaultdict(list)
        make = partial(make_model, recipe, ctx, config.precision, config.compile, config.micro_batches)
        model, noise = timed(ctx, seconds["compilation"], make), random_images(TRAIN, TEST)
        for _ in range(min(repeats, 3)):
            data = prepare(noise, model, clock := Clock(ctx.synchronize))
            for part, took in clock.seconds.items():
                seconds[part].append(took)
        if ctx.on_gpu:
            torch.cuda.reset_peak_memory_stats(ctx.device)
        last, (_, batches) = recipe.stages[-1].kind, make_side(model, data.train)
        of_last = {last: batches.pop(last)}
        [steps] = time_in_turn([(model, batches)], repeats)
        for kind, took in steps.items():
            epoch = next(stage.first_epoch for stage in recipe.stages if stage.kind == kind)
            seconds[f"step from epoch {epoch} on"] = took
        apply_stage(model.network, last)
        step = partial(take_step, model, of_last[last], Metrics(ctx))
        step()
        ctx.synchronize()
        peak = peak_memory(ctx.device)  # before the baseline takes memory
        if ctx.on_gpu:
            time_launches(step, ctx, repeats, seconds)
        for seed in range(repeats):
            epoch = partial(data.train.epoch, seed, epoch=1)  # sampling counts, too
            timed(ctx, seconds["augmentation of an epoch"], lambda e=epoch: [None for _ in e()])
        sides = (model, of_last), make_baseline(recipe, baseline_precision, noise, ctx)
        ours, theirs = time_in_turn(sides, repeats, in_parts=True)
        steps[last], theirs["step"] = ours.pop(last), theirs.pop(last)
        seconds |= {"step": steps[last], **ours}
        allow_tf32(model.precision == "tf32")
        count = len(data.test[0]) if ctx.on_gpu else AT_ONCE // 4  # a CPU takes minutes for 10,000 test images
        part = data.test[0][:count], data.test[1][:count]
        for _ in range(min(repeats, 3)):
            timed(ctx, took := [], lambda: evaluate(model.network, recipe, recipe.tta, model.precision, part, ctx))
            seconds["validation"].append(took[0] * len(data.test[0]) / count)
        metadata = conditions(ctx) | settings(model) | {"baseline precision": baseline_precision, "repeats": repeats}
        return {"conditions": metadata, **figures(model, seconds, theirs, steps, peak)} if ctx.is_main else {}


def time_launches(step: Callable[[], None], ctx: DistContext, repeats: int, seconds: Seconds) -> None:
    """Measure when the host has launched a step, and the step as one CUDA graph, which training does not use."""
    for _ in range(repeats):
        ctx.synchronize()
        start = time.perf_counter()
        step()
        seconds["launching of a step"].append(time.perf_counter() - start)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    gc.collect()  # gradients of earlier steps may belong to another stream
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # a capture needs a step on its own stream first
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(repeats):
            timed(ctx, seconds["step as one CUDA graph"], graph.replay)
    except RuntimeError as error:
        torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own
        ctx.warn(f"no CUDA graph of a step: {error}")


def time_step_in_parts(model: Model, images: Tensor, labels: Tensor, seconds: Seconds):
    """Take a step on images [B, 3, H, W] and labels [B], synchronized after each part."""
    network, recipe, ctx, precision = model.network, model.recipe, model.ctx, model.precision
    allow_tf32(precision == "tf32")
    prepare_norms(network, len(ctx.workers), tracking=False)

    result = timed(ctx, seconds["forward"], lambda: model.forward(images, labels, len(ctx.workers)))
    timed(ctx, seconds["backward"], result.loss.backward)
    timed(ctx, seconds["averaging"], lambda: ctx.average_gradients(network, recipe.loss_scale))
    with autocast(recipe, precision, ctx.device):
        timed(ctx, seconds["update"], lambda: step_all(model.optimizers))


def figures(model: Model, seconds: Seconds, of_baseline: Seconds, steps: dict, peak: int) -> dict:
    """Return a table of seconds, and the speed, work and training time that follow from it."""
    recipe, count = model.recipe, model.recipe.workers * model.recipe.batch_size
    table = {name: {"median": median(v), "min": min(v), "max": max(v)} for name, v in seconds.items()}
    for name in of_baseline.keys() & seconds.keys():
        ratios = [theirs / ours for theirs, ours in zip(of_baseline[name], seconds[name], strict=True)]
        table[name] |= {"baseline": median(of_baseline[name]), "speedup": median(ratios)}
    per_image, last = {kind: median(took) / count for kind, took in steps.items()}, recipe.stages[-1].kind
    rate, product_rate = training_flop(recipe, last) / per_image[last], matrix_rate(model.precision, model.ctx.device)
    augmentation = table["augmentation of an epoch"]["median"]
    return {
        "seconds": table,
        "images per second": 1 / per_image[last],
        "work of a run, PFLOP": run_flop(recipe, TRAIN) / 1e15,
        "training of a run, s": seconds_of_run(recipe, per_image, recipe.epochs),
        "TFLOP/s": rate / 1e12,
        "utilization, of the matrix product's rate": rate / product_rate / model.ctx.world_size,
        "augmentation, share of an epoch": augmentation / seconds_of_run(recipe, per_image, epochs=1),
        "peak memory per process, GiB": peak / 2**30,
    }


def run_as_text(result: dict) -> str:
    table = pd.DataFrame(result["seconds"]).T.rename(columns={"median": "seconds"})
    return report(result, table, *(f"{n:42}{v:12.4g}" for n, v in result.items() if isinstance(v, float)))


def compare_recipes(requests: list[list[str]], rounds: int = 7) -> dict:
    """Measure steps of two recipes in turn, scaled to whole runs."""
    if launched_world_size() > 1:
        raise ConfigError("--against needs one process: start it without torchrun")
    asked, measured = [read_request(r) for r in requests], [read_to_measure(r)[1] for r in requests]
    with init_distributed(device=asked[0][0].device) as ctx:
        sides, rows = [], []
        for (config, whole), recipe in zip(asked, measured, strict=True):
            check_processes(config.micro_batches, recipe, 1)
            check_images(recipe, TRAIN)
            precision = precision_on(ctx, config.precision, whole, TRAIN)
            alone = replace(ctx, total_workers=recipe.workers)
            model = make_model(recipe, alone, precision, not config.no_compile, config.micro_batches)
            sides.append(make_side(model, prepare(random_images(TRAIN, 1), model, Clock(ctx.synchronize)).train))
            rows.append(settings(model) | {"work of a run, PFLOP": run_flop(whole, TRAIN) / 1e15})
        runs = []
        for (_, whole), recipe, seconds in zip(asked, measured, time_in_turn(sides, rounds), strict=True):
            images = recipe.workers * recipe.batch_size
            per_image = {kind: np.array(took) / images for kind, took in seconds.items()}
            runs.append(seconds_of_run(whole, per_image, whole.epochs).tolist())
        rows = [row | {"training of a run, s": run} for row, run in zip(rows, runs, strict=True)]
        ratios = [other / one for one, other in zip(*runs, strict=True)]
        return {"conditions": conditions(ctx), "recipes": rows, "ratios": ratios, "interval": interval(ratios)}


def interval(values: list[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median by ranks (any distribution); None below six values."""
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    return (float(low), float(high)) if low <= high else None


def comparison_as_text(result: dict) -> str:
    ratios, one, other = result["ratios"], *(side["recipe"] for side in result["recipes"])
    table = pd.DataFrame(result["recipes"]).set_index("recipe")
    table["training of a run, s"] = [with_range(took, 1) for took in table["training of a run, s"]]
    text = f"{other} takes {with_range(ratios, 2)} times as long as {one}: median (range), n = {len(ratios)}"
    if result["interval"]:
        text += "; 95% confidence interval [{:.2f}, {:.2f}]".format(*result["interval"])
    return report(result, table, text)


# Input pipelines


@dataclass(frozen=True)
class OnCPU:
    """A data set that crops and mirrors on the CPU: float32 [3, 32, 32] and labels.

    `images` are uint8 [n, 32, 32, 3], or come from `pad_and_normalize`. Without `crops` [n, 3] each access samples one.
    """

    images: np.ndarray
    labels: np.ndarray
    crops: list[list[int]] | None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] if self.images.dtype == np.float32 else pad_and_normalize(self.images[index])
        down, across, mirrored = self.crops[index] if self.crops else map(random.randrange, CROPS)
        image = image[:, down : down + SIZE, across : across + SIZE]
        return torch.from_numpy(np.ascontiguousarray(image[:, :, ::-1] if mirrored else image)), int(self.labels[index])


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
    for batch, targets in DataLoader(OnCPU(images, labels, crops), size, **how):
        # Copy the pinned memory before casting: cast on the host, the batch would no longer be pinned.
        moved = batch.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
        yield moved, targets.to(device, non_blocking=True)


def input_pipelines(images: np.ndarray, labels: np.ndarray, shards: Shards, cores: int) -> dict[str, Callable]:
    """Return functions that load an epoch in each of Page's ways, and in ours from `shards`, by name."""
    ready, processes = pad_and_normalize(images), min(4, cores)
    return {
        f"(a) all for each image, {processes} processes": partial(load_epoch, images, labels, False, processes, shards),
        "(b) prepared once, one process": partial(load_epoch, ready, labels, False, 1, shards),
        "(c) crops sampled in bulk": partial(load_epoch, ready, labels, True, 1, shards),
        "(d) on the main thread": partial(load_epoch, ready, labels, True, 0, shards),
        "(e) ours, all on the device": lambda: (step[0] for step in shards.epoch(seed=0, epoch=1)),
    }


def time_epoch(batches: Iterable[Batch], use: Callable, most: int, steps: int, ctx: DistContext) -> float:
    """Return the seconds of an epoch of `steps` batches; if `most` is smaller, measure as many and extrapolate."""
    ctx.synchronize()
    start = time.perf_counter()
    for taken, batch in zip(range(1, min(most, steps) + 1), batches, strict=False):
        use(batch)
        if taken == 1:
            ctx.synchronize()
            first = time.perf_counter() - start
    ctx.synchronize()
    total = time.perf_counter() - start
    return total if taken == steps else first + (total - first) / (taken - 1) * (steps - 1)


def compare_pipelines(config: RunConfig, recipe: Recipe, repeats: int = 1, steps: int = 0) -> dict:
    """Measure an epoch of every input pipeline in turn, without training and with at most `steps` training steps."""
    if recipe.workers > 1 or launched_world_size() > 1:
        raise ConfigError("--input_pipelines needs one worker on one process: use --recipe page, without torchrun")
    check_processes(config.micro_batches, recipe, 1)
    check_images(recipe, TRAIN)
    with init_distributed(device=config.device) as ctx:
        config, noise = resolve_defaults(config, recipe, ctx, TRAIN), random_images(TRAIN, 1)
        model = make_model(recipe, ctx, config.precision, config.compile, config.micro_batches)
        shards = prepare(noise, model, Clock(ctx.synchronize)).train
        warm_up(model, TRAIN, 1)  # with the short last batch
        metrics, whole = Metrics(ctx), shards.steps_of(epoch=1)
        most = max(2, min(steps or (whole if ctx.on_gpu else 5), whole))
        pipelines = input_pipelines(*noise.train, shards, count_cores())
        seconds = {name: {"loading": [], "with training": []} for name in pipelines}
        for repeat in range(repeats):
            for name, load in [*pipelines.items()][:: -1 if repeat % 2 else 1]:  # a drift of speed falls on all
                loading = time_epoch(load(), lambda batch: None, whole, whole, ctx)
                trained = time_epoch(load(), lambda b: take_step(model, [b], metrics), most, whole, ctx)
                seconds[name]["loading"].append(loading)
                seconds[name]["with training"].append(trained)
        return {"conditions": conditions(ctx) | settings(model) | {"training steps": most}, "pipelines": seconds}


def pipelines_as_text(result: dict) -> str:
    rows = result["pipelines"].values()
    columns = {f"{part}, s": [with_range(row[part], 2) for row in rows] for part in ("loading", "with training")}
    return report(result, pd.DataFrame(columns | {"Page's run on a V100, s": PAGE_2018}, index=result["pipelines"]))


def read_to_measure(arguments: list[str], processes: int = 1) -> tuple[RunConfig, Recipe]:
    """Return config and recipe; without a GPU with one worker per process, unless --workers is given."""
    config, recipe = read_request(arguments)
    if has_option(recipe, "workers") and not count_gpus(config.device):
        return read_request(["--workers", str(processes), *arguments])  # the last one counts
    return config, recipe


def main() -> None:
    parser = Parser(prog="python -m large_batch_cifar_10_fast.bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, ways = parser.add_argument, parser.add_mutually_exclusive_group()
    ways.add_argument("--against", choices=RECIPES, metavar="RECIPE", help="compare --recipe with another recipe")
    ways.add_argument("--input_pipelines", action="store_true", help="compare ways to load images")
    add("--json", action="store_true", help="print JSON")
    add("--repeats", type=int, help="repetitions (default 5; with --input_pipelines 1)")
    add("--baseline_precision", choices=DTYPES, help="precision of the baseline (default fp32)")
    add("--rounds", type=int, help="with --against: rounds (default 7); an interval needs 6")
    add("--steps", type=int, help="with --input_pipelines: training steps (default all; 5 without CUDA)")
    with exit_on_config_error("bench"):
        options, others = parser.parse_known_args()
        result, as_text = measure(options, others)
    if result:
        print(json.dumps(result, indent=2) if options.json else as_text(result))


def measure(options: argparse.Namespace, others: list[str]) -> tuple[dict, Callable[[dict], str]]:
    """Measure in the way that the options choose. Return the result, and the function that formats it."""
    way = "against" if options.against else "input_pipelines" if options.input_pipelines else ""
    names = {"against": {"rounds"}, "input_pipelines": {"repeats", "steps"}, "": {"repeats", "baseline_precision"}}
    given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("against", "input_pipelines", "json") and value is not None
    }
    check_positive(options, *(given.keys() - {"baseline_precision"}))
    for name in given.keys() - names[way]:
        raise ConfigError(f"--{name} does not apply to this way to measure: leave it out")
    if way == "against":
        return compare_recipes([others, [*others, "--recipe", options.against]], **given), comparison_as_text
    if way == "input_pipelines":
        return compare_pipelines(*read_request(["--recipe", "page", *others]), **given), pipelines_as_text
    return measure_run(*read_to_measure(others, launched_world_size()), **given), run_as_text


if __name__ == "__main__":
    main()
