"""The text of what runs: a digest over it, and a copy beside each campaign's tables."""

import difflib
import hashlib
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from .. import PACKAGE
from ..core.devices import output_of
from ..core.team import warn
from ..files import write_atomically
from ..loading import TEXTS, decode, files_of, name_of_ours


def texts_of(program: ModuleType) -> dict[str, bytes]:
    """Return the texts that decide a program's results, by file name, as they were loaded. The program's own is first.

    Then come the modules of its folder and our programs, if it imports them, and the modules of core/ and images/.
    """
    files = dict(files_of(program))
    for folder in ("core", "images"):
        files |= {name_of_ours(file): file for file in sorted((PACKAGE / folder).glob("*.py"))}
    return {name: TEXTS[file] if file in TEXTS else file.read_bytes() for name, file in files.items()}


def digest(program: ModuleType) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the texts that decide a program's results."""
    total = hashlib.sha256()
    for name, text in sorted(texts_of(program).items()):
        total.update(name.encode())
        total.update(hashlib.sha256(text).digest())
    return total.hexdigest()[:12]


MOST_LINES = 40  # of texts that differ


def changed_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the lines in which two texts differ, with - before old and + before new ones; of many the first."""
    changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]  # after two lines of names
    lines = [f"  {line[0]} {line[1:]}".rstrip() for line in changes if not line.startswith("@@")]
    more = len(lines) - MOST_LINES
    if more > 0:
        lines[MOST_LINES:] = [f"  ... and {more} more lines"]
    return lines


def changed_since(program: ModuleType, folder: Path, code: str) -> tuple[str, list[str]]:
    """Return which file of a program was changed since `store` wrote this digest, and its changed lines.

    What a commit holds was not stored: then the file is "core/", without lines.
    """
    texts = texts_of(program)
    own = next(iter(texts))
    text = folder / f"source-{code}.py"
    archive = text.with_suffix(".zip")
    stored = {own: text.read_bytes()} if text.exists() else {}
    if archive.exists():
        with zipfile.ZipFile(archive) as zipped:
            stored |= {name: zipped.read(name) for name in zipped.namelist() if name in texts}
    for name, old in stored.items():
        if texts[name] != old:
            return Path(name).name, changed_lines(decode(old).splitlines(), decode(texts[name]).splitlines())
    return "core/", []


def git(*words: str) -> str:
    """Return what git says about the checkout of this code, not about a repository around it."""
    return output_of("git", f"--git-dir={PACKAGE.parent / '.git'}", f"--work-tree={PACKAGE.parent}", *words)


@cache
def commit() -> str:
    """Return the commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    return git("describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def store(program: ModuleType, folder: Path, code: str) -> None:
    """Write the program's text to source-CODE.py; and the others to source-CODE.zip, if no commit holds them.

    All are as they were loaded: warn of files that were changed since. `code` is the digest. Raise OSError.
    """
    texts = texts_of(program)
    own = next(iter(texts))
    for name, file in (files_of(program) | {name_of_ours(file): file for file in TEXTS}).items():
        if name in texts and not (file.exists() and file.read_bytes() == texts[name]):
            warn(f"{name} was changed after it was loaded: the text that was loaded runs, and is stored")
    path = folder / f"source-{code}.py"
    if not path.exists():
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(texts[own])
    others = [name for name in texts if name != own]
    if commit() != "unknown" and not git("status", "--porcelain", "--", str(PACKAGE)):
        others = [name for name in others if not name.startswith(f"{PACKAGE.name}/")]
    archive = path.with_suffix(".zip")
    if others and not archive.exists():
        with write_atomically(archive) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name in others:
                zipped.writestr(name, texts[name])
