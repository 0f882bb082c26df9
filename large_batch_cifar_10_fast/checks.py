"""What is checked before training, and the defaults that depend on the device."""

import os
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

from .campaign import Row, check_unchanged, read_rows
from .data.cifar10 import count_training_images, load_images
from .devices import count_cores, gains_by_bf16
from .distributed import DistContext
from .environment import code_digest
from .options import SYNTHETIC, ConfigError, RunConfig, as_pairs, from_pairs
from .recipe import Recipe, images_of_an_epoch, run_flop

TABLES = ("runs.tsv", "epochs.tsv", "timing_log.tsv")


def check_request(config: RunConfig, recipe: Recipe, world_size: int, writes: bool, finished: list[Row]) -> None:
    """Raise ConfigError for what cannot be trained; download CIFAR-10 if it is missing.

    `writes`: whether this process or its launcher writes the tables. `finished`: the rows of a resumed campaign.
    """
    check_processes(config.micro_batches, recipe, world_size)
    if writes:
        check_out(Path(config.out), config.save)
    if config.data != SYNTHETIC and not os.path.abspath(config.data).isprintable():
        raise ConfigError(f"--data {config.data}: the name of its folder cannot stand in a table; move it")
    check_images(recipe, count_training_images(config.data))
    for row in finished[-1:]:
        check_unchanged(row, processes=world_size, digest=load_images(config.data).digest)


def check_processes(micro_batches: int, recipe: Recipe, world_size: int) -> None:
    """Raise ConfigError for numbers of processes or micro-batches that do not divide the workers."""
    if recipe.workers % world_size:
        fitting = [str(p) for p in range(1, recipe.workers + 1) if recipe.workers % p == 0]
        choice = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
        raise ConfigError(f"{recipe.workers} workers cannot be split over {world_size} processes: use {choice}")
    here = recipe.workers // world_size
    if here % micro_batches:
        raise ConfigError(f"--micro_batches {micro_batches} does not divide the {here} workers of a process")


def check_images(recipe: Recipe, train_count: int) -> None:
    """Raise ConfigError if a worker's shard, or the part of it that an epoch keeps, does not fill one batch."""
    needed = recipe.workers * recipe.batch_size
    if needed > train_count:
        step = f"{recipe.workers} workers x --batch_size {recipe.batch_size} = {needed} images a step"
        hint = "use a smaller batch, fewer workers or more images"
        raise ConfigError(f"{step}, more than the training set's {train_count}: {hint}")
    for stage in recipe.stages:
        if not images_of_an_epoch(recipe, train_count, stage.first_epoch):
            kept = f"epoch {stage.first_epoch} keeps {stage.keep_fraction:g} of {train_count} images"
            raise ConfigError(f"{kept}, less than a step's {needed}: raise --kept, or use a smaller batch")


def check_out(out: Path, save: str) -> None:
    """Raise ConfigError if the tables or the weights cannot be written, or would replace something else."""
    weights = Path(save)
    try:
        folders = [next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())]
        if save:
            folders.append(weights.absolute().parent)
        for folder in folders:
            if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise OSError(f"{folder} is not a folder that you may read and write")
        for path in (out / name for name in TABLES):
            if path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
                raise ConfigError(f"{path} cannot be read and written: move it or choose another --out")
        if save and (weights.name in TABLES or (weights.exists() and not is_checkpoint(weights))):
            raise ConfigError(f"--save {save} would replace a table or another file: choose another name")
    except OSError as error:  # a name that is too long, say
        raise ConfigError(f"--out or --save cannot be written: {error}") from error
    if (out / "runs.tsv").exists():
        read_rows(out / "runs.tsv")


def is_checkpoint(path: Path) -> bool:
    """Return whether torch.save wrote this file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"/data.pkl" in file.read(300)  # torch.save writes this name first


def check_agreement(config: RunConfig, recipe: Recipe, digest: str, finished: list[Row], ctx: DistContext) -> None:
    """Raise ConfigError if the processes, on several machines, would train different things."""
    runs = ",".join(row["run"] for row in finished)
    mine = {"images": digest, "code": code_digest(), "torch": version("torch"), "finished_runs": runs}
    mine |= {"recipe": recipe.name, **asdict(recipe), **asdict(config)}
    for name in ("data", "out", "save"):  # the same images may lie elsewhere; only the first machine writes
        del mine[name]
    first, *others = map(from_pairs, ctx.all_gather_strings("request", as_pairs(mine)))
    for rank, other in enumerate(others, 1):
        here, there = ({name: values.get(name) or "none" for name in first | other} for values in (first, other))
        differing = [f"{name} ({there[name]}, not {here[name]})" for name in here if there[name] != here[name]]
        if differing:
            others = ", ".join(differing)
            raise ConfigError(f"process {rank} has other {others} than process 0: give all machines the same")


# Defaults

CORE = 70e9  # FLOP/s of a core in float32, as measured: 30 images/s of the default recipe
LONG = 600  # seconds from which on a CPU compiles, and uses bfloat16 if it gains by it
BF16_FROM = (8, 0)  # the least compute capability with bfloat16 and TF32


def resolve_defaults(config: RunConfig, recipe: Recipe, ctx: DistContext, train_images: int) -> RunConfig:
    """Choose precision and compilation where they were not given. Warn of a long campaign on a CPU."""
    precision, flop = precision_on(ctx, config.precision, recipe, train_images), run_flop(recipe, train_images)
    seconds = 0.0 if ctx.on_gpu else flop / (CORE * count_cores())
    long = config.runs * seconds > LONG  # runs of all shares, which are made alike
    use_compiler = config.compile or ((ctx.on_gpu or long) and not config.no_compile)
    if long and not config.demo:
        hours = len(config.planned) * seconds / 3600 / (2 if precision == "bf16" and gains_by_bf16() else 1)
        ctx.warn(f"without a GPU this takes about {hours:.1f} hours; --demo shows a small run in two minutes")
    return replace(config, precision=precision, compile=use_compiler, no_compile=not use_compiler)


def precision_on(ctx: DistContext, asked: str, recipe: Recipe, train_images: int) -> str:
    """Return the precision asked for, or the default: the recipe's half on GPUs; on CPUs bf16 for long runs if every
    process gains by it, else fp32. The number of cores and runs has no effect, so that a seed decides a run.

    Raise ConfigError for a precision that the device does not have.
    """
    if ctx.on_gpu:
        preferred, other = recipe.half, "fp16"
        has_bf16 = torch.cuda.get_device_capability(ctx.device) >= BF16_FROM
        if asked in ("bf16", "tf32") and not has_bf16:  # torch would emulate it slowly
            name, instead = torch.cuda.get_device_name(ctx.device), "fp16" if asked == "bf16" else "fp32"
            raise ConfigError(f"--precision {asked} needs compute capability 8.0, which {name} lacks: use {instead}")
    else:
        preferred, other = "bf16", "fp32"
        if asked == "tf32":
            raise ConfigError("--precision tf32 is for GPUs: use --precision fp32")
        has_bf16 = not asked and run_flop(recipe, train_images) > LONG * CORE and gains_by_bf16()
    all_have_bf16 = set(ctx.all_gather_strings("bf16", str(has_bf16))) == {"True"}
    return asked or (preferred if all_have_bf16 else other)
