"""Options: the fields of a program's `Hyp`, and those that all programs have, from one command line.

A field is `name: type = default  # help`, and is the option `--name`. Its type is int, float, str, bool (by default
False), a Literal of words or numbers, tuple[X, ...] of int, float or str (`--pixels 24,24,32`), or X | None
(`--name None`).
"""

import argparse
import contextlib
import difflib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

from .. import PROGRAMS, ConfigError, check_range, first_line, version
from ..images.cifar import DATA

MOST = 100_000  # the largest number that an option takes, unless it has another limit


@dataclass(frozen=True)
class Options:
    """Where and how a program runs, alike for all programs."""

    runs: int = 1  # runs, each with fresh weights; run i uses seed + i
    seed: int = 0  # seed of run 0
    campaign: str = ""  # name of this set of runs; runs that it lacks are made (default: date and time)
    resume: bool = False  # continue the last campaign in --out
    data: str = str(DATA)  # cifar10, cifar100 (downloaded), synthetic, or FILE.npz, which `photos` makes of a folder
    holdout: int = 0  # test on the last N training images instead of the test images; 0: off
    out: str = "."  # folder for runs.tsv, epochs.tsv and timing_log.tsv
    save: str = ""  # file for the weights and running statistics of the last run
    device: Literal["", "cuda", "cpu"] = ""  # default: the GPUs if there are any, otherwise the CPU
    precision: Literal["", "fp16", "bf16", "tf32", "fp32", "fp64"] = ""  # default: GPU fp16 or bf16, CPU bf16 or fp32
    micro_batches: int = 1  # forward and backward passes per step; more need less memory
    compile: bool = False  # compile the network (default on GPUs, and on a CPU for runs over ten minutes)
    no_compile: bool = False  # do not compile
    no_graph: bool = False  # launch each kernel; by default the GPUs of one machine replay a CUDA graph
    no_warmup: bool = False  # skip the untimed warm-up; the first run is then slower
    small: bool = False  # the recipe at a small size, for experiments on a CPU (docs/experiments.md)
    demo: bool = False  # the default recipe, small, on synthetic images, in fp32 and not compiled
    profile: int = 0  # profile so many steps instead of making runs: write trace.json, print the costliest kernels
    nproc: int = 0  # processes of a team on this machine; 0: as many as fit its GPUs or cores
    teams: int = 1  # groups of processes that share the runs, each with its own GPUs or cores
    timeout: int = 3600  # seconds that processes wait for each other

    def __post_init__(self) -> None:
        check_range(self, 1, MOST, "runs", "micro_batches", "teams", "timeout")
        check_range(self, 0, MOST, "nproc", "profile", "holdout")
        check_range(self, 0, 2**62 - 1, "seed")
        if self.profile and self.teams > 1:
            raise ConfigError("--profile is for one team: leave out --teams")
        for name in ("data", "out", "save"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))  # a shell leaves `--out=~/x` alone
            if not os.path.abspath(getattr(self, name)).isprintable():
                raise ConfigError(
                    f"--{name} {getattr(self, name)!a} has characters that cannot be printed: choose another name"
                )
        if not re.fullmatch(r"[\w.:+=-]{0,100}", self.campaign):
            raise ConfigError(f"--campaign {self.campaign!a}: use letters, digits and . : + = - _, at most 100")
        if self.compile and self.no_compile:
            raise ConfigError("--compile and --no_compile were both given: choose one")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def command_parser(text: str) -> Parser:
    """Return a command's parser. Its help begins with an example: the second paragraph of a module's docstring."""
    what, example, *more = text.strip().split("\n\n")
    return Parser(
        usage=textwrap.dedent(example),
        description="\n\n".join([what, *more]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_options(arguments: Sequence[str], name: str, hyp: Any, demo: dict[str, Any]) -> tuple[Options, Any]:
    """Return the options and the hyper-parameters that a command line asks for. Raise ConfigError.

    `demo` has the hyper-parameters of --demo; it is empty for a program that has none.
    """
    parser = Parser(
        usage=f"cifar10-fast train --recipe {name} --runs 5 --campaign night",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # options that are not given are absent from the result
        description=f"recipe {name}: " + (hyp.__doc__ or "").partition("\n")[0],
        epilog="Environment variables: PYTHON (interpreter), CIFAR10_URL (a mirror of your own).",
    )
    parser.add_argument("--recipe", help=f"{', '.join(PROGRAMS)}, or FILE.py: a program of your own")
    add_options(parser.add_argument_group(f"the recipe {name}"), hyp)
    add_options(parser.add_argument_group("settings"), Options)
    parser.add_argument("--version", action="version", version=version())
    if any(word.endswith("=--") for word in arguments):  # versions of Python parse this differently
        raise ConfigError("-- is not a value of an option: give another")
    if "--small" in arguments:
        small = getattr(hyp, "small", "")
        if not small:
            raise ConfigError(f"--small: the recipe {name} has no small size (Hyp.small): leave it out")
        arguments = [*small.split(), *arguments]  # given options come last: they override these
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(f"recipe {name} has no option {unknown[0]}; {hint_for_option(unknown[0], hyp)}")
    given = vars(found)
    if "demo" in given:
        if not demo:
            raise ConfigError(f"--demo trains a small apple2019, not {name}: leave out --demo or --recipe")
        given = demo | given
    return make(Options, given), make(hyp, given)


def hint_for_option(word: str, hyp: Any) -> str:
    """Return a hint for an unknown option: the nearest option, or the recipe's learning rates."""
    option = word.partition("=")[0]
    rates = [f"--{field.name}" for field in fields(hyp) if re.search("(^|_)(lr|rate)(_|$)", field.name)]
    if rates and re.fullmatch("--((.*_)?lr(_.*)?|(learning_)?rate)", option):
        return f"its rates are {', '.join(rates)}"
    known = [f"--{field.name}" for owner in (hyp, Options) for field in fields(owner)]
    near = difflib.get_close_matches(option, known, 1, 0.7)
    return f"did you mean {near[0]}?" if near else "--help lists the options"


def check_fields(name: str, hyp: Any) -> None:
    """Raise ConfigError if a program's Hyp has a field that cannot be an option."""
    if not is_dataclass(hyp):
        raise ConfigError(f"recipe {name}: Hyp is no dataclass: write @dataclass(frozen=True) above it")
    try:
        kinds = get_type_hints(hyp)
    except Exception as error:  # such as a name that is imported for type checkers only
        raise ConfigError(f"recipe {name}: a type in Hyp is unknown ({first_line(error)}): import it") from error
    taken = {"recipe", "help", "version", *(field.name for field in fields(Options))}
    for field in fields(hyp):
        kind = kinds[field.name]
        if field.name in taken:
            raise ConfigError(f"recipe {name}: Hyp.{field.name} is an option of all programs: give it another name")
        if field.default is MISSING:
            raise ConfigError(f"recipe {name}: Hyp.{field.name} has no default: write {field.name}: TYPE = VALUE")
        if field.default == ():
            raise ConfigError(f"recipe {name}: Hyp.{field.name} is empty by default: use X | None = None")
        if field.default is True:
            raise ConfigError(
                f"recipe {name}: Hyp.{field.name} is True, so it cannot be set to False: use no_{field.name} = False"
            )
        if kind is not bool and not reader_of(field.name, kind):
            shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind
            known = "int, float, str, bool, a Literal, tuple[X, ...] or X | None"
            raise ConfigError(f"recipe {name}: Hyp.{field.name} has the invalid type {shown}: use {known}")


def make(owner: Any, given: dict[str, Any]) -> Any:
    return owner(**{field.name: given[field.name] for field in fields(owner) if field.name in given})


def add_options(group: Any, owner: Any) -> None:
    """Add an option for each field of a dataclass."""
    kinds = get_type_hints(owner)
    texts = comments(owner)
    for field in fields(owner):
        kind = kinds[field.name]
        text = texts.get(field.name, "").replace("%", "%%")
        if kind is bool:
            group.add_argument(f"--{field.name}", action="store_true", help=text)
            continue
        if field.default != "":
            text += f" (default {text_of(field.default)})"
        reader: Any = reader_of(field.name, kind)
        choices = choices_of(kind)
        metavar = None if choices else reader.__name__.upper()
        group.add_argument(f"--{field.name}", type=reader, choices=choices, help=text, metavar=metavar)


def comments(owner: type) -> dict[str, str]:
    """Return the comment behind each field of a class and of those it inherits from, by name."""
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class that no file has, such as object
            found |= dict(re.findall(r"(?m)^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(kind)))
    return found


def reader_of(name: str, kind: Any) -> Callable[[str], Any] | None:
    """Return a function that reads a value of this type from a text; None if it is no type of an option."""
    simple = (int, float, str)
    parts = get_args(kind)
    if kind in simple:
        return kind
    if get_origin(kind) is Literal and all(type(part) in simple for part in parts):
        return partial_named("choice", read_choice, parts)
    if get_origin(kind) is tuple and len(parts) == 2 and parts[1] is ... and parts[0] in simple:
        return partial_named("words" if parts[0] is str else "numbers", read_list, name, parts[0])
    if is_optional(kind):
        reader = reader_of(name, without_none(kind))
        return partial_named(reader.__name__, read_or_none, reader) if reader else None
    return None


def is_optional(kind: Any) -> bool:
    """Return whether a type is X | None."""
    return get_origin(kind) in (Union, UnionType) and len(get_args(kind)) == 2 and NoneType in get_args(kind)


def without_none(kind: Any) -> Any:
    return next(part for part in get_args(kind) if part is not NoneType)


def choices_of(kind: Any) -> list | None:
    """Return the choices of an option of this type; None if the type does not list them."""
    if is_optional(kind):
        choices = choices_of(without_none(kind))
        return [*choices, None] if choices else None
    return [word for word in get_args(kind) if word != ""] if get_origin(kind) is Literal else None


def partial_named(name: str, function: Callable, *arguments: Any) -> Callable[[str], Any]:
    """Return a function of the last argument, with a name that --help shows."""
    found: Any = partial(function, *arguments)
    found.__name__ = name
    return found


def read_choice(choices: Sequence[Any], text: str) -> Any:
    """Return the choice with this text. If there is none, return the text; argparse then reports an error."""
    for choice in choices:
        with contextlib.suppress(ValueError):
            if type(choice)(text) == choice:
                return choice
    return text


def read_list(name: str, kind: type, text: str) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers, like 24,24,28,32" if kind is int else "numbers, like 1,1,0.7"
        raise ConfigError(f"--{name} {text} is not a list of {what}") from None


def read_or_none(reader: Callable[[str], Any], text: str) -> Any:
    return None if text == "None" else reader(text)


def text_of(value: object) -> str:
    """Return a value as command lines have it."""
    if isinstance(value, tuple | list):
        return ",".join(part if isinstance(part, str) else str(part).removesuffix(".0") for part in value)
    return str(value)


def as_pairs(options: Any) -> str:
    """Return the fields of options as tables and logs have them: `name=value name=value`.

    Characters that would end a value are encoded as in a URL: %20 is a space.
    """
    texts = {field.name: text_of(getattr(options, field.name)) for field in fields(options)}
    encoded = {name: re.sub(r"[%\s]", lambda found: quote(found[0]), text) for name, text in texts.items()}
    return " ".join(f"{name}={text}" for name, text in encoded.items())


def from_texts(texts: Mapping[str, object], owner: Any) -> dict[str, object]:
    """Return the stored options that are fields of a dataclass. Their values may be texts."""
    found = {}
    for field in fields(owner):
        if field.name in texts:
            value = texts[field.name]
            if field.default is False:
                value = str(value) == "True"
            found[field.name] = "None" if value is None else value
    return found


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
    """Raise ConfigError if the weights cannot be written, or would replace a file that has no weights."""
    path = Path(save)
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if save and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise OSError(f"{folder} is not a folder with write access")
        # torch.save writes this name first.
        if save and path.exists() and not (path.is_file() and b"/data.pkl" in path.open("rb").read(300)):
            raise OSError("it would replace another file")
    except OSError as error:
        raise ConfigError(f"--save {save} cannot be written ({error}): choose another name") from error
