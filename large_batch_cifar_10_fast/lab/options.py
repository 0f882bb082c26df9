"""Options: the fields of a program's `Hyp`, and those that all programs have, from one command line.

A field is `name: type = default  # help`, and is the option `--name`. Its type is int, float, str, bool (False by
default), a Literal, or tuple[X, ...] (`--pixels 24,24,32`).
"""

import argparse
import inspect
import re
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from .. import PROGRAMS, ConfigError, check_range
from ..images.cifar import DATA

MOST = 100_000  # the largest number that an option takes, unless it has another limit


@dataclass(frozen=True)
class Options:
    """Where and how a program runs, alike for all programs."""

    runs: int = 1  # runs, each with fresh weights; run i uses seed + i
    seed: int = 0  # seed of run 0
    campaign: str = ""  # name of this set of runs; runs that it lacks are made (default: date and time)
    resume: bool = False  # continue the last campaign in --out, with its options
    data: str = str(DATA)  # cifar10, cifar100 (downloaded), synthetic, or FILE.npz, which `photos` makes of a folder
    holdout: int = 0  # test on the last N training images instead of the test images; 0: off
    out: str = "."  # folder for runs.tsv, epochs.tsv and timing_log.tsv
    save: str = ""  # file for the weights and running statistics of the last run
    device: Literal["", "cuda", "cpu"] = ""  # default: the GPUs if there are any, otherwise the CPU
    precision: Literal["", "fp16", "bf16", "tf32", "fp32", "fp64"] = ""  # default: by recipe and hardware
    micro_batches: int = 1  # passes per step, a divisor of a process's workers; more need less memory
    compile: bool = False  # compile the network (default on GPUs, and on a CPU for runs of 0.08 PFLOP or more)
    no_compile: bool = False  # do not compile, unless --compile is given
    no_graph: bool = False  # launch each kernel; by default the GPUs of one machine replay a CUDA graph
    no_warmup: bool = False  # skip the untimed warm-up; the first run is then slower
    small: bool = False  # the recipe at a small size, for experiments on a CPU (docs/experiments.md)
    demo: bool = False  # a small apple2019 on synthetic images, in fp32 and not compiled
    nproc: int = 0  # processes on this machine; 0: as many as fit its GPUs or cores
    timeout: int = 3600  # seconds that processes wait for each other

    def __post_init__(self) -> None:
        check_range(self, 1, MOST, "runs", "micro_batches", "timeout")
        check_range(self, 0, MOST, "nproc", "holdout")
        check_range(self, 0, 2**62 - 1, "seed")
        if not re.fullmatch(r"[\w.+=-]{0,100}", self.campaign):
            raise ConfigError(f"--campaign {self.campaign!a}: use letters, digits and . + = - _, at most 100")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError. Options that are not given are absent from its result."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **how)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def command_parser(owner: Any, text: str) -> Parser:
    """Return the parser of a command. Its options are the fields of a dataclass, its arguments those without default.

    Its help begins with an example: the second paragraph of a module's docstring.
    """
    what, example, *more = text.strip().split("\n\n")
    parser = Parser(
        usage=textwrap.dedent(example),
        description="\n\n".join([what, *more]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, owner)
    return parser


def read_options(owner: Any, text: str, arguments: Sequence[str]) -> Any:
    """Return a command's options. Raise ConfigError."""
    return owner(**vars(command_parser(owner, text).parse_args(arguments)))


def parse_options(arguments: Sequence[str], name: str, hyp: Any, images: int = 0) -> tuple[Options, Any]:
    """Return the options and the hyper-parameters that a command line asks for. Raise ConfigError.

    --small and --demo stand for options of the recipe, which those on the command line override. `images` is the
    number of training images, 0 if it is unknown. For fewer than CIFAR-10 has, `fit_to` gives further defaults.
    """
    parser = parser_of(name, hyp)
    given = vars(parser.parse_args(arguments))
    if "small" in given and "demo" in given:
        raise ConfigError("--small and --demo were both given: choose one")
    for word in given.keys() & {"small", "demo"}:
        if not getattr(hyp, word):
            raise ConfigError(f"the recipe {name} has no --{word}")
        given = vars(parser.parse_args([*getattr(hyp, word).split(), *arguments]))
    if 0 < images < 50_000 - given.get("holdout", 0):  # fewer than CIFAR-10
        given = make(hyp, given).fit_to(images, given) | given
    return make(Options, given), make(hyp, given)


def parser_of(name: str, hyp: Any) -> Parser:
    """Return the parser of a recipe's command line. Raise TypeError for a field that cannot be an option."""
    parser = Parser(
        usage=f"cifar10-fast train --recipe {name} --runs 5 --campaign night",
        description=f"recipe {name}: " + (hyp.__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--recipe", help=f"{', '.join(PROGRAMS)}, or FILE.py: a program of your own")
    add_options(parser.add_argument_group(f"the recipe {name}"), hyp)
    add_options(parser.add_argument_group("settings"), Options)
    return parser


def make(owner: Any, given: Mapping[str, Any]) -> Any:
    return owner(**{field.name: given[field.name] for field in fields(owner) if field.name in given})


def add_options(group: Any, owner: Any) -> None:
    """Add an option for each field of a dataclass."""
    kinds = get_type_hints(owner)
    texts = comments(owner)
    for field in fields(owner):
        kind = kinds[field.name]
        text = texts.get(field.name, "").replace("%", "%%")
        is_required = field.default is MISSING
        if kind is not bool and not is_required and field.default not in ("", ()):
            text += f" (default {text_of(field.default)})"
        how: dict[str, Any] = {"type": kind}
        if kind is bool:
            how = {"action": "store_true"}
        elif get_origin(kind) is Literal:
            choices = [word for word in get_args(kind) if word != ""]
            how = {"type": type(choices[0]), "choices": choices}
        elif get_origin(kind) is tuple and is_required:
            how = {"type": get_args(kind)[0], "nargs": "+"}
        elif get_origin(kind) is tuple:
            how = {"type": list_of(get_args(kind)[0])}
        elif kind not in (int, float, str, Path):
            known = "int, float, str, bool, Literal or tuple[X, ...]"
            raise TypeError(f"Hyp.{field.name} has the type {kind}: use {known}")
        group.add_argument(field.name if is_required else f"--{field.name}", help=text, **how)


def comments(owner: type) -> dict[str, str]:
    """Return the comment behind each field of a class and of those it inherits from, by name."""
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__[:-1]):
        found |= dict(re.findall(r"(?m)^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(kind)))
    return found


def list_of(kind: type) -> Callable[[str], tuple]:
    """Return a function that reads `1,2,3`. Its name is in argparse's errors."""

    def read(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = f"list of {kind.__name__}"
    return read


def text_of(value: object) -> str:
    """Return a value as command lines have it."""
    if isinstance(value, tuple | list):
        return ",".join(part if isinstance(part, str) else str(part).removesuffix(".0") for part in value)
    return str(value)


def as_words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line. Leave out options that are None or False."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words.append(f"--{name}={text_of(value)}")
    return words


def check_save(save: str) -> None:
    """Raise an error if a file cannot be written there, or if it would replace a file without weights."""
    path = Path(save)
    if save:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
        if path.exists() and not zipfile.is_zipfile(path):
            raise ConfigError(f"--save {save} exists and has no weights: choose another name")
