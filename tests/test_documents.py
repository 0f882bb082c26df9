"""Documents: links, citations and commands lead somewhere, and the notebook's cells run."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from conftest import REPO, write_npz

from large_batch_cifar_10_fast.__main__ import COMMANDS
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.options import PROGRAMS

DOCUMENTS = [path for path in REPO.rglob("*.md") if not {".venv", ".git", "data"} & set(path.parts)]
CODE = "".join(path.read_text() for path in REPO.glob("large_batch_cifar_10_fast/**/*.py"))
WHY = REPO / "docs" / "why_it_is_fast.md"
RESULTS = REPO / "results" / "README.md"
NOTEBOOK = REPO / "notebook" / "why_it_is_fast.ipynb"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)", document.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_and_citation_leads_to_a_file_and_a_heading():
    found = []
    for path in DOCUMENTS:
        links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", path.read_text())
        found += [(path.parent / link if link else path, anchor) for link, anchor in links if "://" not in link]
    for cited, anchor in re.findall(r"(docs/\w+\.md)#?([\w-]*)", CODE):
        found.append((REPO / cited, anchor))
    assert len(found) > 60
    for path, anchor in found:
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), (path, anchor)


def test_every_command_in_the_documents_exists():
    text = "".join(path.read_text() for path in [REPO / "README.md", *REPO.glob("docs/*.md")])
    started = {*re.findall(r"(?:-m large_batch_cifar_10_fast|cifar10-fast)([ .][a-z]\w+)", text)}
    assert len(started) > 5
    assert started <= {f" {command}" for command in COMMANDS} | {f".{module}" for module in PROGRAMS.values()}


def test_the_results_have_the_campaigns_and_runs_that_their_page_states():
    """A row's number of runs is one for all of its campaigns, or one for each."""
    stated = {}
    for row in re.findall(r"(?m)^\| `.*", RESULTS.read_text()):
        campaigns, _, _, _, _, n, _ = row.split(" | ")
        names = re.findall(r"`([^`]+)`", campaigns)
        counts = [int(count) for count in n.split(", ")]
        stated |= zip(names, counts * len(names) if len(counts) == 1 else counts, strict=True)
    runs = pd.read_csv(RESULTS.with_name("runs.tsv"), sep="\t", quoting=3)
    assert stated == runs["campaign"].value_counts().to_dict()
    texts = "".join(path.read_text() for path in DOCUMENTS)
    named = {*re.findall(r"`((?:apple2019|muon|muon2024|page|basenet|fastai)-[\w.-]+-(?:h200|copies)[\w-]*)`", texts)}
    assert len(named) > 50
    assert named <= {*stated}


def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text())["cells"]


@pytest.mark.slow
def test_the_pictures_of_the_page_are_cells_of_the_notebook_which_run(tmp_path, monkeypatch):
    """At small sizes."""
    tags = {tag for cell in cells_of(NOTEBOOK) for tag in cell["metadata"].get("tags", [])}
    assert {*re.findall(r"\]\(why_it_is_fast/(\w+)\.png\)", WHY.read_text())} == tags
    few = write_npz(tmp_path / "few.npz", *draw_shapes(2048, 100))
    for name, value in (("WIDTH", "4"), ("EPOCHS", "1"), ("CIFAR10_NPZ", str(few))):
        monkeypatch.setenv(name, value)
    program = str(NOTEBOOK.with_suffix(".py"))
    made = tmp_path / "n.ipynb"
    monkeypatch.setattr(sys, "argv", [program, "--notebook", str(made), "--pictures", str(tmp_path), "--only", *tags])
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context():
        runpy.run_path(program, run_name="__main__")
    assert {path.stem for path in tmp_path.glob("*.png")} == tags
    (tricks,) = [cell for cell in cells_of(made) if cell["metadata"].get("tags") == ["tricks"]]
    effects = re.findall(r": (\S+ \[.*\])", "".join(tricks["outputs"][0]["text"]))
    assert len(effects) == 10
    assert [effect for effect in effects if effect not in WHY.read_text()] == []  # the page has what the runs say


def test_the_patches_of_the_notebook_can_be_applied():
    patches = [*REPO.glob("notebook/patches/*.patch")]
    assert patches
    for patch in patches:
        subprocess.run(["git", "apply", "--check", patch], cwd=REPO, check=True)
