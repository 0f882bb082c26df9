"""The text of a program: what it imports, a digest over all of it, and a copy beside each campaign's tables."""

import ast
import hashlib
import importlib.util
import sysconfig
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .. import PACKAGE
from .devices import output_of
from .table import write_atomically

# Folders of the standard library and of installed packages. What is imported from elsewhere belongs to the program.
INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def own_files(program: Path) -> list[Path]:
    """Return the program's file and all that it imports, directly or not, that is ours or the user's own.

    The package is ours wherever it is; of all else, the standard library and what is installed does not count.
    """
    files = [program.resolve()]
    for file in files:  # which grows meanwhile
        for name in sorted(imported_names(file)):
            found = file_of_module(name, file.parent)
            if found and found not in files:
                files.append(found)
    return files


def imported_names(file: Path) -> Iterator[str]:
    """Yield the absolute names of what a file imports: of `from a import b` both a and a.b, which may be a module."""
    package = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]) if is_ours(file) else ""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_ours(file: Path) -> bool:
    return PACKAGE in file.parents


@cache
def file_of_module(name: str, folder: Path) -> Path | None:
    """Return the file of a module that a program in `folder` imports; None if it is not ours, or is no module."""
    beside = folder.joinpath(*name.split("."))
    if name.partition(".")[0] == PACKAGE.name:
        beside = PACKAGE.parent.joinpath(*name.split("."))
    for file in (beside.with_suffix(".py"), beside / "__init__.py"):
        if file.is_file():
            return file.resolve()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a.b, where a is a module, or not there
        return None
    if not spec or not spec.has_location or not spec.origin:
        return None
    origin = Path(spec.origin).resolve()
    return origin if origin.suffix == ".py" and not INSTALLED & set(origin.parents) else None


def digest(program: Path) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the texts of the program and of all that it imports."""
    total = hashlib.sha256()
    for file in sorted(own_files(program), key=lambda file: file.name):
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()[:12]


def git(*words: str) -> str:
    """Return what git says about the checkout of this code, not about a repository around it."""
    return output_of("git", f"--git-dir={PACKAGE.parent / '.git'}", f"--work-tree={PACKAGE.parent}", *words)


@cache
def commit() -> str:
    """Return the commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    return git("describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def store(program: Path, folder: Path, code: str) -> None:
    """Write the program's text to source-CODE.py; and what it imports to source-CODE.zip, if no commit holds that.

    `code` is the program's digest. Raise OSError.
    """
    text = folder / f"source-{code}.py"
    if not text.exists():
        with write_atomically(text) as unfinished:
            unfinished.write_bytes(program.read_bytes())
    others = own_files(program)[1:]
    if commit() != "unknown" and not git("status", "--porcelain", "--", str(PACKAGE)):
        others = [file for file in others if not is_ours(file)]
    archive = text.with_suffix(".zip")
    if others and not archive.exists():
        with write_atomically(archive) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
            for file in others:
                zipped.write(file, file.relative_to(PACKAGE.parent) if is_ours(file) else file.name)
