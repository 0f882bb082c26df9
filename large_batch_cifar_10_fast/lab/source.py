"""The text of the code that runs: its digests, and a copy beside each campaign's tables."""

import difflib
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .. import PACKAGE, ConfigError, commit, git
from ..core.team import show, warn
from ..files import write_atomically
from ..loading import TEXTS, decode, files_of, name_of_ours


def texts_of(program: ModuleType) -> dict[str, bytes]:
    """Return the text of a program, of the modules of its folder and of our programs that it imports, by file name.

    All are as they were loaded. The program's own is first.
    """
    return {name: loaded_text(file) for name, file in files_of(program).items()}


def core_texts() -> dict[str, bytes]:
    """Return the texts of core/ and images/, which all programs use, as they were loaded."""
    files = [file for folder in ("core", "images") for file in sorted((PACKAGE / folder).glob("*.py"))]
    return {name_of_ours(file): loaded_text(file) for file in files}


def loaded_text(file: Path) -> bytes:
    return TEXTS[file] if file in TEXTS else file.read_bytes()


def digest(texts: Mapping[str, bytes]) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over texts and their names."""
    total = hashlib.sha256()
    for name, text in sorted(texts.items()):
        total.update(name.encode())
        total.update(hashlib.sha256(text).digest())
    return total.hexdigest()[:12]


def digests(program: ModuleType) -> dict[str, str]:
    """Return the digests `code`, of a program and its imports, and `core`, of core/ and images/."""
    return {"code": digest(texts_of(program)), "core": digest(core_texts())}


MOST_LINES = 40  # of texts that differ


def changed_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the first MOST_LINES lines that differ, with - before old and + before new ones."""
    changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]  # after two lines of names
    lines = [f"  {line[0]} {line[1:]}".rstrip() for line in changes if not line.startswith("@@")]
    more = len(lines) - MOST_LINES
    if more > 0:
        lines[MOST_LINES:] = [f"  ... and {more} more lines"]
    return lines


def changed_since(program: ModuleType, folder: Path, was: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return which file was changed since `store` wrote the texts of these `digests`, and its changed lines.

    Texts in a commit are not stored: then return "core/ or images/", or "what PROGRAM imports", without lines.
    """
    texts = texts_of(program)
    own = next(iter(texts))
    stored: dict[str, bytes] = {}
    code = was.get("code", "")
    if code != digest(texts):
        path = folder / f"source-{code}.py"
        stored = {own: path.read_bytes()} if path.exists() else {}
        stored |= read_archive(path.with_suffix(".zip"))
        unknown = f"what {Path(own).name} imports" if stored.get(own) == texts[own] else Path(own).name
    else:
        texts = core_texts()
        stored = read_archive(folder / f"core-{was.get('core', '')}.zip")
        unknown = "core/ or images/"
    for name, old in stored.items():
        new = texts.get(name, b"")
        if new != old:
            return Path(name).name, changed_lines(decode(old).splitlines(), decode(new).splitlines())
    return unknown, []


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the files of an archive that `store` wrote, by name; none if it is not there."""
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def refuse_change(program: ModuleType, folder: Path, row: Mapping[str, str], advice: str) -> NoReturn:
    """Show which lines of a program, core/ or images/ were changed since a campaign made a row. Raise ConfigError."""
    file, lines = changed_since(program, folder, row)
    for line in lines:
        show(line)
    above = ", as above" if lines else ""
    was = row.get("commit", "unknown")
    undo = "undo that"
    if was not in ("", "unknown", commit()) and not was.endswith("-dirty"):
        undo = f"go back to its commit (git checkout {was})"
    raise ConfigError(f"{file} was changed since campaign {row['campaign']} began{above}: {undo}, or {advice}")


def store(program: ModuleType, folder: Path) -> None:
    """Write the program's text to source-CODE.py, and other texts that no commit holds to archives. Raise OSError.

    source-CODE.zip has the program's imports, core-CORE.zip has core/ and images/. CODE and CORE are `digests`. Warn of
    files that were changed after they were loaded.
    """
    texts = texts_of(program)
    core = core_texts()
    names = digests(program)
    for name, file in (files_of(program) | {name_of_ours(file): file for file in TEXTS}).items():
        if name in texts | core and not (file.exists() and file.read_bytes() == loaded_text(file)):
            warn(f"{name} was changed after it was loaded: the loaded text runs and is stored")
    own = next(iter(texts))
    path = folder / f"source-{names['code']}.py"
    if not path.exists():
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(texts[own])
    committed = commit() != "unknown" and not git("status", "--porcelain", "--", str(PACKAGE))
    others = {name: text for name, text in texts.items() if name != own}
    if committed:
        others = {name: text for name, text in others.items() if not name.startswith(f"{PACKAGE.name}/")}
        core = {}
    write_archive(path.with_suffix(".zip"), others)
    write_archive(folder / f"core-{names['core']}.zip", core)


def write_archive(path: Path, texts: Mapping[str, bytes]) -> None:
    """Write texts to an archive, unless there are none, or it is there."""
    if texts and not path.exists():
        with write_atomically(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
