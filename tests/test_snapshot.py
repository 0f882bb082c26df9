"""What runs is what is kept: a campaign's code is a copy, whatever is edited meanwhile. And the fields of a program."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, python, run_here

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api
from large_batch_cifar_10_fast.lab import snapshot
from large_batch_cifar_10_fast.lab.program import load_program

pytestmark = pytest.mark.slow

FILES = {"muon.py", "core/graphs.py", "published/entries/a.tsv"}  # of a package, in all places that are copied


def tiny_program(folder: Path, begin: str = "", **edits: str) -> Path:
    """Write a copy of tests/tiny.py with lines at its beginning, and texts replaced."""
    text = begin + (REPO / "tests" / "tiny.py").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


@pytest.fixture
def given(tiny_npz, tmp_path) -> list[object]:
    """Return the words of a command that trains mine.py."""
    small = ["--recipe", tmp_path / "mine.py", "--epochs", 1, "--batch_size", 40, "--precision", "fp32"]
    return [*small, "--campaign", "night", "--data", tiny_npz, "--out", tmp_path / "out"]


def write_empty(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


# ---- Copies


def test_edits_during_a_campaign_have_no_effect_and_resume_continues_with_its_copy(given, tmp_path):
    """Also a syntax error in the checkout."""
    checkout = tmp_path / "checkout"
    package = shutil.copytree(PACKAGE, checkout / PACKAGE.name)
    (tmp_path / "helper.py").write_text("RATE = 0.02\n")
    mine = tiny_program(tmp_path, begin="from helper import RATE\n", **{"lr=0.02": "lr=RATE"})
    how = {"cwd": tmp_path, "PYTHONPATH": checkout, "OMP_NUM_THREADS": 1}
    train = ["-m", PACKAGE.name, "train", *given, "--nproc", 1]
    result = python(*train, **how)
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "helper.py").write_text("RATE = 0.04\n")
    (package / "core" / "optim.py").write_text("x = (\n")
    result = python(*train, "--runs", 2, **how)
    assert result.returncode == 2
    assert result.stderr.startswith("train: helper.py was changed since campaign night began, and differs from ")
    mine.write_text("x = (\n")
    result = python("-m", PACKAGE.name, "train", "--resume", "--out", "out", "--runs", 2, **how)
    assert (result.returncode, result.stderr) == (0, "")
    code, same = pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")["code"]
    assert code == same


def test_launches_that_begin_a_campaign_at_once_share_one_copy(tmp_path):
    place = snapshot.Place(tmp_path / "out", "night", str(tiny_program(tmp_path)))
    with ThreadPoolExecutor(8) as pool:
        (source,) = {*pool.map(snapshot.keep, 8 * [place])}
    names = {str(path.relative_to(place.out)) for path in place.out.glob("*/*/*")}
    kept = {place.folder / "source", source / "commit", source / PACKAGE.name, place.program}
    assert names == {str(path.relative_to(place.out)) for path in kept}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Return a small stand-in for this package."""
    folder = tmp_path / "package"
    write_empty(folder, *FILES)
    monkeypatch.setattr(snapshot, "PACKAGE", folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_mistake_before_the_first_run_can_be_corrected_and_the_same_command_works(given, tmp_path):
    """So the copy is made anew until a run is finished."""
    tiny_program(tmp_path, **{"def run(seed):": "def run(seed):\n        1 / 0"})
    with pytest.raises(ZeroDivisionError):
        run_here(*given)
    text = tiny_program(tmp_path).read_bytes()
    run_here(*given)
    assert snapshot.Place(tmp_path / "out", "night", "mine.py").program.read_bytes() == text


def test_resume_continues_the_campaign_that_was_begun_last_though_it_has_no_run(tmp_path):
    for name in ("a", "b"):
        snapshot.keep(snapshot.Place(tmp_path, name, "muon"))
    write_empty(tmp_path, "runs/a/0000.json")
    assert snapshot.place_of(["--resume", "--out", str(tmp_path)]).campaign == "b"


def test_a_copy_has_the_modules_and_packages_of_the_folder_and_nothing_else(tmp_path):
    mine = tiny_program(tmp_path)
    ours = {"helper.py", "lib/__init__.py", "lib/deep/act.py"}
    write_empty(tmp_path, *ours, "notes.txt", ".venv/lib/thing.py", "data/notes.py", "elsewhere/more.py")
    (tmp_path / "elsewhere" / "other.py").symlink_to(mine)
    assert {*snapshot.texts_of_folder(mine)} == ours | {"mine.py"}
    assert {*snapshot.texts_of_folder(tmp_path / "elsewhere" / "other.py")} == ours | {"mine.py", "other.py"}


def test_helpers_of_one_name_are_each_programs_own_and_hide_no_other_module(tmp_path):
    found = set()
    for folder in ("a", "b", "a"):
        mine = tiny_program(tmp_path / folder, begin="from common import WHOSE\nimport random\n")
        (tmp_path / folder / "common.py").write_text(f"WHOSE = '{folder}'\n")
        write_empty(tmp_path / folder, "random.py")
        program = load_program(str(mine))
        assert folder == program.WHOSE
        assert program.random.random() < 1
        found.add(snapshot.digests(program)["code"])
    assert len(found) == 2


# ---- The fields of a Hyp

FIELDS = {  # of a Hyp: a line of it, an option, and the value that this gives
    "choice: Literal[1, 2] = 1": ("--choice=2", 2),
    "rate: Literal[0.1, 0.2] = 0.1": ("--rate=2e-1", 0.2),
    "names: tuple[str, ...] = ('a', 'b')": ("--names=v1.0,x", ("v1.0", "x")),
    "sizes: tuple[float, ...] = (1.0,)": ("--sizes=1,0.5", (1.0, 0.5)),
}


def with_fields(folder: Path, *lines: str) -> Path:
    added = "".join(f"    {line}  # help\n" for line in lines)
    return tiny_program(folder, **{"    epochs: int": f"{added}    epochs: int"})


def test_fields_of_these_kinds_are_options_and_are_read_again_from_weights(given, tmp_path):
    mine = with_fields(tmp_path, *FIELDS)
    given += ["--save", tmp_path / "w.pt", *(option for option, _ in FIELDS.values())]
    run_here(*given)
    hyp = api.load(tmp_path / "w.pt", program=mine).hyp
    for line, (_, value) in FIELDS.items():
        assert getattr(hyp, line.partition(":")[0]) == value
    for wrong in ("--choice=3", "--rate=0.3", "--sizes=a"):
        with pytest.raises(ConfigError):
            run_here(*given, wrong)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("widths: list[int] = None", r"Hyp.widths has the type list\[int\]: use int, float"),
        ("seed: int = 0", "argument --seed: conflicting option string"),
        ("def fit_for(self, images): pass", "Hyp.fit_for is no field, and BaseHyp has no such name"),
    ],
)
def test_a_wrong_line_in_a_program_is_one_error_when_it_is_loaded(line, message, tmp_path):
    """A misspelt hook, for example, would otherwise do nothing."""
    mine = with_fields(tmp_path, line)
    with pytest.raises(ConfigError, match=rf"^--recipe {mine} cannot be used \([^\n]*({message})"):
        load_program(str(mine))
