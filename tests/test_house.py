"""Imports point one way, down these levels."""

import ast
from pathlib import Path

from large_batch_cifar_10_fast.settings.settings import PACKAGE

LEVELS = (
    *(("settings",), ("training",), ("data",), ("recipes", "results"), ("merge", "stats"), ("read_logs",), ("plot",)),
    *(("request",), ("train",)),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}  # a command that is none: above all


def rooms_imported(path: Path) -> set[str]:
    """Of this package: the folders, and the files at its top, that a file asks for."""
    inside = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level or not node.module.startswith(PACKAGE.name), f"{path}: from . import, not by name"
        if isinstance(node, ast.ImportFrom) and node.level:
            place = [*inside[: len(inside) + 1 - node.level], *(node.module or "").split(".")]
            found |= {place[0]} if place[0] else {alias.name for alias in node.names}
    return found - {"__version__"}


def test_imports_point_down_the_levels_and_never_back():
    for path in PACKAGE.rglob("*.py"):
        here, *_ = path.relative_to(PACKAGE).with_suffix("").parts
        for there in rooms_imported(path) - {here}:
            assert LEVEL[there] < LEVEL.get(here, len(LEVELS)), f"{path} imports {there}"


def test_within_a_folder_no_import_leads_back():
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir()):
        graph = {}
        for path in folder.glob("*.py"):
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.level == 1]
            graph[path.stem] = {name for n in nodes for name in ([n.module] if n.module else [a.name for a in n.names])}
        while leaves := [name for name, asked in graph.items() if not asked & graph.keys()]:
            graph = {name: asked for name, asked in graph.items() if name not in leaves}
        assert not graph, f"{folder}: {graph}"
