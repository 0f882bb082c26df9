"""Keep the text of what is loaded: of this package, of a program, and of what a program imports from its folder.

A file may be edited while a program runs: what ran is the text that was read when it was loaded.
"""

import ast
import importlib
import importlib.util
import linecache
import sys
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
        file = Path(path).resolve()
        TEXTS[file] = text
        # What shows lines of the file, such as a traceback, takes them from here: never changed, so without a time.
        lines = decode(text).splitlines(keepends=True)
        linecache.cache[path] = len(text), None, lines, path
        if FINDER.folder and PACKAGE not in file.parents:
            check_imports(file, text, Path(FINDER.folder))
        return self.source_to_code(text, path)


class Finder:
    """The first to be asked for a module. It finds those of this package, and those in a program's folder while that is
    loaded: as for `python FILE.py`, the folder comes before all others."""

    def __init__(self) -> None:
        self.folder = ""
        self.helpers: list[str] = []  # modules of the folder, by name

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        first = name.partition(".")[0]
        spec = None
        if first == PACKAGE.name:
            spec = PathFinder.find_spec(name, path)
        elif self.folder and first not in sys.stdlib_module_names:
            spec = PathFinder.find_spec(name, path or [self.folder])
            if spec and not spec.origin:  # a folder without __init__.py, which any other module of its name hides
                return None if PathFinder.find_spec(name, path) else spec
            if not (spec and spec.origin and Path(self.folder) in Path(spec.origin).resolve().parents):
                return None
            self.helpers.append(name)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


FINDER = Finder()


def decode(text: bytes) -> str:
    """Return the text of a source file, by its byte order mark or coding line, else as UTF-8."""
    try:
        return importlib.util.decode_source(text)
    except (SyntaxError, UnicodeDecodeError):
        return text.decode(errors="replace")


def load_file(file: Path) -> ModuleType:
    """Run a program's file, and load what it imports from its folder, also inside functions. Return its module.

    What another program imported from its own folder is forgotten, so that equal names are no equal modules.
    """
    for name in FINDER.helpers:
        sys.modules.pop(name, None)
    FINDER.helpers.clear()
    importlib.invalidate_caches()  # a helper may be a moment old
    folder = str(file.resolve().parent)
    name = f"_program_{file.stem}"  # no library has this name
    loader = Loader(name, str(file.resolve()))
    spec = importlib.util.spec_from_file_location(name, file.resolve(), loader=loader)
    assert spec
    program = importlib.util.module_from_spec(spec)
    sys.modules[name] = program
    FINDER.folder = folder
    try:
        loader.exec_module(program)
        while names := names_to_load(file):
            for name in names:
                importlib.import_module(name)
    finally:
        FINDER.folder = ""
    program.__dict__["__files__"] = own_files(file)
    return program


def files_of(program: ModuleType) -> list[Path]:
    """Return a program's file, and those of the modules of its folder that it imports."""
    return program.__dict__.get("__files__", [Path(str(program.__file__)).resolve()])


def own_files(program: Path) -> list[Path]:
    """Return the file of the program that is being loaded, and of the modules of its folder."""
    modules = [sys.modules[name] for name in FINDER.helpers if name in sys.modules]
    return list(dict.fromkeys([program.resolve(), *(Path(str(module.__file__)).resolve() for module in modules)]))


def names_to_load(program: Path) -> set[str]:
    """Return the modules of the folder that are imported inside functions: they belong to the program, too."""
    names = {name for file in own_files(program) for name in imported_names(TEXTS.get(file, b""), file)}
    return {name for name in names if name not in sys.modules and has_module(program.resolve().parent, name)}


def imported_names(text: bytes, file: Path) -> list[str]:
    """Return the first names of all modules that a source file imports, but for those with dots before them."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text, file.name)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return [name.partition(".")[0] for name in names]


def has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def check_imports(file: Path, text: bytes, folder: Path) -> None:
    """Raise ShadowError if a file imports a name that a module of the folder shares with one that is in use."""
    for name in imported_names(text, file):
        if name == PACKAGE.name or not has_module(folder, name):
            continue
        loaded = getattr(sys.modules.get(name), "__file__", None)
        is_standard = name in sys.stdlib_module_names
        if is_standard or (loaded and folder not in Path(loaded).resolve().parents):
            hidden = f"Python's own {name}" if is_standard else f"the {name} of {loaded}"
            raise ShadowError(f"{file.name} imports {name}, and {folder / name}.py hides {hidden}: rename it")


sys.meta_path.insert(0, FINDER)  # type: ignore[arg-type]  # it has what Python asks for
