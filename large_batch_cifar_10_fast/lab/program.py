"""Load a program, ours or FILE.py, and read its command line.

A program is a Python file with

* `Hyp`, a frozen dataclass that inherits from `core.hyp.BaseHyp`. Its fields are options: `epochs`, `batch_size`, more;
* `Network(hyp, classes)`, from images [B, 3, 32, 32] to logits [B, classes];
* `losses_of(hyp, logits, labels)`: the loss of each image, [B], as `evaluate` shows it;
* `train(hyp, images, machine)`, which sets up what all runs share (`machine.choose_precision`, `machine.set_up`) and
  returns the generator function run(seed). This calls `machine.restart`, trains one run and yields a `score.Epoch`
  after each epoch. `with machine.clock.timed("training"):` times training, and `("validation")` validation;
* if it likes, `SETS`: further recipes, their names and classes like Hyp.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from .. import PACKAGE, PROGRAMS, ConfigError, first_line
from ..core.hyp import BaseHyp
from . import snapshot
from .options import Options, parse_options, parser_of


def load_program(recipe: str) -> ModuleType:
    """Return the program of a recipe's name, or of FILE.py. Raise ConfigError."""
    if recipe not in PROGRAMS and not recipe.endswith(".py"):
        raise ConfigError(f"--recipe {recipe} is neither one of {', '.join(PROGRAMS)} nor FILE.py")
    try:
        program = snapshot.load_module(recipe)
        check_program(program)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise ConfigError(f"--recipe {recipe} cannot be used ({type(error).__name__}: {first_line(error)})") from error
    return program


def check_program(program: ModuleType) -> None:
    """Raise an error if a file is no program."""
    missing = [part for part in ("Hyp", "Network", "losses_of", "train") if not hasattr(program, part)]
    if missing:
        raise TypeError(f"it has no {' and no '.join(missing)}: copy one of our programs")
    if program.train.__module__ != program.__name__:
        raise TypeError("it imports `train`, which would use the other program's Network: copy it here")
    for recipe, hyp in sets_of(program).items():
        if not issubclass(hyp, BaseHyp):
            raise TypeError("its Hyp must inherit from core.hyp.BaseHyp")
        check_names(hyp)
        parser_of(recipe, hyp)
        hyp()  # each field has a default


def check_names(hyp: type[BaseHyp]) -> None:
    """Raise TypeError for a name in Hyp that is neither a field, nor a ClassVar or property, nor one of BaseHyp."""
    for owner in hyp.__mro__[: hyp.__mro__.index(BaseHyp)]:
        for name, value in vars(owner).items():
            is_own = name in get_type_hints(owner) or isinstance(value, property)
            if not (is_own or name.startswith("_") or hasattr(BaseHyp, name)):
                raise TypeError(f"Hyp.{name} is no field, and BaseHyp has no such name: annotate it, or correct it")


def recipe_of(arguments: Sequence[str], default: str = "apple2019") -> str:
    """Return the value of --recipe on a command line."""
    return snapshot.place_of(arguments, recipe=default).recipe


def read_command(program: ModuleType, arguments: Sequence[str], images: int = 0) -> tuple[str, Options, Any]:
    """Return the recipe's name, the options and the hyper-parameters of a command line.

    `images` is the number of training images, 0 if it is unknown.

    A recipe has the name of its program's file, or a name in the program's further `SETS` of hyper-parameters.
    """
    sets = sets_of(program)
    recipe = recipe_of(arguments, file_of(program).stem)
    name = Path(recipe).stem if recipe.endswith(".py") else recipe
    if name in PROGRAMS and file_of(program).resolve().parent != PACKAGE:  # its results would be taken for ours
        raise ConfigError(f"{file_of(program)} has a recipe with our name {name}: give it another name")
    return name, *parse_options(arguments, name, sets[name], images)


def sets_of(program: ModuleType) -> dict[str, Any]:
    """Return a program's sets of hyper-parameters: their classes, by the names of their recipes."""
    return {file_of(program).stem: program.Hyp, **getattr(program, "SETS", {})}


def file_of(program: ModuleType) -> Path:
    return Path(str(program.__file__))
