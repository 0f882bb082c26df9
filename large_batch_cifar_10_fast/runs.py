"""The digest of the code that decides the weights, the commit that holds it, and its stored source.

The tables of a campaign are in core/table.py.
"""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

from . import PACKAGE
from .core.source import commit, git
from .core.table import (
    COLUMNS,
    CONDITIONS,
    EPOCHS,
    GOAL,
    NUMBERS,
    PARTS,
    PLACE,
    Row,
    append,
    campaign_named,
    check_conditions,
    differences,
    diverged,
    environment,
    from_pairs,
    reached_goal,
    read,
    warn_once,
    write_atomically,
    write_timing_log,
)

__all__ = [
    "COLUMNS",
    "CONDITIONS",
    "EPOCHS",
    "GOAL",
    "NUMBERS",
    "PARTS",
    "PLACE",
    "Row",
    "append",
    "campaign_named",
    "check_conditions",
    "commit",
    "differences",
    "diverged",
    "environment",
    "from_pairs",
    "reached_goal",
    "read",
    "warn_once",
    "write_timing_log",
]

# The files that decide the weights, beside those of the recipe.
DECIDING = (
    *("train.py", "recipe.py", "data/*.py", "layers.py", "optim.py", "compiling.py", "devices.py"),
    *("distributed.py", "evaluate.py"),
)


def code_digest(recipe: object) -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the source files that decide the weights of this recipe."""
    files, modules = {path for part in DECIDING for path in PACKAGE.glob(part)}, [type(recipe).__module__]
    total = hashlib.sha256()
    for module in modules:  # the recipe's own, and the recipes that it imports from
        if (file := file_of(module)).is_file():
            files.add(file)
        else:  # defined in a notebook: its source is not known, so it equals no other
            total.update(f"{os.getpid()} {id(type(recipe))}".encode())
        used = {str(getattr(value, "__module__", "")) for value in vars(sys.modules[module]).values()}
        modules += [name for name in sorted(used) if ".recipes." in name and name not in modules]
    for path in sorted(files):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:12]


def file_of(module: str) -> Path:
    return Path(str(getattr(sys.modules[module], "__file__", "")))


def store_source(folder: Path, recipe: object, digest: str) -> None:
    """Store the package and the recipe's file once, as source-DIGEST.zip, if no commit holds them. Raise OSError."""
    path, own = folder / f"source-{digest}.zip", file_of(type(recipe).__module__)
    outside = own.is_file() and PACKAGE not in own.parents
    if path.exists() or not (outside or git("status", "--porcelain", "--", str(PACKAGE))):
        return
    with write_atomically(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in PACKAGE.rglob("*.py"):
            archive.write(file, file.relative_to(PACKAGE.parent))
        if outside:
            archive.write(own, own.name)
