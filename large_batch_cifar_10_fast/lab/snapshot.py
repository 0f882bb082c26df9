"""Code runs from a copy, so what ran is what is kept, and an edit during a campaign has no effect.

OUT/source/DIGEST     a copy of this package, or of a program of one's own: the modules and packages of its folder.
                      It is named by what it holds, so it is never changed, and campaigns share it
OUT/runs/NAME/source  the DIGESTs from which campaign NAME runs; beside it `command` has the words of its first launch

The first launch of a campaign makes the copies and starts its processes from them. Later launches start themselves
again from the campaign's copy. A campaign without a finished run or a running launch is not begun: it is copied anew.
This module imports no torch, which the start from the copy would import again.
"""

import argparse
import hashlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .. import ORIGIN, ORIGIN_VARIABLE, PACKAGE, PROGRAMS, ConfigError, commit
from ..files import is_running, write_atomically
from .table import new_name


class Place(NamedTuple):
    """The folder --out, a campaign in it, and the value of --recipe."""

    out: Path
    campaign: str
    recipe: str

    def named(self) -> "Place":
        """Return this place, with a new campaign if it has none."""
        return self._replace(campaign=self.campaign or new_name())

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.campaign

    @property
    def copies(self) -> list[Path]:
        """The campaign's copies: of the package, and of the folder of its own program. Empty if there are none."""
        marker = self.folder / "source"
        names = marker.read_text().split() if self.campaign and marker.exists() else []
        return [self.out / "source" / name for name in names]

    @property
    def program(self) -> Path:
        """The campaign's copy of the program FILE.py. Without a copy, there is no such file."""
        folder = self.copies[1] if len(self.copies) > 1 else self.folder
        return folder / Path(self.recipe).name

    @property
    def is_begun(self) -> bool:
        """Whether the campaign has a finished run or a running launch."""
        if not self.campaign or not (self.folder / "claims").exists():
            return False
        return any(self.folder.glob("[0-9]*.json")) or is_running(self.folder)

    @property
    def kept_recipe(self) -> str:
        """The campaign's copy of FILE.py, or a recipe of ours."""
        return str(self.program) if self.recipe.endswith(".py") else self.recipe


def place_of(arguments: Sequence[str], out: str = ".", campaign: str = "", recipe: str = "apple2019") -> Place:
    """Return what a command line says of its campaign; the other parameters are defaults. Raise ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("out", out), ("campaign", campaign), ("recipe", recipe)):
        parser.add_argument(f"--{name}", nargs="?", default=default, const="")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_known_args(arguments)[0]
    folder = Path(given.out).expanduser().absolute()
    if given.resume and not given.campaign:
        begun = sorted(folder.glob("runs/*/source"), key=lambda marker: marker.stat().st_mtime_ns)
        if not begun:
            raise ConfigError(f"--resume: there is no campaign in {folder}: start one without --resume")
        given.campaign = begun[-1].parent.name
    return Place(folder, given.campaign, given.recipe)


# ---- The copies


def enter(place: Place, command: str, arguments: Sequence[str]) -> None:
    """Start this command again from the copy of its campaign, if there is one and it does not run from it."""
    if place.copies and place.is_begun and not place.copies[0].samefile(PACKAGE.parent):  # or OSError: it was deleted
        words = [sys.executable, "-m", PACKAGE.name, command, *arguments]
        os.execve(sys.executable, words, os.environ | environment_of(place.copies[0]))


def environment_of(source: Path) -> dict[str, str]:
    """Return the environment of processes that run from a copy of the package."""
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The folder a user stands in may hold files named like modules: it is not searched for them.
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", ORIGIN_VARIABLE: str(ORIGIN)}


def keep(place: Place) -> Path:
    """Make the copies of a campaign that is not begun. Return its copy of the package."""
    if not (place.is_begun and place.copies):
        place.folder.mkdir(parents=True, exist_ok=True)
        names = [publish(texts_of_package() | {"commit": commit().encode()}, place.out / "source")]
        if place.recipe.endswith(".py"):
            names.append(publish(texts_of_folder(Path(place.recipe)), place.out / "source"))
        with write_atomically(place.folder / "source") as unfinished:
            unfinished.write_text(" ".join(names))
    return place.copies[0]


def publish(texts: Mapping[str, bytes], folder: Path) -> str:
    """Write files by their names to a folder in `folder`, all at once, unless it is there. Return its name."""
    name = digest(texts)
    if not (folder / name).exists():
        unfinished = folder / f".unfinished.{secrets.token_hex(4)}"
        for file, text in texts.items():
            (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / file).write_bytes(text)
        try:
            unfinished.rename(folder / name)
        except OSError:  # another launch was first
            shutil.rmtree(unfinished)
            if not (folder / name).exists():
                raise
    return name


def texts_of_package() -> dict[str, bytes]:
    # Not deeper: --out may be this folder, and hold copies.
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"), *PACKAGE.glob("published/**/*")]
    return {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in files if file.is_file()}


def texts_of_folder(program: Path) -> dict[str, bytes]:
    """Return the texts of a program, and of the modules and packages in its folder, by name."""
    folder = program.resolve().parent
    files = [*folder.glob("*.py")]
    for package in folder.glob("*/__init__.py"):
        if package.parent != PACKAGE:
            files += package.parent.rglob("*.py")
    texts = {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}
    return texts | {program.name: program.read_bytes()}


# ---- What runs


def files_of(program: ModuleType) -> dict[str, Path]:
    """Return the files of a program, by name: its own, and what it has imported from its folder.

    A file of this package has the package's name before its own.
    """
    own = Path(str(program.__file__)).absolute()
    if own.resolve().parent == PACKAGE:
        return {f"{PACKAGE.name}/{own.name}": own}
    files = {own.name: own}
    for module in [*sys.modules.values()]:
        name = name_in(own.resolve().parent, module)
        if name:
            files[name] = Path(str(module.__file__))
    return files


def name_in(folder: Path, module: ModuleType) -> str:
    """Return a module's path in a program's folder, or "" if it is not one of its modules and packages."""
    file = Path(getattr(module, "__file__", None) or "/")
    if module.__name__ == "__main__" or folder not in file.parents or PACKAGE in file.parents:
        return ""
    name = file.relative_to(folder)
    is_ours = len(name.parts) == 1 or (folder / name.parts[0] / "__init__.py").exists()
    return str(name) if is_ours else ""


def digest(texts: Mapping[str, bytes]) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over texts and their names."""
    total = hashlib.sha256()
    for name, text in sorted(texts.items()):
        total.update(name.encode())
        total.update(hashlib.sha256(text).digest())
    return total.hexdigest()[:12]


def digests(program: ModuleType) -> dict[str, str]:
    """Return the digests `code`, of a program and what it imports from its folder, and `core`, of the package."""
    code = {name: file.read_bytes() for name, file in files_of(program).items()}
    core = {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in core_files()}
    return {"code": digest(code), "core": digest(core)}


def core_files() -> list[Path]:
    return [*PACKAGE.glob("*.py"), *PACKAGE.glob("core/*.py"), *PACKAGE.glob("images/*.py")]


def check_unchanged(program: ModuleType, place: Place) -> None:
    """Raise ConfigError if a program differs from a begun campaign's copy."""
    if not (place.is_begun and place.copies):
        return
    folder = Path(place.recipe).resolve().parent
    for name in files_of(program):
        is_ours = name.startswith(f"{PACKAGE.name}/")
        old = place.copies[0] / name if is_ours else place.program.with_name(name)
        new = ORIGIN.parent / name if is_ours else folder / name
        if old.exists() and (not new.exists() or old.read_bytes() != new.read_bytes()):
            changed = f"{new.name} was changed since campaign {place.campaign} began, and differs from its copy {old}"
            raise ConfigError(f"{changed}: undo that, give --resume to continue, or choose another --campaign")


# ---- Loading

LOADED: list[Path] = []  # the folders of programs that this process has loaded


def load_module(recipe: str) -> ModuleType:
    """Load a recipe's program, or that of FILE.py. Its folder is searched last, so its modules hide no others."""
    if recipe in PROGRAMS:
        return importlib.import_module(f"{PACKAGE.name}.{PROGRAMS[recipe]}")
    forget_modules()
    file = Path(recipe)
    folder = file.resolve().parent
    LOADED.append(folder)
    sys.path.append(str(folder))
    importlib.invalidate_caches()  # a module may be a moment old
    sys.dont_write_bytecode = True  # it could be taken for that of a file edited within a second
    name = f"_program_{file.stem}"  # no library has this name
    spec = importlib.util.spec_from_file_location(name, file.absolute())
    assert spec
    assert spec.loader
    program = importlib.util.module_from_spec(spec)
    sys.modules[name] = program
    spec.loader.exec_module(program)
    return program


def forget_modules() -> None:
    """Forget the modules of earlier programs' folders, because another folder may have the same names."""
    for name, module in [*sys.modules.items()]:
        if any(name_in(folder, module) for folder in LOADED):
            del sys.modules[name]
    for folder in LOADED:
        sys.path.remove(str(folder))
    LOADED.clear()
