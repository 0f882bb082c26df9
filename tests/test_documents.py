"""Documents: links, citations and commands lead somewhere, and the notebook's cells run."""

import ast
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
from large_batch_cifar_10_fast.lab.table import EPOCHS

DOCUMENTS = [path for path in REPO.rglob("*.md") if not {".venv", ".git", "data"} & set(path.parts)]
CODE = list(REPO.glob("large_batch_cifar_10_fast/**/*.py"))
RUNNING = REPO / "docs" / "running.md"
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
    for path in CODE:
        found += [(REPO / cited, anchor) for cited, anchor in re.findall(r"(docs/\w+\.md)#?([\w-]*)", path.read_text())]
    assert len(found) > 60
    assert [path for path, _ in found if not path.exists()] == []
    assert [(path, anchor) for path, anchor in found if anchor and anchor not in anchors(path)] == []


def test_every_command_in_the_documents_exists():
    documents = [REPO / "README.md", *REPO.glob("docs/*.md")]
    text = "".join(path.read_text() for path in documents)
    started = {*re.findall(r"(?:-m large_batch_cifar_10_fast|cifar10-fast)([ .][a-z]\w+)", text)}
    assert len(started) > 5
    assert started <= {f" {command}" for command in COMMANDS} | {f".{module}" for module in PROGRAMS.values()}


def test_every_function_that_the_page_names_exists():
    """They are written as `program.function`."""
    names = re.findall(r"`(apple2019|muon|page|fastai|layers|optim|data)\.(\w+)`", WHY.read_text())
    assert len(names) >= 15
    for module, name in names:
        (file,) = [path for path in CODE if path.stem == module]
        defined = ast.parse(file.read_text()).body
        assert name in {each.name for each in defined if isinstance(each, ast.FunctionDef | ast.ClassDef)}, name


def test_the_results_have_the_campaigns_and_runs_that_their_page_states():
    """A row's number of runs is one for all of its campaigns, or one for each."""
    stated: dict[str, int] = {}
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


def run_block(word: str) -> None:
    """Run the Python program in docs/running.md that has a word."""
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", RUNNING.read_text(), re.DOTALL) if word in each]
    exec(block, {})


@pytest.fixture
def epochs(tmp_path, monkeypatch) -> pd.DataFrame:
    """Write an epochs.tsv of two runs to the current folder."""
    monkeypatch.chdir(tmp_path)
    rows = [("night", run, epoch, *[0.1 * run + epoch] * 5, "first") for run in range(2) for epoch in (1, 2)]
    table = pd.DataFrame(rows, columns=[*EPOCHS])
    table.to_csv("epochs.tsv", sep="\t", index=False)
    return table


def test_the_lines_for_tensorboard_write_its_curves(epochs):
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_block("SummaryWriter")
    curves = EventAccumulator("curves/night/1").Reload()
    for name in ("loss", "accuracy"):
        points = [(point.step, point.value) for point in curves.Scalars(name)]
        assert points == [(1, pytest.approx(1.1)), (2, pytest.approx(2.1))]


@pytest.mark.slow
def test_the_lines_for_weights_and_biases_log_each_run(epochs, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = wandb.Run.log
    logged = []

    def log_and_remember(run, row, step):
        log(run, row, step=step)
        logged.append((run.group, int(run.name), step, row["validation_accuracy"]))

    monkeypatch.setattr(wandb.Run, "log", log_and_remember)
    run_block("wandb.init")
    assert logged == [*epochs[["campaign", "run", "epoch", "validation_accuracy"]].itertuples(index=False, name=None)]


@pytest.mark.slow
def test_the_pictures_of_the_page_are_cells_of_the_notebook_which_run(tmp_path, monkeypatch):
    """At small sizes."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    tags = {tag for cell in cells for tag in cell["metadata"].get("tags", [])}
    assert {*re.findall(r"\]\(why_it_is_fast/(\w+)\.png\)", WHY.read_text())} == tags
    few = write_npz(tmp_path / "few.npz", *draw_shapes(2048, 100))
    for name, value in (("WIDTH", "4"), ("EPOCHS", "1"), ("CIFAR10_NPZ", str(few))):
        monkeypatch.setenv(name, value)
    program = NOTEBOOK.with_suffix(".py")
    words = [program, "--notebook", tmp_path / "n.ipynb", "--pictures", tmp_path, "--only", *tags]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context():
        runpy.run_path(str(program), run_name="__main__")
    assert {path.stem for path in tmp_path.glob("*.png")} == tags
    cells = json.loads((tmp_path / "n.ipynb").read_text())["cells"]
    (tricks,) = [cell for cell in cells if cell["metadata"].get("tags") == ["tricks"]]
    effects = re.findall(r": (\S+ \[.*\])", "".join(tricks["outputs"][0]["text"]))
    assert len(effects) == 10
    assert [effect for effect in effects if effect not in WHY.read_text()] == []  # the page has what the runs say


def test_the_patches_of_the_notebook_can_be_applied():
    patches = [*REPO.glob("notebook/patches/*.patch")]
    assert patches
    for patch in patches:
        subprocess.run(["git", "apply", "--check", patch], cwd=REPO, check=True)
