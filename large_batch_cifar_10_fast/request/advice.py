"""What surrounds training without being part of it: what the device decides, and advice about hours and memory."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..settings.settings import Refusal, Settings
from ..training.networks import work
from ..training.recipe import Recipe
from ..training.world import World

NO_MEMORY = ("allocate memory", "ALLOC_FAILED")  # in what torch says of a CPU's, and of a GPU's for cuBLAS and cuDNN


def settle(settings: Settings, recipe: Recipe, world: World, train_images: int) -> Settings:
    """Decide what depends on the device: precision, and whether compiling pays. Warns of hours on a CPU."""
    hours = 0.0 if world.on_gpu else hours_on_cpu(settings.runs, recipe, train_images)
    long = hours > 1 / 6  # of all shares together, so that they are made alike
    use_compiler = settings.compile or ((world.on_gpu or long) and not settings.no_compile)
    share = len(settings.planned) / settings.runs
    if long and not settings.demo:
        world.warn(f"without a GPU this takes about {hours * share:.1f} hours; --demo shows a small run in two minutes")
    precision = precision_on(world, settings)
    return replace(settings, precision=precision, compile=use_compiler, no_compile=not use_compiler)


def precision_on(world: World, settings: Settings) -> str:
    """What was asked for, or half precision where a GPU is, as published."""
    return settings.precision or ("fp16" if world.on_gpu else "fp32")


def hours_on_cpu(runs: int, recipe: Recipe, train_images: int) -> float:
    """About how long plain float32 takes: a core was seen to do 70 GFLOP/s (30 images/s of the default recipe)."""
    return runs * work(recipe, train_images) / (70e9 * count_cores()) / 3600


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def explaining_memory(settings: Settings, recipe: Recipe, world: World) -> Iterator[None]:
    """Say, where memory runs out, what takes it and what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        count = len(world.workers)
        images = f"{count} workers x {recipe.batch_size} images in {settings.micro_batches} micro-batches"
        advice = (
            f"raise --micro_batches (at most {count}), or use more processes, fewer WORKERS or a smaller --batch_size"
        )
        raise Refusal(f"out of memory with {images} on {world.device}: {advice}") from error
