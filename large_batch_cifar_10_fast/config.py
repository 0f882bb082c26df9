"""Where and how a recipe runs: the options, the command line, and the choices that depend on the device."""

import argparse
import difflib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import torch

from . import RENDEZVOUS, ConfigError, __version__, first_line, program
from .core.options import check_save
from .data.cifar10 import DATA, SYNTHETIC
from .devices import gains_by_bf16, has_bf16
from .distributed import DistContext
from .recipe import Recipe, check_limits, images_of_an_epoch, option, run_flop
from .recipes import DEFAULT, DEMO, RECIPES
from .runs import commit

PRECISION = "default on a GPU: the recipe's; on a CPU: bf16 if it is faster here, else fp32"
CORE = 70e9  # FLOP/s of a CPU core in float32, as measured: 30 images/s of the default recipe
BF16 = 4  # times as fast, compiled: 2.6 to 6.0 as measured on two AMD EPYC and an Intel Xeon with AMX
LONG = 600  # estimated seconds of a run from which on a CPU compiles


@dataclass(frozen=True)
class Options:
    """Everything that is the same for all recipes."""

    runs: int = option(1, "runs, each with fresh weights; run i uses seed + i", least=1)
    seed: int = option(0, "seed of run 0", most=2**62 - 1)
    campaign: str = option("", "name of the campaign, of which missing runs are made (default: date and time)")
    resume: bool = option(False, "short for --campaign with the name of the last one in --out")
    share: str = option("0/1", "I/N: make only runs I, I+N, I+2N, ...; other launches make the other shares of N")
    data: str = option(str(DATA), "folder of CIFAR-10 (downloaded if missing), cifar100, FILE.npz, or synthetic")
    out: str = option(".", "folder for runs.tsv, epochs.tsv and timing_log.tsv")
    save: str = option("", "file for the weights and running statistics of the last run (of the share)")
    device: str = option("", "the GPUs if there are any, else the CPU", choices=("cuda", "cpu"))
    precision: str = option("", PRECISION, choices=("fp16", "bf16", "tf32", "fp32", "fp64"))
    micro_batches: int = option(1, "forward and backward passes per step; more need less memory", least=1)
    compile: bool = option(False, "compile the network (default on GPUs, and on a CPU for runs over ten minutes)")
    no_compile: bool = option(False, "do not compile")
    no_graph: bool = option(False, "launch each kernel; by default the GPUs of one machine replay a CUDA graph")
    no_warmup: bool = option(False, "skip the untimed warm-up; the first run is then slower")
    demo: bool = option(False, "the default recipe, small, on synthetic images, in fp32 and not compiled")
    nproc: int = option(0, "processes on this machine (of a team); 0: as many as fit its GPUs or cores")
    teams: int = option(1, "groups of processes that share the runs, each with its own GPUs or cores", least=1)
    timeout: int = option(3600, "seconds that processes wait for each other", least=1)

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("data", "out", "save"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))  # a shell leaves `--out=~/x` alone
            if not os.path.abspath(getattr(self, name)).isprintable():
                raise ConfigError(f"--{name} {getattr(self, name)!a} cannot stand in a table: use printable characters")
        if not re.fullmatch(r"[\w.:+-]{0,100}", self.campaign):
            raise ConfigError(f"--campaign {self.campaign!a}: use letters, digits and . : + - _, at most 100")
        if self.compile and self.no_compile:
            raise ConfigError("--compile and --no_compile were both given: choose one")
        shares = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", self.share)
        if not shares or int(shares[1]) >= min(int(shares[2]), self.runs):
            form = "give I/N, I from 0, less than N and the number of runs"
            raise ConfigError(f"--share {self.share} has none of {self.runs} runs: {form}")

    @property
    def planned(self) -> range:
        """The runs of this launch, those of its share: `start` and `step` are I and N."""
        first, shares = map(int, self.share.split("/"))
        return range(first, self.runs, shares)


# The command line


def parse(arguments: Sequence[str]) -> tuple[Options, Recipe]:
    """Return the options and the recipe that a command line asks for. Raise ConfigError for invalid values."""
    only_recipe = Parser(add_help=False, allow_abbrev=False)
    only_recipe.add_argument("--recipe", default=DEFAULT)
    kind = recipe_named(only_recipe.parse_known_args(arguments)[0].recipe)
    found, unknown = make_parser(kind).parse_known_args(arguments)
    if unknown:
        options = [f"--{field.name}" for owner in (kind, Options) for field in fields(cast(Any, owner))]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the options"
        raise ConfigError(f"recipe {kind.name} has no option {unknown[0]}; {hint}")
    if [] in (given := vars(found)).values():  # what argparse makes of `--runs=--`
        raise ConfigError("-- is no value of an option")
    if "demo" in given:
        if kind is not RECIPES[DEFAULT]:
            raise ConfigError(f"--demo is {DEFAULT}, small, not {kind.name}: leave out one of them")
        given = {"data": SYNTHETIC, **DEMO} | given

    def make(owner: Any) -> Any:
        return owner(**{field.name: given[field.name] for field in fields(owner) if field.name in given})

    return make(Options), make(kind)


def recipe_named(name: str) -> type[Recipe]:
    """Return a recipe of the package by its name, or a class of another file as FILE.py:CLASS. Raise ConfigError."""
    if name in RECIPES:
        return RECIPES[name]
    file, _, wanted = name.rpartition(":")
    try:
        if not file:
            raise LookupError(f"neither one of {', '.join(RECIPES)} nor FILE.py:CLASS")
        module_name = f"recipe_of_{Path(file).stem}"
        spec: Any = importlib.util.spec_from_file_location(module_name, file)
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kind = getattr(module, wanted)
        if not issubclass(kind, Recipe) or kind.__abstractmethods__:
            raise TypeError(f"{wanted} is no complete Recipe")
        if "__dataclass_fields__" not in vars(kind) and vars(kind).keys() & kind.__dataclass_fields__.keys():
            raise TypeError(f"{wanted} changes an option: put @dataclass(frozen=True) above it")
    except Exception as error:  # of whatever the file does
        raise ConfigError(f"--recipe {name} cannot be used ({type(error).__name__}: {first_line(error)})") from error
    return kind


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def make_parser(kind: type[Recipe]) -> Parser:
    """Return the parser of all options with this recipe. Options that are not given are absent from its result."""
    parser = Parser(
        prog=program(),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=f"recipe {kind.name}: " + (kind.__doc__ or "").partition("\n")[0],
        epilog="Environment variables: PYTHON (interpreter), CIFAR10_URL (a mirror of your own).",
    )
    text = f"{', '.join(RECIPES)}, or FILE.py:CLASS with a recipe of your own (default {DEFAULT})"
    parser.add_argument("--recipe", help=text)
    owners: tuple[tuple[str, Any], ...] = ((f"the recipe {kind.name}", kind), ("settings", Options))
    for title, owner in owners:
        group, types = parser.add_argument_group(title), get_type_hints(owner)
        for field in fields(owner):
            text, choices = field.metadata.get("help", "").replace("%", "%%"), field.metadata.get("choices")
            if types[field.name] is bool:
                group.add_argument(f"--{field.name}", action="store_true", help=text)
                continue
            text += f" (default {field.default})" if field.default != "" else ""
            metavar = None if choices else types[field.name].__name__.upper()
            group.add_argument(f"--{field.name}", type=types[field.name], choices=choices, help=text, metavar=metavar)
    text = f"large_batch_cifar_10_fast {__version__}, commit {commit()} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=text)
    return parser


# Checks and choices


def check_request(options: Options, recipe: Recipe) -> None:
    """Raise ConfigError for options that are invalid whatever the images and the number of processes."""
    check_save(options.save)
    if (options.nproc or options.teams > 1) and RENDEZVOUS not in os.environ:
        raise ConfigError("--nproc and --teams start processes: use train_cifar_parallel.sh, or torchrun without them")
    if RECIPES.get(recipe.name, type(recipe)) is not type(recipe):  # saved weights and tables name it
        raise ConfigError(f"{type(recipe).__name__} is not {recipe.name}: give your recipe a name of its own")


def check_processes(recipe: Recipe, world_size: int, micro_batches: int) -> None:
    """Raise ConfigError for numbers of processes or micro-batches that do not divide the workers."""
    if recipe.workers % world_size:
        fitting = [str(p) for p in range(1, recipe.workers + 1) if recipe.workers % p == 0]
        choice = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
        raise ConfigError(f"{recipe.workers} workers cannot be split over {world_size} processes: use {choice}")
    if (here := recipe.workers // world_size) % micro_batches:
        raise ConfigError(f"--micro_batches {micro_batches} does not divide the {here} workers of a process")


def check_images(recipe: Recipe, train_count: int, test_count: int, processes: int) -> None:
    """Raise ConfigError if an epoch's part of a shard fills no batch, or if a process would have no test image."""
    if test_count < processes:
        raise ConfigError(f"{processes} processes need as many test images, not {test_count}: use fewer processes")
    needed = recipe.workers * recipe.batch_size
    if needed > train_count:
        step = f"{recipe.workers} workers x --batch_size {recipe.batch_size} = {needed} images a step"
        hint = "use a smaller batch, fewer workers or more images"
        raise ConfigError(f"{step}, more than the training set's {train_count}: {hint}")
    for stage in recipe.stages:
        if not images_of_an_epoch(recipe, train_count, stage.first_epoch):
            kept = f"epoch {stage.first_epoch} keeps {stage.keep_fraction:g} of {train_count} images"
            raise ConfigError(f"{kept}, less than a step's {needed}: raise --kept, or use a smaller batch")


def estimate_seconds(recipe: Recipe, train_images: int, processes: int, precision: str) -> float:
    """Return about how long a run takes on the cores of so many processes."""
    cores = torch.get_num_threads() * processes
    return run_flop(recipe, train_images) / (CORE * cores) / (BF16 if precision == "bf16" else 1)


def choose_computation(options: Options, recipe: Recipe, ctx: DistContext, train_images: int) -> Options:
    """Choose precision and compilation where they were not given, alike on all processes. All must call this.

    The demo is in fp32 and not compiled. Else a GPU computes in the recipe's half precision (fp16 if it has no bf16),
    compiled; a CPU in bf16 where that is faster, compiled if a run takes ten minutes by an estimate. Raise ConfigError
    for a precision that the device does not have.
    """
    asked = options.precision
    if asked == "tf32" and not ctx.on_gpu:
        raise ConfigError("--precision tf32 is for GPUs: use --precision fp32")
    half_is_there = has_bf16(ctx.device) if ctx.on_gpu else not (asked or options.demo) and gains_by_bf16()
    all_have_bf16 = set(ctx.all_gather_strings("bf16", str(half_is_there))) == {"True"}
    if ctx.on_gpu and asked in ("bf16", "tf32") and not all_have_bf16:  # torch would emulate it slowly
        instead = "fp16" if asked == "bf16" else "fp32"
        raise ConfigError(f"--precision {asked} needs GPUs of compute capability 8.0 or later: use {instead}")
    wanted, otherwise = (recipe.half, "fp16") if ctx.on_gpu else ("bf16", "fp32")
    precision = asked or ("fp32" if options.demo else wanted if all_have_bf16 else otherwise)
    is_long = ctx.on_gpu or estimate_seconds(recipe, train_images, ctx.world_size, "fp32") > LONG
    by_default = is_long and not options.demo
    use_compiler = options.compile or (by_default and not options.no_compile)
    return replace(options, precision=precision, compile=use_compiler, no_compile=not use_compiler)


def as_pairs(options: Any) -> str:
    """Return the fields of options or of a recipe as tables and logs have them: `name=value name=value`."""
    return " ".join(f"{field.name}={getattr(options, field.name)}" for field in fields(options))


def as_words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line."""
    texts = {name: str(value) for name, value in options.items()}
    return [f"--{name}" if text == "True" else f"--{name}={text}" for name, text in texts.items() if text != "False"]


def recipe_of(conditions: Mapping[str, str]) -> Recipe | None:
    """Return the recipe that made a log, by its name and options; None if it is not ours. Raise ConfigError."""
    name = conditions.get("recipe", "")
    kind: Any = RECIPES.get(name)
    if kind is None:
        return None
    given = {field.name: conditions[field.name] for field in fields(kind) if field.name in conditions}
    return parse(["--recipe", name, *as_words(given)])[1]
