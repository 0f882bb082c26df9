"""The size of the code has a budget, which only goes down.

Code is counted without docstrings, comments and layout, so they cost nothing, and packing statements gains nothing.
"""

import ast
from pathlib import Path

import pytest
from conftest import REPO

from large_batch_cifar_10_fast import PROGRAMS as RECIPES

PACKAGE = REPO / "large_batch_cifar_10_fast"
PROGRAMS = {PACKAGE / f"{name}.py" for name in RECIPES.values()}
FILES = {
    "programs": PROGRAMS,
    "core": [*PACKAGE.glob("core/*.py")],
    "images": [*PACKAGE.glob("images/*.py")],
    "lab and top level": [
        *PACKAGE.glob("commands/*.py"),
        *PACKAGE.glob("lab/*.py"),
        *(file for file in PACKAGE.glob("*.py") if file not in PROGRAMS),
    ],
    "tests": [*REPO.glob("tests/*.py")],
}
BUDGET = {"programs": 42_630, "core": 49_880, "images": 13_500, "lab and top level": 87_830, "tests": 184_110}


def count_code(file: Path) -> int:
    """Return the characters of a file's statements, as Python prints them, without docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        if has_docstring:
            node.body = node.body[1:] or [ast.Pass()]
    return len(ast.unparse(tree))


@pytest.mark.parametrize("part", BUDGET)
def test_the_code_of_a_part_stays_within_its_budget(part):
    size = sum(map(count_code, FILES[part]))
    assert size <= BUDGET[part], (
        f"{part} has {size} characters of code, and its budget is {BUDGET[part]}. A new guard names the one that it "
        "replaces, or becomes a sentence in a document. The numbers are never raised."
    )


def test_all_files_of_the_package_are_counted():
    counted = {file for name in BUDGET if name != "tests" for file in FILES[name]}
    assert counted == {*PACKAGE.rglob("*.py")}
