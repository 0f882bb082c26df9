"""From a command line and its environment to settings and a recipe; with --resume, to those of a campaign."""

import argparse
import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import get_type_hints

from . import __version__
from .campaign import CONDITIONS, Row, check_unchanged, finished_rows, is_restart, planned_by
from .devices import count_gpus
from .environment import commit
from .options import ConfigError, Launch, Settings, as_pairs, from_pairs, has_option
from .recipe import Recipe
from .recipes.apple2019 import DEMO, Apple2019
from .recipes.basenet import Basenet
from .recipes.fastai import FastAI
from .recipes.muon import Muon2024, MuonRecipe
from .recipes.page import Page

KINDS = (Apple2019, Basenet, Page, FastAI, MuonRecipe, Muon2024)  # a new recipe joins here
RECIPES = {recipe.name: recipe for recipe in KINDS}  # what --recipe knows
DEFAULT = Apple2019.name
PRESET = {"data": "synthetic", **DEMO}
CHANGED = "somebody changed its table; put it back, or start without --resume"


def read_request(arguments: Sequence[str], rows: Sequence[Row] | None = None) -> tuple[Settings, Recipe]:
    """Return the settings and the recipe asked for; with --resume those of the last campaign in --out.

    `rows` are the campaign's, where somebody else read them; None: read them here. Raise ConfigError for values that
    make no sense, for --resume without a campaign, and where new values or the code differ from the campaign's.
    """
    name = _recipe_asked_for(arguments)
    kind = RECIPES[name or DEFAULT]
    asked = vars(_parser(kind).parse_args(arguments))
    asked.pop("recipe", None)
    if asked.get("demo"):
        if kind is not RECIPES[DEFAULT]:
            raise ConfigError(f"--demo is {DEFAULT}, small, not {kind.name}: leave out one of them")
        asked = PRESET | asked
    settings, recipe = _made_of(Settings, asked), _made_of(kind, asked)
    if not settings.resume:
        return settings, recipe
    return _resumed(settings, name, asked, finished_rows(settings) if rows is None else rows)


def read_launch(arguments: Sequence[str]) -> tuple[Launch, Settings]:
    """Return how processes are started, and the settings before --resume adds a campaign's. Raise ConfigError."""
    kind = RECIPES[_recipe_asked_for(arguments) or DEFAULT]
    asked = vars(_parser(kind).parse_args(arguments))
    return _made_of(Launch, asked), _made_of(Settings, asked)


def read_to_measure(arguments: Sequence[str], processes: int) -> tuple[Settings, Recipe]:
    """Return the same for measured steps: on a CPU of one worker a process, unless --workers is given or the recipe has
    its own number, because a step would last half a minute."""
    settings, recipe = read_request(arguments)
    given = any(argument.split("=")[0] == "--workers" for argument in arguments)
    if has_option(recipe, "workers") and not given and not count_gpus(settings.device):
        return read_request([*arguments, "--workers", str(processes)])
    return settings, recipe


def _made_of(kind: type, values: Mapping[str, object]):
    return kind(**{entry.name: values[entry.name] for entry in fields(kind) if entry.name in values})


def _recipe_asked_for(arguments: Sequence[str]) -> str | None:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", choices=RECIPES)
    return parser.parse_known_args(arguments)[0].recipe


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; --help lists the options")

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:
        known, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(f"{self.description.split(':')[0]} has no option {unknown[0]}")
        return known

    def parse_known_args(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        known, unknown = super().parse_known_args(arguments)
        for name, value in vars(known).items():
            if isinstance(value, list):  # what argparse makes of `--name=--`
                self.error(f"argument --{name}: expected one argument")
        return known, unknown


def _parser(kind: type) -> _Parser:
    """All options of a recipe and of the settings; those left out leave no trace, so that what was asked shows."""
    parser = _Parser(
        prog="train_cifar_parallel.sh",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=f"recipe {kind.name}: {kind.__doc__.splitlines()[0]}",
        epilog="From the environment: PYTHON (interpreter), CIFAR10_URL (a mirror of your own).",
    )
    parser.add_argument("--recipe", choices=RECIPES, help=f"what is trained, and how (default {DEFAULT})")
    for title, owner in ((f"the recipe {kind.name}", kind), ("settings", Settings), ("processes", Launch)):
        group, kinds = parser.add_argument_group(title), get_type_hints(owner)
        for entry in fields(owner):
            _add_option(group, entry, kinds[entry.name])
    text = f"large_batch_cifar_10_fast {__version__}, commit {commit()} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=text)
    return parser


def _add_option(group, entry, kind: type) -> None:
    text = entry.metadata["help"].replace("%", "%%")
    if kind is bool:
        group.add_argument(f"--{entry.name}", action="store_true", help=text)
        return
    choices = entry.metadata.get("choices")
    shown = f"{text} (default {'none' if entry.default == '' else entry.default})"
    if text == argparse.SUPPRESS:
        shown = text
    metavar = None if choices else kind.__name__.upper()
    group.add_argument(f"--{entry.name}", type=kind, choices=choices, help=shown, metavar=metavar)


def _resumed(
    settings: Settings, name: str | None, asked: Mapping[str, object], rows: Sequence[Row]
) -> tuple[Settings, Recipe]:
    """The campaign's own settings and recipe, unless something given anew contradicts them."""
    if not rows:
        raise ConfigError(f"--resume: there is no campaign in {settings.out}: start one without --resume")
    row, planned = rows[-1], planned_by(rows[-1])
    if len(rows) >= len(planned) and not is_restart():
        message = f"the last campaign in {settings.out}, {row['campaign']}, has all its {len(planned)} runs"
        last_seed = int(row["seed"]) - int(row["run"]) + planned[-1]
        advice = f"; for its last run's weights train that again: --seed {last_seed} --save" if settings.save else ""
        raise ConfigError(f"--resume: {message}{advice}")
    if settings.save and str(planned[-1]) in {row["run"] for row in rows} and not is_restart():
        raise ConfigError(
            f"--resume: --save keeps the last run's weights, and run {planned[-1]} is made: leave out --save"
        )
    if row["recipe"] not in RECIPES:
        raise ConfigError(f"--resume: this version has no recipe {row['recipe']}: start without --resume")
    kind = RECIPES[row["recipe"]]
    recipe = _made_of(kind, _typed(kind, row, from_pairs(row["options"])))
    if as_pairs(asdict(recipe)) != row["options"]:
        raise ConfigError(f"--resume: campaign {row['campaign']} lacks options of {kind.name}: {CHANGED}")
    kept = _typed(Settings, row, {name: row[name] for name in ("runs", "share", *CONDITIONS)})
    kept |= {"seed": int(row["seed"]) - int(row["run"]), "no_compile": not kept["compile"]}
    campaign = kept | asdict(recipe)
    now = {key: value for key, value in asked.items() if key in campaign}
    check_unchanged(row | campaign, recipe=name or kind.name, **now)
    return replace(settings, **kept, data=asked.get("data", _images_here(row, settings))), recipe


def _images_here(row: Row, settings: Settings) -> str:
    """A campaign's images; on another machine than the first, where they may lie elsewhere, in the usual place."""
    elsewhere = os.path.isabs(row["data"]) and not os.path.exists(row["data"]) and os.environ.get("RANK", "0") != "0"
    return settings.data if elsewhere else row["data"]


def _typed(kind: type, row: Row, texts: Mapping[str, str]) -> dict[str, object]:
    """What a row's words mean; raises ConfigError for what this version would not have written."""
    kinds, values = get_type_hints(kind), {}
    choices = {entry.name: entry.metadata.get("choices") for entry in fields(kind)}
    for name, text in texts.items():
        with contextlib.suppress(ValueError):
            if name in choices:
                values[name] = text == "True" if kinds[name] is bool else kinds[name](text)
        if name not in values or str(values[name]) != text or text not in (choices[name] or [text]):
            raise ConfigError(f"--resume: campaign {row['campaign']} has {name}={text[:40]}: {CHANGED}")
    return values
