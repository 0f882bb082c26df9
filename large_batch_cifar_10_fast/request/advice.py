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

LONG = 1 / 6  # hours; from here on a CPU compiles, and computes in half precision
NO_MEMORY = ("allocate memory", "ALLOC_FAILED")  # in what torch says of a CPU's, and of a GPU's for cuBLAS and cuDNN


def settle(settings: Settings, recipe: Recipe, world: World, train_images: int) -> Settings:
    """Decide what depends on the device: precision, and whether compiling pays. Warns of hours on a CPU."""
    a_run = 0.0 if world.on_gpu else hours_on_cpu(recipe, train_images)
    long = a_run * settings.runs > LONG  # of all shares together, so that they are made alike
    precision = precision_on(world, settings, a_run > LONG)
    use_compiler = settings.compile or ((world.on_gpu or long) and not settings.no_compile)
    hours = a_run * len(settings.planned) / (2 if precision == "bf16" else 1)
    if long and not settings.demo:
        world.warn(f"without a GPU this takes about {hours:.1f} hours; --demo shows a small run in two minutes")
    return replace(settings, precision=precision, compile=use_compiler, no_compile=not use_compiler)


def precision_on(world: World, settings: Settings, long_run: bool = False) -> str:
    """What was asked for; else half precision where a GPU is, as published, or where it halves a CPU's long run."""
    half = "fp16" if world.on_gpu else "bf16" if long_run and computes_bf16() else ""
    return settings.precision or half or "fp32"


def computes_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16: without them it is slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def hours_on_cpu(recipe: Recipe, train_images: int) -> float:
    """About how long a run takes in plain float32: a core was seen to do 70 GFLOP/s (30 images/s of the default
    recipe)."""
    return work(recipe, train_images) / (70e9 * count_cores()) / 3600


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
