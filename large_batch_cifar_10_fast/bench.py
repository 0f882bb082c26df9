"""Measure speed on random images, in one of three ways:

    python -m large_batch_cifar_10_fast.bench [--repeats N] [options of train.py]
    python -m large_batch_cifar_10_fast.bench --against RECIPE [--rounds N] [options of train.py, for both recipes]
    python -m large_batch_cifar_10_fast.bench --input_pipelines [--steps N] [--repeats N] [--picture FILE] [...]

By default: the parts of a run, and a training step in turn with one of the baseline. The baseline computes the same
in contiguous NCHW memory, uncompiled, the norm and the update written as their formulas, in float32 unless
--baseline_precision names another type. Works under torchrun too.
--against: a step of every resolution of --recipe and of another recipe in turn, scaled to whole runs; their ratio.
--input_pipelines: an epoch of images loaded in each way of Page's first article of 2018 (docs/lineage.md).

Without CUDA a step is of one worker per process, unless --workers is given: more would take half a minute.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from . import __version__
from .checks import check_images, check_processes, precision_on, resolve_defaults
from .command_line import RECIPES, Parser, read_request
from .data.cifar10 import random_images
from .data.shards import MEAN, STD, Batch, Shards
from .devices import DTYPES, allow_tf32, count_cores, count_gpus, matrix_rate
from .distributed import DistContext, init_distributed, launched_world_size
from .environment import code_digest, commit, device_name, peak_memory, utc_now
from .evaluate import evaluate
from .layers import GhostBatchNorm, norms_of, prepare_norms
from .log import Clock
from .metrics import MOST_AT_ONCE, Metrics
from .optim import NesterovSGD, follow_schedules, step_all
from .options import ConfigError, RunConfig, exit_on_config_error, has_option
from .plot import BEHIND, WIDTH, check_picture, new_figure, save_picture
from .recipe import (
    Recipe,
    Stage,
    apply_stage,
    autocast,
    cast,
    images_of_an_epoch,
    images_to_warm_up,
    make_network,
    reduce_loss,
    reset,
    stage_of,
    training_flop,
    weight_dtype,
    work,
)
from .train import Model, make_model, prepare, take_step, warm_up

TRAIN, TEST = 50_000, 10_000  # images of CIFAR-10
PADDING, SIZE = 4, 32
OFFSETS = 2 * PADDING + 1
MOST_LOADERS = 4
PAGE_2018 = (323, 308, 301, 297, None)  # seconds of Page's whole run on a V100 with each input pipeline

Seconds = dict[str, list[float]]  # of each part, one entry per repetition


# Timing


def timed(ctx: DistContext, seconds: list[float], function: Callable[[], object]) -> object:
    """Call a function, append its seconds with all devices synchronized before and after, and return its result."""
    ctx.synchronize()
    start = time.perf_counter()
    result = function()
    ctx.synchronize()
    seconds.append(time.perf_counter() - start)
    return result


def timed_step(model: Model, optimizers: list[Optimizer], batches: list[Batch], seconds: list[float]) -> None:
    """Take a training step in the learner's own precision and append its seconds."""
    allow_tf32(model.precision == "tf32")
    metrics = Metrics(model.ctx)
    timed(model.ctx, seconds, lambda: take_step(model, optimizers, batches, metrics))


def first_batches(recipe: Recipe, shards: Shards) -> dict[Stage, list[Batch]]:
    """Return the micro-batches of one step of each kind (resolution, frozen parameters), in the order of training."""
    kinds: dict[Stage, int] = {}
    for stage in recipe.stages:
        kinds.setdefault(stage.kind, stage.first_epoch)
    return {kind: next(iter(shards.epoch(seed=0, epoch=epoch))) for kind, epoch in kinds.items()}


def time_kinds(model: Model, optimizers: list[Optimizer], batches: dict[Stage, list[Batch]]) -> dict[Stage, float]:
    """Take one step of each kind, the first with all parameters trained. Return the seconds of each."""
    reset(model.network, model.recipe, seed=0)
    seconds = {}
    for kind, micro_batches in batches.items():
        apply_stage(model.network, kind)
        timed_step(model, optimizers, micro_batches, took := [])
        seconds[kind] = took[0]
    return seconds


def images_by_kind(recipe: Recipe, total_images: int) -> Counter[Stage]:
    """Count the images that all workers take in a run, for each kind of step."""
    counts: Counter[Stage] = Counter()
    for epoch in range(1, recipe.epochs + 1):
        counts[stage_of(recipe, epoch).kind] += recipe.workers * images_of_an_epoch(recipe, total_images, epoch)
    return counts


def speedup(reference: list[float], ours: list[float]) -> float:
    """Return how many times faster ours is: the median over pairs measured in turn."""
    return median(r / o for r, o in zip(reference, ours, strict=True))


def conditions(ctx: DistContext) -> dict[str, object]:
    """Return what a measurement was made with. All processes must call it."""
    code = {"version": __version__, "commit": commit(), "code": code_digest(), "started": utc_now()}
    return {**code, "device": device_name(ctx), "torch": torch.__version__}


def spread(values: list[float], digits: int) -> str:
    low, middle, high = (f"{function(values):.{digits}f}" for function in (min, median, max))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def header(facts: dict[str, object]) -> str:
    return "# " + ", ".join(f"{name} {value}" for name, value in facts.items())


# The baseline


class BaselineNorm(GhostBatchNorm):
    """Ghost batch norm, written as its formula."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        groups = x.reshape(-1, self.ghost_batch, *x.shape[1:]).to(self.bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, correction=0)
        x_hat = (groups - mean) / torch.sqrt(variance + self.eps)
        if self.weight is not None:
            x_hat = x_hat * self.weight.view(-1, 1, 1)
        return (x_hat + self.bias.view(-1, 1, 1)).reshape(x.shape).to(x.dtype)


class BaselineNesterov(Optimizer):
    """The update of NesterovSGD, one parameter and one operation at a time."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            for w in group["params"]:
                self.state[w] = torch.zeros_like(w)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                v = self.state[w]
                d = -group["lr"] * (w.grad + group["weight_decay"] * w)
                v.copy_(group["momentum"] * v + d)
                w.copy_(w + d + group["momentum"] * v)


def baseline_network(recipe: Recipe, precision: str, device: torch.device) -> nn.Module:
    """Return the recipe's network with seed 0, in contiguous NCHW memory, with BaselineNorm."""
    network = cast(make_network(recipe, seed=0), weight_dtype(recipe, precision), device)
    for norm in norms_of(network):
        norm.__class__ = BaselineNorm
    return network.to(memory_format=torch.contiguous_format)


def baseline_optimizers(recipe: Recipe, network: nn.Module, ctx: DistContext) -> list[Optimizer]:
    """Return the recipe's optimizers, with BaselineNesterov in place of NesterovSGD."""
    made = recipe.optimizers(network, ctx)
    return [BaselineNesterov(o.param_groups) if isinstance(o, NesterovSGD) else o for o in made]


# The parts of a run


def measure_run(config: RunConfig, recipe: Recipe, baseline_precision: str, repeats: int, start_up: float) -> dict:
    """Return conditions, seconds of every part and figures derived from them; {} on all processes but the main one."""
    check_processes(config.micro_batches, recipe, launched_world_size())
    check_images(recipe, TRAIN)
    with init_distributed(recipe.workers, device=config.device) as ctx:
        config, seconds = resolve_defaults(config, recipe, ctx, TRAIN), defaultdict(list)
        model = timed(
            ctx,
            seconds["compilation"],
            lambda: make_model(recipe, ctx, config.precision, config.compile, config.micro_batches),
        )
        noise = random_images(TRAIN, TEST)
        for _ in range(min(repeats, 3)):
            data = prepare(noise, model, clock := Clock(ctx.synchronize))
            for part, took in clock.seconds.items():
                seconds[part].append(took)
        if ctx.on_gpu:
            torch.cuda.reset_peak_memory_stats(ctx.device)
        optimizers, last = recipe.optimizers(model.network, ctx), recipe.stages[-1].kind
        follow_schedules(optimizers, epoch=1)
        batches = first_batches(recipe, data.train)
        earlier = {kind: batch for kind, batch in batches.items() if kind != last}
        rounds = [time_kinds(model, optimizers, earlier) for _ in range(repeats + 1)][1:]  # the first is a warm-up
        for kind in earlier:
            epoch = next(stage.first_epoch for stage in recipe.stages if stage.kind == kind)
            seconds[f"step from epoch {epoch} on"] = [took[kind] for took in rounds]
        apply_stage(model.network, last)
        step = partial(take_step, model, optimizers, batches[last], Metrics(ctx))
        step()
        ctx.synchronize()
        peak = peak_memory(ctx.device)  # before the baseline takes memory
        if ctx.on_gpu:
            time_launches(step, ctx, repeats, seconds)
        for seed in range(repeats):
            epoch = partial(data.train.epoch, seed, epoch=1)  # sampling counts, too
            timed(ctx, seconds["augmentation of an epoch"], lambda e=epoch: [None for _ in e()])
        network = baseline_network(recipe, baseline_precision, ctx.device)
        recipe.whiten(network, data.train.images)
        apply_stage(network, last)
        ours, theirs = time_both(
            model, Model(recipe, network, network, baseline_precision, 1, ctx), batches[last], repeats
        )
        allow_tf32(config.precision == "tf32")
        # A CPU takes minutes for 10,000 test images: measure a chunk and scale.
        chunk = len(data.test[0]) if ctx.on_gpu else MOST_AT_ONCE // 4
        test = data.test[0][:chunk], data.test[1][:chunk]
        for _ in range(min(repeats, 3)):
            timed(ctx, took := [], lambda: evaluate(model.network, recipe, recipe.tta, model.precision, test, ctx))
            seconds["validation"].append(took[0] * len(data.test[0]) / chunk)
        facts = conditions(ctx)
        if not ctx.is_main:
            return {}
        seconds |= {**ours, "start-up": [start_up]}
        parts = {n: {"median": median(v), "min": min(v), "max": max(v)} for n, v in seconds.items()}
        for name in theirs.keys() & ours.keys():
            parts[name] |= {"baseline": median(theirs[name]), "speedup": speedup(theirs[name], ours[name])}
        of_a_step, count = median(ours["step"]), recipe.batch_size * recipe.workers
        per_image = {kind: median(took[kind] for took in rounds) / count for kind in earlier}
        per_image[last] = of_a_step / count
        first_epoch = recipe.workers * images_of_an_epoch(recipe, TRAIN, 1) * per_image[stage_of(recipe, 1).kind]
        rate, flop = matrix_rate(config.precision, ctx.device), training_flop(recipe, last) * count
        facts |= {"recipe": recipe.name, "workers": recipe.workers, "batch": recipe.batch_size}
        facts |= {"width": getattr(recipe, "width", "-"), "precision": config.precision}
        facts |= {"compiled": model.forward is not model.network, "baseline precision": baseline_precision}
        return {
            "conditions": facts | {"repeats": repeats},
            "seconds": parts,
            "images per second": count / of_a_step,
            "work of a run, PFLOP": work(recipe, TRAIN) / 1e15,
            "training of a run, s": sum(per_image[kind] * n for kind, n in images_by_kind(recipe, TRAIN).items()),
            "TFLOP/s": flop / of_a_step / 1e12,
            "utilization, of the matrix product's rate": flop / of_a_step / rate / ctx.world_size,
            "augmentation, share of an epoch": median(seconds["augmentation of an epoch"]) / first_epoch,
            "peak memory per process, GiB": peak / 2**30,
        }


def time_both(ours: Model, baseline: Model, batches: list[Batch], repeats: int) -> tuple[Seconds, Seconds]:
    """Take steps of ours and of the baseline in turn, whole and in parts. Return the seconds of both."""
    sides, taken = [], (defaultdict(list), defaultdict(list))
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    images = images.to(weight_dtype(baseline.recipe, baseline.precision)).contiguous()
    for model, make, micro_batches in (
        (ours, ours.recipe.optimizers, batches),
        (baseline, partial(baseline_optimizers, baseline.recipe), [(images, labels)]),
    ):
        follow_schedules(optimizers := make(model.network, model.ctx), epoch=1)
        sides.append((model, optimizers, micro_batches))
    for repeat in range(repeats + 1):
        if repeat == 1:  # the first was a warm-up
            taken = defaultdict(list), defaultdict(list)
        for side, seconds in zip(sides, taken, strict=True):
            timed_step(*side, seconds["step"])
        for (model, optimizers, micro_batches), seconds in zip(sides, taken, strict=True):
            if len(micro_batches) == 1:
                time_step_in_parts(model, optimizers, *micro_batches[0], seconds)
    return taken


def time_step_in_parts(
    model: Model, optimizers: list[Optimizer], images: Tensor, labels: Tensor, seconds: Seconds
) -> None:
    """Take a step on images [B, 3, H, W] and labels [B], synchronized after each part."""
    network, recipe, ctx, precision = model.network, model.recipe, model.ctx, model.precision
    allow_tf32(precision == "tf32")
    prepare_norms(network, len(ctx.workers), tracking=False)

    def forward() -> Tensor:
        with autocast(recipe, precision, ctx.device):
            losses = recipe.loss(model.forward(images), labels)
        return reduce_loss(recipe, losses, len(ctx.workers))

    loss = timed(ctx, seconds["forward"], forward)
    timed(ctx, seconds["backward"], loss.backward)
    timed(ctx, seconds["averaging"], lambda: ctx.average_gradients(network, recipe.loss_scale))
    with autocast(recipe, precision, ctx.device):
        timed(ctx, seconds["update"], lambda: step_all(optimizers))


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
        replays: list[float] = []
        for _ in range(repeats):
            timed(ctx, replays, graph.replay)
        seconds["step as one CUDA graph"] = replays
    except RuntimeError as error:
        torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own
        print(f"bench: no CUDA graph of a step: {error}", file=sys.stderr)


def seconds_since_start() -> float:
    """Return the age of this process: the interpreter and its imports."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("nan")


def run_as_text(result: dict) -> str:
    table = pd.DataFrame(result["seconds"]).T.rename(columns={"median": "seconds"})
    figures = [f"{name:42}{value:12.4g}" for name, value in result.items() if isinstance(value, float)]
    return "\n".join([header(result["conditions"]), "", table.to_string(float_format="%.4f", na_rep="-"), "", *figures])


# One recipe against another


def run_timer(model: Model, images: Counter[Stage]) -> Callable[[], float]:
    """Return a function that takes a step of each kind and returns the seconds of a run of so many images."""
    recipe, ctx = model.recipe, model.ctx
    noise = random_images(images_to_warm_up(recipe, TRAIN), 1)
    batches = first_batches(recipe, prepare(noise, model, Clock(ctx.synchronize)).train)
    optimizers, count = recipe.optimizers(model.network, ctx), recipe.workers * recipe.batch_size
    follow_schedules(optimizers, epoch=1)
    return lambda: sum(images[kind] / count * took for kind, took in time_kinds(model, optimizers, batches).items())


def compare_recipes(asked: list[tuple[RunConfig, Recipe]], measured: list[Recipe], rounds: int) -> dict:
    """Measure steps of two recipes in turn. `measured` are the recipes asked for, with the workers of one step."""
    with init_distributed(1, device=asked[0][0].device) as ctx:
        timers, recipes = [], []
        for (config, recipe), small in zip(asked, measured, strict=True):
            check_processes(config.micro_batches, small, 1)
            check_images(small, TRAIN)
            precision = precision_on(ctx, config.precision, recipe, TRAIN)
            small_ctx = replace(ctx, total_workers=small.workers)
            model = make_model(small, small_ctx, precision, not config.no_compile, config.micro_batches)
            timers.append(run_timer(model, images_by_kind(recipe, TRAIN)))
            facts = {"recipe": recipe.name, "step": f"{small.workers} x {small.batch_size} images"}
            facts |= {"precision": precision, "compiled": model.forward is not model.network}
            recipes.append(facts | {"work of a run, PFLOP": work(recipe, TRAIN) / 1e15})
        pairs = [[seconds_of_a_run() for seconds_of_a_run in timers] for _ in range(rounds + 1)][1:]  # after a warm-up
        ratios = [other / one for one, other in pairs]
        for facts, took in zip(recipes, zip(*pairs, strict=True), strict=True):
            facts["training of a run, s"] = list(took)
        return {"conditions": conditions(ctx), "recipes": recipes, "ratios": ratios, "interval": interval(ratios)}


def interval(values: list[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median by ranks (any distribution); None below six values."""
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    return (float(low), float(high)) if low <= high else None


def comparison_as_text(result: dict) -> str:
    ratios, one, other = result["ratios"], *(facts["recipe"] for facts in result["recipes"])
    table = pd.DataFrame(result["recipes"]).set_index("recipe")
    table["training of a run, s"] = [spread(took, 1) for took in table["training of a run, s"]]
    text = f"{other} takes {spread(ratios, 2)} times as long as {one}: median (range), n = {len(ratios)}"
    if result["interval"]:
        text += "; 95% confidence interval [{:.2f}, {:.2f}]".format(*result["interval"])
    return "\n".join([header(result["conditions"]), "", table.to_string(), "", text])


# Input pipelines


class OnCPU(Dataset):
    """Images [n, 32, 32, 3] of bytes, each padded, cropped and mirrored on the CPU: float32 [3, 32, 32] and a label.

    `prepared`: pad and normalize once, not at every access. `in_bulk`: sample crops for all images of an epoch at once.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, prepared: bool, in_bulk: bool) -> None:
        self.images, self.labels = pad_and_normalize(images) if prepared else images, labels
        self.prepared, self.in_bulk = prepared, in_bulk

    def sample(self) -> None:
        self.crops = np.random.default_rng().integers(0, (OFFSETS, OFFSETS, 2), (len(self), 3)).tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] if self.prepared else pad_and_normalize(self.images[index])
        crop = self.crops[index] if self.in_bulk else [random.randrange(count) for count in (OFFSETS, OFFSETS, 2)]
        down, across, mirrored = crop
        image = image[:, down : down + SIZE, across : across + SIZE]
        return torch.from_numpy(np.ascontiguousarray(image[:, :, ::-1] if mirrored else image)), int(self.labels[index])


def pad_and_normalize(images: np.ndarray) -> np.ndarray:
    """Turn bytes [..., 32, 32, 3] into float32 [..., 3, 40, 40], padded by reflection, normalized by channel."""
    border = (PADDING, PADDING)
    padded = np.pad(images, [(0, 0)] * (images.ndim - 3) + [border, border, (0, 0)], mode="reflect")
    return np.ascontiguousarray(np.moveaxis((padded - np.float32(MEAN)) / np.float32(STD), -1, -3))


def input_pipelines(
    images: np.ndarray, labels: np.ndarray, shards: Shards, cores: int
) -> dict[str, Callable[[], Iterable[Batch]]]:
    """Return functions that load an epoch in each of Page's ways, and in ours from `shards`, by name."""
    processes, size = min(MOST_LOADERS, cores), shards.recipe.batch_size
    device, dtype = shards.images.device, shards.images.dtype

    def load(dataset: OnCPU, workers: int) -> Iterator[Batch]:
        if dataset.in_bulk:
            dataset.sample()
        for batch, targets in DataLoader(dataset, size, True, num_workers=workers, pin_memory=device.type == "cuda"):
            # Copy the pinned memory before casting: cast on the host, the batch would no longer be pinned.
            moved = batch.to(device, non_blocking=True).to(dtype, memory_format=torch.channels_last)
            yield moved, targets.to(device, non_blocking=True)

    unprepared, prepared, bulk = (OnCPU(images, labels, *how) for how in ((False, False), (True, False), (True, True)))
    return {
        f"(a) all for each image, {processes} processes": lambda: load(unprepared, processes),
        "(b) prepared once, one process": lambda: load(prepared, 1),
        "(c) crops sampled in bulk": lambda: load(bulk, 1),
        "(d) on the main thread": lambda: load(bulk, 0),
        "(e) ours, all on the device": lambda: (step[0] for step in shards.epoch(seed=0, epoch=1)),
    }


def time_epoch(
    batches: Iterable[Batch], work: Callable[[Batch], None], most: int, steps: int, ctx: DistContext
) -> float:
    """Return the seconds of an epoch of `steps` batches; if `most` is smaller, measure as many and extrapolate."""
    ctx.synchronize()
    start = time.perf_counter()
    for taken, batch in zip(range(1, min(most, steps) + 1), batches, strict=False):
        work(batch)
        if taken == 1:
            ctx.synchronize()
            first = time.perf_counter() - start
    ctx.synchronize()
    total = time.perf_counter() - start
    return total if taken == steps else first + (total - first) / (taken - 1) * (steps - 1)


def compare_pipelines(config: RunConfig, recipe: Recipe, most: int | None, repeats: int) -> dict:
    """Measure an epoch of every input pipeline, without and with at most `most` training steps, in turn."""
    if recipe.workers > 1 or launched_world_size() > 1:
        raise ConfigError(
            f"--input_pipelines needs one worker on one process, not recipe {recipe.name}: use --recipe page"
        )
    check_processes(config.micro_batches, recipe, 1)
    check_images(recipe, TRAIN)
    with init_distributed(recipe.workers, device=config.device) as ctx:
        config = resolve_defaults(config, recipe, ctx, TRAIN)
        model, noise = (
            make_model(recipe, ctx, config.precision, config.compile, config.micro_batches),
            random_images(TRAIN, 1),
        )
        shards = prepare(noise, model, Clock(ctx.synchronize)).train
        warm_up(model, TRAIN, 1)  # with the short last batch
        optimizers, metrics = recipe.optimizers(model.network, ctx), Metrics(ctx)
        reset(model.network, recipe, seed=0)

        def train(batch: Batch) -> None:
            take_step(model, optimizers, [batch], metrics)

        pipelines, steps = input_pipelines(*noise.train, shards, count_cores()), shards.steps_of(epoch=1)
        most = min(most or (steps if ctx.on_gpu else 5), steps)
        seconds = {name: {"loading": [], "with training": []} for name in pipelines}
        for repeat in range(repeats):
            for name, load in [*pipelines.items()][:: -1 if repeat % 2 else 1]:  # a drift of speed falls on all
                loading = time_epoch(load(), lambda batch: None, steps, steps, ctx)
                trained = time_epoch(load(), train, most, steps, ctx)
                seconds[name]["loading"].append(loading)
                seconds[name]["with training"].append(trained)
        facts = {"recipe": recipe.name, "precision": config.precision, "training steps": f"{most} of {steps}"}
        return {"conditions": conditions(ctx) | facts, "pipelines": seconds}


def pipelines_as_text(result: dict) -> str:
    seconds = result["pipelines"]
    slowest = next(iter(seconds.values()))["loading"]
    rows = {
        name: {
            "loading, s": spread(row["loading"], 2),
            "speedup": f"{speedup(slowest, row['loading']):.2f}",
            "with training, s": spread(row["with training"], 1),
            "Page's run on a V100, s": published or "-",
        }
        for (name, row), published in zip(seconds.items(), PAGE_2018, strict=True)
    }
    return f"{header(result['conditions'])}\n\nan epoch of {TRAIN} images\n{pd.DataFrame(rows).T.to_string()}"


def draw_bars(axes, names: list[str], values: list[float], label: str) -> None:
    """Draw horizontal bars from the top down, each with its value at its end."""
    bars = axes.barh(names, values, color=BEHIND, height=0.6)
    axes.bar_label(bars, [f" {value:.3g}" if value < 1000 else f" {value:.0f}" for value in values], fontsize=6)
    axes.set(xlabel=label, xlim=(0, 1.15 * max(values)))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def draw_pipelines(seconds: dict[str, Seconds], file: Path) -> None:
    """Draw the median seconds of an epoch as bars."""
    figure = new_figure(WIDTH, 2.8)
    for axes, part in zip(figure.subplots(2, 1), ("loading", "with training"), strict=True):
        draw_bars(axes, list(seconds), [median(row[part]) for row in seconds.values()], f"an epoch, {part}, seconds")
    save_picture(figure, file)


# The command line


def read_to_measure(arguments: list[str], processes: int) -> tuple[RunConfig, Recipe]:
    """Return config and recipe; on a CPU with one worker a process unless --workers is given, as a step with eight
    would take half a minute."""
    config, recipe = read_request(arguments)
    given = any(argument.split("=")[0] == "--workers" for argument in arguments)
    if has_option(recipe, "workers") and not given and not count_gpus(config.device):
        return read_request([*arguments, "--workers", str(processes)])
    return config, recipe


def positive_number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def main() -> None:
    start_up = seconds_since_start()
    parser = Parser(prog="python -m large_batch_cifar_10_fast.bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, modes = parser.add_argument, parser.add_mutually_exclusive_group()
    modes.add_argument("--against", choices=RECIPES, metavar="RECIPE", help="compare --recipe with another recipe")
    modes.add_argument("--input_pipelines", action="store_true", help="compare ways to load images")
    add("--json", action="store_true", help="print JSON")
    add("--repeats", type=positive_number, help="repetitions (default 5; with --input_pipelines 1)")
    add("--baseline_precision", choices=list(DTYPES), help="precision of the baseline (default fp32)")
    add("--rounds", type=positive_number, help="with --against: rounds (default 7); an interval needs 6")
    add(
        "--steps",
        type=positive_number,
        help="with --input_pipelines: training steps (default all; 5 without CUDA)",
    )
    add("--picture", help="with --input_pipelines: file for a picture, .png, .svg or .pdf")
    with exit_on_config_error("bench"):
        options, others = parser.parse_known_args()
        mode = "--against" if options.against else "--input_pipelines" if options.input_pipelines else "neither"
        modes = {"rounds": ["--against"], "steps": ["--input_pipelines"], "picture": ["--input_pipelines"]}
        modes |= {"repeats": ["neither", "--input_pipelines"], "baseline_precision": ["neither"]}
        for name, allowed in modes.items():
            if getattr(options, name) is not None and mode not in allowed:
                needed = f"needs {allowed[0]}" if allowed[0] != "neither" else f"does not apply to {mode}"
                raise ConfigError(f"--{name} {needed}: add or remove an option")
        if options.steps == 1:
            raise ConfigError("--steps 1 must be at least 2")
        if options.picture:
            check_picture("--picture", Path(options.picture))
        if options.against:
            if launched_world_size() > 1:
                raise ConfigError("--against needs one process: start it without torchrun")
            requests = [others, [*others, "--recipe", options.against]]
            asked = [read_request(request) for request in requests]
            measured = [read_to_measure(request, 1)[1] for request in requests]
            result, as_text = compare_recipes(asked, measured, options.rounds or 7), comparison_as_text
        elif options.input_pipelines:
            request = read_request(["--recipe", "page", *others])
            result, as_text = compare_pipelines(*request, options.steps, options.repeats or 1), pipelines_as_text
            if options.picture:
                draw_pipelines(result["pipelines"], Path(options.picture))
        else:
            request = read_to_measure(others, launched_world_size())
            result = measure_run(*request, options.baseline_precision or "fp32", options.repeats or 5, start_up)
            as_text = run_as_text
    if result:
        print(json.dumps(result, indent=2) if options.json else as_text(result))


if __name__ == "__main__":
    main()
