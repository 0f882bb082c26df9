"""What surrounds training without being part of it: what the device decides, and advice about hours and memory."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from ..devices import BF16_FROM, matrix_rate
from ..distributed import DistContext
from ..networks import work
from ..recipe import Recipe
from ..settings.settings import ConfigError, Settings

CORE = 70e9  # FLOP/s of a core in plain float32, as one was seen to do: 30 images/s of the default recipe
LONG = 600  # seconds, from which on a CPU compiles, and computes in half precision if it gains by it
GAIN = 1.25  # times float32's rate, from which bfloat16 is taken: a busy machine's rates vary by some tens of percent
NO_MEMORY = ("allocate memory", "ALLOC_FAILED")  # in what torch says of a CPU's, and of a GPU's for cuBLAS and cuDNN


def resolve_defaults(settings: Settings, recipe: Recipe, ctx: DistContext, train_images: int) -> Settings:
    """Decide what depends on the device: precision, and whether compiling pays. Warns of hours on a CPU."""
    precision, flop = precision_on(ctx, settings, recipe, train_images), work(recipe, train_images)
    seconds = 0.0 if ctx.on_gpu else flop / (CORE * count_cores())
    long = settings.runs * seconds > LONG  # of all shares together, so that they are made alike
    use_compiler = settings.compile or ((ctx.on_gpu or long) and not settings.no_compile)
    if long and not settings.demo:
        hours = len(settings.planned) * seconds / 3600 / (2 if precision == "bf16" and gains_by_bf16() else 1)
        ctx.warn(f"without a GPU this takes about {hours:.1f} hours; --demo shows a small run in two minutes")
    return replace(settings, precision=precision, compile=use_compiler, no_compile=not use_compiler)


def precision_on(ctx: DistContext, settings: Settings, recipe: Recipe, train_images: int) -> str:
    """What was asked for; else half precision where a GPU is, the recipe's, or where a run would take a core long and
    every process's CPU gains by it: however many cores and runs there are, the seed is to decide a run.

    Raise ConfigError for a precision that the device does not have."""
    if ctx.on_gpu:
        name, capability = torch.cuda.get_device_name(ctx.device), torch.cuda.get_device_capability(ctx.device)
        if settings.precision:
            check_precision(settings.precision, name, capability)
            return settings.precision
        all_have_bf16 = set(ctx.all_gather_words("bf16", str(capability >= BF16_FROM))) == {"True"}
        return recipe.half if all_have_bf16 else "fp16"
    if settings.precision == "tf32":
        raise ConfigError("--precision tf32 is for GPUs: use --precision fp32")
    if settings.precision:
        return settings.precision
    long = work(recipe, train_images) > LONG * CORE
    return "bf16" if long and set(ctx.all_gather_words("bf16", str(gains_by_bf16()))) == {"True"} else "fp32"


def check_precision(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a precision that a GPU lacks. torch computes in it all the same, slowly and uncompiled."""
    if precision in ("bf16", "tf32") and capability < BF16_FROM:
        other = "fp16" if precision == "bf16" else "fp32"
        what = f"{name} has {capability[0]}.{capability[1]}: use --precision {other}"
        raise ConfigError(f"--precision {precision} needs a GPU of compute capability 8.0 or later, {what}")


@cache
def gains_by_bf16() -> bool:
    """Whether this CPU multiplies faster in bfloat16, as tried: some have instructions for it that take longer than
    float32's (docs/performance.md)."""
    if not computes_bf16():
        return False
    half, single = (matrix_rate(precision, torch.device("cpu")) for precision in ("bf16", "fp32"))
    return half > GAIN * single


def computes_bf16() -> bool:
    """Whether this is an x86 CPU with instructions for bfloat16."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: another torch may lack them
    return any(getattr(torch.cpu, name, bool)() for name in asked)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def explaining_memory(settings: Settings, recipe: Recipe, ctx: DistContext) -> Iterator[None]:
    """Say, where memory runs out, what takes it and what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        count = len(ctx.workers)
        images = f"{count} workers x {recipe.batch_size} images in {settings.micro_batches} micro-batches"
        advice = (
            f"raise --micro_batches (at most {count}), or use more processes, fewer --workers or a smaller --batch_size"
        )
        raise ConfigError(f"out of memory with {images} on {ctx.device}: {advice}") from error
