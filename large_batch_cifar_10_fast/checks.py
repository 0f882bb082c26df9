"""What the device decides, and what can be checked before training."""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from .campaign import Row, check_unchanged, read_rows
from .data.cifar10 import Images, count_training_images, load_images
from .devices import BF16_FROM, matrix_rate
from .distributed import DistContext
from .environment import code_digest
from .networks import work
from .options import SYNTHETIC, ConfigError, Settings, as_pairs, from_pairs, has_option, spelled
from .recipe import Recipe, images_of_an_epoch

TABLES = ("runs.tsv", "epochs.tsv", "timing_log.tsv")
LONGEST_NAME = 240  # bytes: files have 255, and while they are written a few more than their names


def check_request(settings: Settings, recipe: Recipe, world_size: int, writes: bool, finished: list[Row]) -> None:
    """Raise ConfigError for what cannot be trained; CIFAR-10 is fetched here if need be.

    `writes`: whether this process, or its launcher, writes the tables. `finished`: the rows of a resumed campaign.
    """
    check_processes(settings, recipe, world_size)
    if writes:
        check_out(settings)
    if settings.data != SYNTHETIC and not os.path.abspath(settings.data).isprintable():
        raise ConfigError(f"--data {settings.data}: the name of the folder it lies in cannot stand in a table; move it")
    check_images(recipe, count_training_images(settings.data))
    for row in finished[-1:]:
        check_unchanged(row, processes=world_size, digest=load_images(settings.data).digest)


def check_agreement(settings: Settings, recipe: Recipe, images: Images, finished: list[Row], ctx: DistContext) -> None:
    """Refuse processes, on several machines, that would train different things: the result would be neither."""
    if ctx.store is None:
        return
    mine = {"recipe": recipe.name, **asdict(recipe), **asdict(settings), "images": images.digest}
    mine |= {"code": code_digest(), "torch": version("torch")}
    mine["finished_runs"] = ",".join(row["run"] for row in finished)
    for name in ("data", "out", "save"):  # the same images may lie elsewhere; only the first machine writes
        del mine[name]
    first, *others = map(from_pairs, ctx.all_gather_words("request", as_pairs(mine)))
    for rank, other in enumerate(others, 1):
        here, there = ({name: facts.get(name) or "none" for name in first | other} for facts in (first, other))
        differing = [f"{name} ({there[name]}, not {here[name]})" for name in here if there[name] != here[name]]
        if differing:
            raise ConfigError(
                f"process {rank} has other {', '.join(differing)} than process 0: give all machines the same"
            )


def check_processes(settings: Settings, recipe: Recipe, world_size: int) -> None:
    """Refuse a number of processes, or of micro-batches, that would split a worker."""
    if recipe.workers % world_size:
        fitting = " or ".join(str(p) for p in range(1, recipe.workers + 1) if recipe.workers % p == 0)
        raise ConfigError(f"{_workers_of(recipe)} cannot be split over {world_size} processes: use {fitting}")
    if (recipe.workers // world_size) % settings.micro_batches:
        here = f"the {recipe.workers // world_size} workers of a process"
        raise ConfigError(f"{spelled(settings, 'micro_batches')} does not divide {here}")


def _workers_of(recipe: Recipe) -> str:
    if has_option(recipe, "workers"):
        return spelled(recipe, "workers")
    return f"the workers of recipe {recipe.name} ({recipe.workers})"


def check_images(recipe: Recipe, train_count: int) -> None:
    """Refuse a training set of which a worker's shard, or what an epoch keeps of it, does not fill one batch."""
    needed = recipe.workers * recipe.batch_size
    if needed > train_count:
        raise ConfigError(
            f"{_workers_of(recipe)} x --batch_size {recipe.batch_size} = {needed} images a step, more than "
            f"the training set's {train_count}: use a smaller batch, fewer workers or more images"
        )
    for stage in recipe.stages:
        if not images_of_an_epoch(recipe, train_count, stage.first_epoch):
            few = f"epoch {stage.first_epoch} keeps {stage.kept:g} of {train_count} images, less than a step's {needed}"
            raise ConfigError(f"{few}: raise --kept, or use a smaller batch")


def check_out(settings: Settings) -> None:
    """Refuse an `--out` or `--save` that cannot be written, and a runs.tsv of other columns."""
    out = Path(settings.out)
    try:
        existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        _check_writable("--out", out, existing)
        for name in TABLES:
            path = out / name
            if path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
                raise ConfigError(f"{path} cannot be read and written: move it or choose another --out")
        if settings.save:
            _check_save(Path(settings.save), out)
    except OSError as error:  # a name that is too long, say
        raise ConfigError(f"--out or --save cannot be written: {error}") from error
    if (out / "runs.tsv").exists():
        read_rows(out / "runs.tsv", to_append=True)


def _check_writable(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path} cannot be written: {folder} is no folder that you may write to")


def _check_save(save: Path, out: Path) -> None:
    """Weights are written when all runs are made: what they may not replace, and where they cannot go, is seen now."""
    _check_writable("--save", save, save.absolute().parent)
    if len(os.fsencode(save.name)) > LONGEST_NAME:
        raise ConfigError(f"--save {save} is too long a name: choose a shorter one")
    if save.is_dir():
        raise ConfigError(f"--save {save} is a folder: name a file")
    if save.resolve() in [(out / name).resolve() for name in TABLES]:
        raise ConfigError(f"--save {save} is the name of a table: choose another")
    if save.exists() and not holds_weights(save):
        raise ConfigError(f"--save {save} is there and holds no weights: choose another name")


def holds_weights(path: Path) -> bool:
    """Whether torch.save wrote it."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:  # a damaged one
        return False


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
