"""The text of a program: what it imports, a digest over all of it, and a copy beside each campaign's tables."""

import ast
import difflib
import hashlib
import importlib.util
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from .. import PACKAGE
from .devices import output_of
from .files import write_atomically

STANDARD = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
PACKAGES = {"site-packages", "dist-packages"}  # folders of what is installed


def own_files(program: Path) -> list[Path]:
    """Return the program's file and all that it imports, directly or not, that is ours or the user's own.

    What is imported belongs to the program, unless it is of the standard library or installed.
    """
    root = program.resolve().parent
    files = [program.resolve()]
    for file in files:  # which grows meanwhile
        if file.suffix != ".py":  # compiled
            continue
        for folder, name in imports(file):
            for module in with_packages(name):
                found = file_beside(folder, module) if folder else file_of_module(root, module)
                if found and found not in files:
                    files.append(found)
    return files


def imports(file: Path) -> Iterator[tuple[Path | None, str]]:
    """Yield the names of what a file imports: of `from a import b` a.b, which may be a module.

    A name with dots before it is looked for in a folder, all others (None) as Python does.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else None
            yield from ((folder, f"{node.module or ''}.{alias.name}".lstrip(".")) for alias in node.names)


def with_packages(name: str) -> list[str]:
    """Return a.b.c and the packages around it, a and a.b, which are run when it is imported."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def is_ours(file: Path) -> bool:
    return PACKAGE in file.parents


def file_beside(folder: Path, name: str) -> Path | None:
    """Return the file of a module or package in a folder; None if there is none."""
    path = folder.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.resolve()
    return None


@cache
def file_of_module(root: Path, name: str) -> Path | None:
    """Return the file of a module that a program in `root` imports; None if it is installed, or is no module."""
    if name.partition(".")[0] == PACKAGE.name:  # ours, wherever it is
        return file_beside(PACKAGE.parent, name)
    beside = file_beside(root, name)
    if beside:
        return beside
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a.b, where a is a module, or not there
        return None
    if not spec or not spec.has_location or not spec.origin:
        return None
    origin = Path(spec.origin).resolve()
    return None if STANDARD & set(origin.parents) or PACKAGES & set(origin.parts) else origin


def digest(program: Path) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the texts of the program and of all that it imports."""
    total = hashlib.sha256()
    root = program.resolve().parent
    for file in sorted(own_files(program), key=lambda file: name_of(file, root)):
        total.update(name_of(file, root).encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:12]


def name_of(file: Path, root: Path) -> str:
    """Return the name of a file of a program in `root`, which is the same wherever that is."""
    folder = PACKAGE.parent if is_ours(file) else root
    return str(file.relative_to(folder)) if folder in file.parents else f"{file.parent.name}/{file.name}"


MOST_LINES = 40  # of texts that differ


def changed_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the lines in which two texts differ, with - before old and + before new ones; of many the first."""
    changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]  # after two lines of names
    lines = [f"  {line[0]} {line[1:]}".rstrip() for line in changes if not line.startswith("@@")]
    more = len(lines) - MOST_LINES
    if more > 0:
        lines[MOST_LINES:] = [f"  ... and {more} more lines"]
    return lines


def changed_since(program: Path, folder: Path, code: str) -> tuple[str, list[str]]:
    """Return which file of a program was changed since `store` wrote this digest, and its changed lines.

    What a commit holds was not stored: then the file is "core/", without lines.
    """
    text = folder / f"source-{code}.py"
    archive = text.with_suffix(".zip")
    stored = {program.resolve(): text.read_bytes()} if text.exists() else {}
    if archive.exists():
        with zipfile.ZipFile(archive) as zipped:
            names = {name_of(file, program.resolve().parent): file for file in own_files(program)}
            stored |= {names[name]: zipped.read(name) for name in zipped.namelist() if name in names}
    for file, old in stored.items():
        new = file.read_bytes()
        if new != old:
            lines = (part.decode(errors="replace").splitlines() for part in (old, new))
            return file.name, changed_lines(*lines)
    return "core/", []


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
                zipped.write(file, name_of(file, program.resolve().parent))
