"""From a command line to a RunConfig and a recipe; with --resume, to those of a campaign."""

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import get_type_hints

from . import __version__
from .campaign import CONDITIONS, Row, check_unchanged, finished_rows, first_seed, is_restart, planned_by
from .environment import commit
from .options import ConfigError, Launch, RunConfig, as_pairs, from_pairs
from .recipe import Recipe
from .recipes.apple2019 import DEMO, Apple2019
from .recipes.basenet import Basenet
from .recipes.fastai import FastAI
from .recipes.muon import Muon2024, MuonRecipe
from .recipes.page import Page

RECIPES = {kind.name: kind for kind in (Apple2019, Basenet, Page, FastAI, MuonRecipe, Muon2024)}  # add yours here
DEFAULT = Apple2019.name
PRESET = {"data": "synthetic", **DEMO}


def read_request(arguments: Sequence[str], rows: Sequence[Row] | None = None) -> tuple[RunConfig, Recipe]:
    """Return the config and the recipe asked for; with --resume those of the last campaign in --out.

    `rows` are the campaign's if they were read before. Raise ConfigError for invalid values, for --resume without a
    campaign, and for values or code that differ from the campaign's.
    """
    name, asked = _parse(arguments)
    kind = RECIPES[name or DEFAULT]
    if asked.get("demo"):
        if kind is not Apple2019:
            raise ConfigError(f"--demo is {DEFAULT}, small, not {kind.name}: leave out one of them")
        asked = PRESET | asked
    config = _made_of(RunConfig, asked)
    if not config.resume:
        return config, _made_of(kind, asked)
    return _resumed(config, name, asked, finished_rows(config.out, True) if rows is None else rows)


def read_launch(arguments: Sequence[str]) -> tuple[Launch, RunConfig]:
    """Return how processes are started, and the config before --resume adds a campaign's. Raise ConfigError."""
    _, asked = _parse(arguments)
    return _made_of(Launch, asked), _made_of(RunConfig, asked)


def _parse(arguments: Sequence[str]) -> tuple[str | None, dict[str, object]]:
    """Return the recipe's name, if it was given, and the other options that were given."""
    only_recipe = Parser(add_help=False, allow_abbrev=False)
    only_recipe.add_argument("--recipe", choices=RECIPES)
    name = only_recipe.parse_known_args(arguments)[0].recipe
    known, unknown = _parser(kind := RECIPES[name or DEFAULT]).parse_known_args(arguments)
    if [] in vars(known).values():  # what argparse makes of `--runs=--`
        raise ConfigError("-- is no value of an option")
    if unknown:
        raise ConfigError(f"recipe {kind.name} has no option {unknown[0]}; --help lists the options")
    return name, {key: value for key, value in vars(known).items() if key != "recipe"}


def _made_of(kind: type, values: Mapping[str, object]):
    return kind(**{entry.name: values[entry.name] for entry in fields(kind) if entry.name in values})


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def error(self, message: str):
        raise ConfigError(f"{message}; --help lists the options")


def _parser(kind: type) -> Parser:
    """Return the parser of all options with this recipe. Options that are not given are absent from its result."""
    parser = Parser(
        prog="train_cifar_parallel.sh",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=f"recipe {kind.name}: {kind.__doc__.splitlines()[0]}",
        epilog="Environment variables: PYTHON (interpreter), CIFAR10_URL (a mirror of your own).",
    )
    parser.add_argument("--recipe", choices=RECIPES, help=f"what is trained, and how (default {DEFAULT})")
    for title, owner in ((f"the recipe {kind.name}", kind), ("settings", RunConfig), ("processes", Launch)):
        group, kinds = parser.add_argument_group(title), get_type_hints(owner)
        for entry in fields(owner):
            _add_option(group, entry, kinds[entry.name])
    text = f"large_batch_cifar_10_fast {__version__}, commit {commit()} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=text)
    return parser


def _add_option(group, entry, kind: type) -> None:
    text, choices = entry.metadata["help"].replace("%", "%%"), entry.metadata.get("choices")
    if kind is bool:
        group.add_argument(f"--{entry.name}", action="store_true", help=text)
        return
    text = f"{text} (default {'none' if entry.default == '' else entry.default})"
    metavar = None if choices else kind.__name__.upper()
    group.add_argument(f"--{entry.name}", type=kind, choices=choices, help=text, metavar=metavar)


def _resumed(config: RunConfig, name: str | None, asked: Mapping, rows: Sequence[Row]) -> tuple[RunConfig, Recipe]:
    """Return the campaign's config and recipe. Raise ConfigError if an option given now contradicts them."""
    if not rows:
        raise ConfigError(f"--resume: there is no campaign in {config.out}: start one without --resume")
    row, last = rows[-1], planned_by(rows[-1])[-1]
    if config.save and not is_restart() and str(last) in {row["run"] for row in rows}:
        raise ConfigError(f"--resume: --save keeps the weights of run {last}, which is finished: leave out --save")
    try:
        kind, values = RECIPES[row["recipe"]], _parse(_arguments_of(row))[1]
        first, recipe = _made_of(RunConfig, values), _made_of(kind, values)
        if as_pairs(asdict(recipe)) != row["options"]:
            raise ConfigError(f"options are {as_pairs(asdict(recipe))} now")
    except (ConfigError, KeyError) as error:
        changed = "its table or this version was changed; restore it, or start without --resume"
        raise ConfigError(f"--resume: campaign {row['campaign']} cannot be repeated ({error}): {changed}") from error
    kept = {name: getattr(first, name) for name in ("runs", "share", "seed", "no_compile", *CONDITIONS)}
    campaign = kept | asdict(recipe)
    again = asked | asdict(_made_of(kind, values | asked))  # where 0 stands for a default, it is resolved
    now = {key: again[key] for key in asked if key in campaign and key != "compile"}  # which may have failed
    check_unchanged(row | campaign, recipe=name or kind.name, **now)
    # Other machines than the first take the default where the campaign's path does not exist.
    elsewhere = os.environ.get("RANK", "0") != "0" and os.path.isabs(row["data"]) and not os.path.exists(row["data"])
    return replace(config, **kept, data=config.data if "data" in asked or elsewhere else row["data"]), recipe


def _arguments_of(row: Row) -> list[str]:
    """Return the command line that makes the runs of a row's campaign."""
    values = {name: row[name] for name in ("recipe", "runs", "share", *CONDITIONS)} | from_pairs(row["options"])
    values |= {"seed": str(first_seed(row)), "no_compile": str(row["compile"] == "False")}
    return [f"--{name}" if text == "True" else f"--{name}={text}" for name, text in values.items() if text != "False"]
