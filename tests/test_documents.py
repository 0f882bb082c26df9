"""Documents: links and citations lead somewhere, and the notebook's cells run."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

DOCUMENTS = [path for path in REPO.rglob("*.md") if not {".venv", ".git", "data"} & set(path.parts)]
CODE = list(REPO.glob("large_batch_cifar_10_fast/**/*.py"))
WHY = REPO / "docs" / "why_it_is_fast.md"
NOTEBOOK = REPO / "notebook" / "why_it_is_fast.ipynb"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)", document.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading():
    links = [(path, link) for path in DOCUMENTS for link in re.findall(r"\]\(([^)\s]+)", path.read_text())]
    relative = [(path, *link.partition("#")[::2]) for path, link in links if "://" not in link]
    assert len(relative) > 40
    assert [(path.name, link) for path, link, _ in relative if not (path.parent / link).exists()] == []
    targets = [(path.parent / link if link else path, anchor) for path, link, anchor in relative if anchor]
    assert len(targets) > 20
    assert [(path.name, anchor) for path, anchor in targets if anchor not in anchors(path)] == []


def test_every_citation_in_the_programs_leads_to_a_heading():
    cited = [each for path in CODE for each in re.findall(r"(docs/\w+\.md)(?:#([\w-]+))?", path.read_text())]
    assert len({anchor for _, anchor in cited if anchor}) >= 10
    lost = [each for each in cited if not (REPO / each[0]).exists() or each[1] not in {"", *anchors(REPO / each[0])}]
    assert lost == []


def test_every_section_that_a_program_has_is_one_of_the_method():
    sections = {heading.partition("-")[0] for heading in anchors(REPO / "docs" / "method.md")}
    cited = re.findall(r"section (\d)", (REPO / "large_batch_cifar_10_fast" / "apple2019.py").read_text())
    assert len(cited) >= 5
    assert set(cited) <= sections


def test_every_function_that_the_page_names_exists():
    """They are written as `program.function`."""
    names = re.findall(r"`(apple2019|muon|page|fastai|layers|optim|data)\.(\w+)`", WHY.read_text())
    assert len(names) >= 15
    for module, name in names:
        (file,) = [path for path in CODE if path.stem == module]
        defined = ast.parse(file.read_text()).body
        assert name in {each.name for each in defined if isinstance(each, ast.FunctionDef | ast.ClassDef)}, name


def test_every_picture_of_the_page_is_a_cell_of_the_notebook():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    tags = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    shown = re.findall(r"\]\(why_it_is_fast/(\w+)\.png\)", WHY.read_text())
    assert sorted(shown) == sorted(tags)
    stored = [cell for cell in cells if any("data" in output for output in cell.get("outputs", []))]
    assert len(stored) == len(tags)


def test_the_page_is_short():
    assert len(WHY.read_text().split()) <= 1200


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path):
    """On the demo's images, at small sizes."""
    command = [sys.executable, NOTEBOOK.with_suffix(".py"), "--notebook", tmp_path / "n.ipynb", "--pictures", tmp_path]
    environment = {name: value for name, value in os.environ.items() if name != "CIFAR10_NPZ"}
    environment |= {"WIDTH": "8", "EPOCHS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=600)
    cells = json.loads((tmp_path / "n.ipynb").read_text())["cells"]
    tags = {tag for cell in cells for tag in cell["metadata"].get("tags", [])}
    assert len(tags) == 10
    assert {path.stem for path in tmp_path.glob("*.png")} == tags
    assert all((tmp_path / f"{tag}.png").stat().st_size > 5000 for tag in tags)
    (tricks,) = [cell for cell in cells if cell["metadata"].get("tags") == ["tricks"]]
    effects = re.findall(r": (\S+ \[.*\])", "".join(tricks["outputs"][0]["text"]))
    assert len(effects) == 10
    assert [effect for effect in effects if effect not in WHY.read_text()] == []  # the page has what its logs say
