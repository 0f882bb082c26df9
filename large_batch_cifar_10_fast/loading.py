"""Keep the text of each module as it is loaded: of this package, a program, and the modules of a program's folder.

A file may be edited while a program runs. The text that ran is the text that was read when it was loaded.
"""

import ast
import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parent
TEXTS: dict[Path, bytes] = {}  # as they were loaded, by file


class ShadowError(ImportError):
    """A program imports a file that hides another module of the same name."""


class Loader(SourceFileLoader):
    """A loader of source files that keeps their text. It reads and writes no compiled files."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        text = self.get_data(path)
        file = place_of(path)
        TEXTS[file] = text
        # A traceback, or help, takes lines of the file from here. An entry without a time is never read again.
        lines = decode(text).splitlines(keepends=True)
        linecache.cache[path] = len(text), None, lines, path
        if FINDER.folder and PACKAGE not in file.parents:
            FINDER.check_imports(file, text)
        return self.source_to_code(text, path)


class Finder:
    """Python asks this finder first. It finds the modules of this package.

    While a program is loaded, it also finds the modules of the program's folder. This folder comes first, as for
    `python FILE.py`.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.helpers: list[str] = []  # modules of the folder, by name

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        first = name.partition(".")[0]
        spec = None
        if first == PACKAGE.name:
            spec = PathFinder.find_spec(name, path)
        elif self.folder and first not in sys.stdlib_module_names and (first == name or first in self.helpers):
            spec = PathFinder.find_spec(name, path or [str(self.folder)])
            other = None if spec and spec.origin else PathFinder.find_spec(name, path)
            if other and other.origin:  # a module elsewhere hides a folder without __init__.py
                return None
            if not spec or (spec.origin and self.folder not in Path(spec.origin).parents):
                return None
            self.helpers.append(name)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec

    def check_imports(self, file: Path, text: bytes) -> None:
        """Let a file's imports find the modules of the folder.

        Forget earlier loads of these modules. Raise ShadowError if a name is that of a standard module, or of a module
        that was loaded from elsewhere.
        """
        assert self.folder
        for name in imported_names(file, text, self.folder):
            first = name.partition(".")[0]
            if first == PACKAGE.name or not has_module(self.folder, first):
                continue
            loaded = getattr(sys.modules.get(first), "__file__", None)
            elsewhere = loaded and self.folder not in Path(os.path.abspath(loaded)).parents
            is_standard = first in sys.stdlib_module_names
            if is_standard or elsewhere:
                hidden = f"Python's own {first}" if is_standard else f"the {first} of {loaded}"
                beside = self.folder / f"{first}.py"
                raise ShadowError(f"{file.name} imports {first}, and {beside} hides {hidden}: rename it")
            if loaded and first not in self.helpers:
                forget([each for each in sys.modules if each.partition(".")[0] == first])


FINDER = Finder()
sys.meta_path.insert(0, FINDER)  # type: ignore[arg-type]  # it has what Python asks for


def place_of(path: str) -> Path:
    """Return the absolute path of a file. Resolve links for this package's files, so that each has one path."""
    resolved = Path(path).resolve()
    return resolved if PACKAGE in resolved.parents else Path(os.path.abspath(path))


def decode(text: bytes) -> str:
    """Return the text of a source file, by its byte order mark or coding line, else as UTF-8."""
    try:
        return importlib.util.decode_source(text)
    except (SyntaxError, UnicodeDecodeError):
        return text.decode(errors="replace")


def forget(names: list[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)


def forget_folder(folder: Path) -> None:
    """Forget modules that `python FILE.py` loaded from FILE's folder, because FILE is loaded again."""
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        is_helper = folder in file.parents and has_module(folder, name.partition(".")[0])
        if is_helper and name != "__main__" and PACKAGE not in file.parents:
            forget([name])


def load_file(file: Path) -> ModuleType:
    """Run a program's file. Load the modules of its folder that it imports, also inside functions. Return its module.

    Modules of an earlier program's folder are forgotten first, because names may be the same. The folder is added at
    the end of sys.path, for later imports.
    """
    forget(FINDER.helpers)
    FINDER.helpers.clear()
    importlib.invalidate_caches()  # a helper may be a moment old
    path = os.path.abspath(file)
    name = f"_program_{file.stem}"  # no library has this name
    spec = importlib.util.spec_from_file_location(name, path, loader=Loader(name, path))
    assert spec
    assert spec.loader
    program = importlib.util.module_from_spec(spec)
    sys.modules[name] = program
    around = FINDER.folder  # the folder of a program that loads this one
    FINDER.folder = Path(os.path.realpath(file) if file.is_symlink() else path).parent
    if str(FINDER.folder) not in sys.path:
        sys.path.append(str(FINDER.folder))
    try:
        spec.loader.exec_module(program)
        load_inner_imports(program)
        program.__dict__["__files__"] = own_files(program)
    finally:
        FINDER.folder = around
    return program


def load_inner_imports(program: ModuleType) -> None:
    """Load the modules of the folder that are imported inside functions: they belong to the program, too."""
    assert FINDER.folder
    tried: set[str] = set()
    new = {""}
    while new:
        files = own_files(program).values()
        names = {name for file in files for name in imported_names(file, TEXTS[file], FINDER.folder)}
        new = {name for name in names - tried if name not in sys.modules and has_module(FINDER.folder, name)}
        tried |= new
        for name in sorted(new):
            with contextlib.suppress(Exception):  # a module that cannot be loaded fails when it is used
                importlib.import_module(name)


def files_of(program: ModuleType) -> dict[str, Path]:
    """Return files by name: a program's own, and those of its folder and of our programs that it imports."""
    file = place_of(str(program.__file__))
    return program.__dict__.get("__files__", {name_of_ours(file): file})


def own_files(program: ModuleType) -> dict[str, Path]:
    """Return what `files_of` does, of the program that is being loaded."""
    assert FINDER.folder
    own = place_of(str(program.__file__))
    files = {own.name: own}
    for name in FINDER.helpers:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and place_of(path) in TEXTS:
            files[str(place_of(path).relative_to(FINDER.folder))] = place_of(path)
    for file in [*files.values()]:
        for name in imported_names(file, TEXTS[file], FINDER.folder):
            ours = PACKAGE.parent / f"{name.replace('.', '/')}.py"
            if ours.parent == PACKAGE and ours in TEXTS:
                files[name_of_ours(ours)] = ours
    return files


def name_of_ours(file: Path) -> str:
    """Return a file's path from the folder of this package on, or the name of any other file."""
    return str(file.relative_to(PACKAGE.parent)) if PACKAGE in file.parents else file.name


@cache  # each file is asked about several times
def imported_names(file: Path, text: bytes, folder: Path) -> set[str]:
    """Return the names of all modules that a source file may import, with the packages around them.

    Of `from a import b`, b may be a module. A relative import names a module of the folder, if the file is in it.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(text, file.name)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            around: tuple[str, ...] = ()
            if node.level and folder in file.parents:
                parts = file.relative_to(folder).parts
                around = parts[: len(parts) - node.level]
            names |= {".".join([*around, *filter(None, [node.module]), alias.name]) for alias in node.names}
    packages = {name.rsplit(".", count)[0] for name in names for count in range(name.count(".") + 1)}
    return names | packages


def has_module(folder: Path, name: str) -> bool:
    path = folder.joinpath(*name.split("."))
    return path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()
