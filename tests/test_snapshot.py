"""What runs is what is kept: a campaign's code is a copy, whatever is edited meanwhile. And the fields of a program."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, python, run_here

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api
from large_batch_cifar_10_fast.lab import snapshot
from large_batch_cifar_10_fast.lab.program import load_program, run_program

pytestmark = pytest.mark.slow

TINY = ["--epochs", 1, "--batch_size", 40, "--precision", "fp32", "--campaign", "night"]


def tiny_program(folder: Path, name: str = "mine.py", begin: str = "", **edits: str) -> Path:
    """Write a copy of tests/tiny.py with lines at its beginning, and texts replaced."""
    text = begin + (REPO / "tests" / "tiny.py").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def words(tiny_npz, tmp_path, *more) -> list[str]:
    return [*map(str, (*TINY, "--data", tiny_npz, "--out", tmp_path / "out", *more))]


def codes(tmp_path) -> list[str]:
    return pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")["code"].tolist()


# ---- Copies


def test_edits_during_a_campaign_have_no_effect_and_resume_continues_with_its_copy(tiny_npz, tmp_path):
    """Also a syntax error in the checkout, which is read-only and reached by a link. `python FILE.py` begins."""
    checkout = tmp_path / "checkout"
    package = shutil.copytree(PACKAGE, checkout / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.sh"))
    (tmp_path / "link").symlink_to(checkout)
    (tmp_path / "helper.py").write_text("RATE = 0.02\n")
    mine = tiny_program(tmp_path, begin="from helper import RATE\n", **{"lr=0.02": "lr=RATE"})
    how = {"cwd": tmp_path, "PYTHONPATH": tmp_path / "link", "OMP_NUM_THREADS": 1}
    checkout.chmod(0o555)
    result = python(mine, *words(tiny_npz, tmp_path), **how)
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "helper.py").write_text("RATE = 0.04\n")
    (package / "core" / "optim.py").write_text("x = (\n")
    command = [
        "-m",
        PACKAGE.name,
        "train",
        "--recipe",
        "mine.py",
        *words(tiny_npz, tmp_path, "--runs", 2, "--nproc", 1),
    ]
    result = python(*command, **how)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "  - RATE = 0.02\n  + RATE = 0.04\ntrain: helper.py was changed since campaign night"
    )
    mine.write_text("x = (\n")
    result = python(*command, "--resume", **how)
    assert (result.returncode, result.stderr) == (0, "")
    code, same = codes(tmp_path)
    assert code == same
    assert not [path for path in (tmp_path / "out").rglob("*") if "unfinished" in path.name]


def test_launches_that_begin_a_campaign_at_once_share_one_copy(tmp_path):
    place = snapshot.Place(tmp_path / "out", "night", str(tiny_program(tmp_path)))
    with ThreadPoolExecutor(8) as pool:
        sources = {*pool.map(snapshot.keep, 8 * [place])}
    assert len(sources) == 1
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*/*")}
    (source,) = sources
    kept = {"runs/night/source", "runs/night/program"}
    assert names == kept | {f"source/{source.name}/{name}" for name in ("commit", PACKAGE.name)}


def test_a_program_edited_between_two_launches_in_this_process_is_refused(tiny_npz, tmp_path, capsys):
    """As in a notebook. One edited after it was loaded has a warning."""
    mine = tiny_program(tmp_path)
    program = load_program(str(mine))
    text = mine.read_text()
    os.utime(mine, (time.time() + 9, time.time() + 9))
    run_program(program, words(tiny_npz, tmp_path, "--recipe", mine))
    assert capsys.readouterr().err.startswith("Warning: mine.py was changed after it was loaded: what runs may differ")
    mine.write_text(text + "# edited\n")
    with pytest.raises(ConfigError, match=r"^mine.py was changed since campaign night began, as above: undo that"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    assert capsys.readouterr().err == "  + # edited\n"
    mine.write_text(text)
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    code, same = codes(tmp_path)
    assert code == same


def test_a_mistake_before_the_first_run_can_be_corrected_and_the_same_command_works(tiny_npz, tmp_path):
    """So the copy is made anew until a run is finished."""
    mine = tiny_program(tmp_path, **{"def run(seed):": "def run(seed):\n        1 / 0"})
    command = ["-m", PACKAGE.name, "train", "--recipe", mine, *words(tiny_npz, tmp_path, "--nproc", 1)]
    failed = python(*command, cwd=tmp_path, OMP_NUM_THREADS=1)
    assert (failed.returncode, "ZeroDivisionError" in failed.stderr) == (1, True)
    text = tiny_program(tmp_path).read_bytes()
    result = python(*command, cwd=tmp_path, OMP_NUM_THREADS=1)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "out" / "runs" / "night" / "program" / "mine.py").read_bytes() == text


def test_a_copy_has_the_modules_and_packages_of_the_folder_and_nothing_else(tmp_path):
    mine = tiny_program(tmp_path)
    for name in ("helper", "lib/__init__", "lib/deep/act", ".venv/lib/thing", "venv/lib/thing", "data/notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    for number in range(1000):
        (tmp_path / f"{number}.txt").write_text("")
    (tmp_path / "link.py").symlink_to(mine)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").symlink_to(mine)
    folder = {"mine.py", "helper.py", "lib/__init__.py", "lib/deep/act.py", "link.py"}
    assert {*snapshot.texts_of_folder(mine)} == folder
    assert {*snapshot.texts_of_folder(tmp_path / "elsewhere" / "other.py")} == folder | {"other.py"}


def test_helpers_of_one_name_are_each_programs_own_and_hide_no_other_module(tmp_path):
    found = set()
    for folder in ("a", "b", "a"):
        mine = tiny_program(tmp_path / folder, begin="from common import WHOSE\nimport random\n")
        (tmp_path / folder / "common.py").write_text(f"WHOSE = '{folder}'\n")
        (tmp_path / folder / "random.py").write_text("")
        program = load_program(str(mine))
        assert folder == program.WHOSE
        assert program.random.random() < 1
        assert {*snapshot.files_of(program)} == {"mine.py", "common.py"}
        found.add(snapshot.digests(program)["code"])
    assert len(found) == 2


def test_the_digest_of_a_program_covers_its_packages_and_our_programs_that_it_imports(tmp_path):
    begin = f"import pack.act\nfrom {PACKAGE.name} import page\nfrom {PACKAGE.name}.muon import dirac_init\n"
    mine = tiny_program(tmp_path, begin=begin)
    for name in ("pack/__init__", "pack/act"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    ours = {f"{PACKAGE.name}/{name}.py" for name in ("muon", "page")}
    assert {*snapshot.files_of(load_program(str(mine)))} == {"mine.py", "pack/__init__.py", "pack/act.py"} | ours


def test_a_program_that_calls_main_when_it_is_loaded_is_one_line(tmp_path):
    mine = tiny_program(tmp_path, **{'if __name__ == "__main__":\n    main()': "main()"})
    with pytest.raises(ConfigError, match=r"calls main\(\) when it is loaded"):
        load_program(str(mine))


# ---- The fields of a Hyp

FIELDS = {  # of a Hyp: a line of it, an option, and the value that this gives
    "choice: Literal[1, 2] = 1": ("--choice 2", 2),
    "rate: Literal[0.1, 0.2] = 0.1": ("--rate 2e-1", 0.2),
    "names: tuple[str, ...] = ('a', 'b')": ("--names v1.0,x", ("v1.0", "x")),
    "sizes: tuple[float, ...] = (1.0,)": ("--sizes 1,0.5", (1.0, 0.5)),
}


def with_fields(folder: Path, *lines: str) -> Path:
    marker = '    """Two workers of 16 images."""\n'
    added = "".join(f"    {line}  # help\n" for line in lines)
    return tiny_program(folder, **{marker: f"{marker}\n{added}"})


def test_fields_of_these_kinds_are_options_and_are_read_again_from_tables_and_weights(tiny_npz, tmp_path):
    mine = with_fields(tmp_path, *FIELDS)
    given = [word for option, _ in FIELDS.values() for word in option.split()]
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--save", tmp_path / "w.pt"))
    hyp = api.load(tmp_path / "w.pt", program=mine).hyp
    for line, (_, value) in FIELDS.items():
        assert getattr(hyp, line.partition(":")[0]) == value
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--runs", 2))
    with pytest.raises(ConfigError, match=r"cannot be continued with choice \(1, not 2\)"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--choice", 1, "--runs", 2))
    for wrong in (["--choice", 3], ["--rate", "0.3"], ["--sizes", "a"]):
        with pytest.raises(ConfigError):
            run_here("--recipe", mine, *words(tiny_npz, tmp_path, *wrong))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("widths: list[int] = None", r"Hyp.widths has the type list\[int\]: use int, float"),
        ("seed: int = 0", "argument --seed: conflicting option string"),
        ("smal = '--epochs 1'", "Hyp.smal is no field, and BaseHyp has no such name"),
        ("def chek_images(self, count): pass", "Hyp.chek_images is no field, and BaseHyp has no such name"),
    ],
)
def test_a_wrong_line_in_a_hyp_is_one_error_when_the_program_is_loaded(line, message, tmp_path):
    """A misspelt hook, for example, would otherwise do nothing."""
    mine = with_fields(tmp_path, line)
    with pytest.raises(ConfigError, match=rf"^--recipe {mine} cannot be used \([^\n]*({message})"):
        load_program(str(mine))
