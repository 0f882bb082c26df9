"""What ran is what is recorded: programs, their helpers and core/, whatever is edited meanwhile. And odd files."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, environment, python, run_here

from large_batch_cifar_10_fast import ConfigError, api, loading
from large_batch_cifar_10_fast.core import optim
from large_batch_cifar_10_fast.lab import source
from large_batch_cifar_10_fast.lab.program import load_program, read_command, run_program

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


def test_a_program_edited_after_it_was_loaded_is_recorded_as_it_ran(tiny_npz, tmp_path, capsys):
    """And the edited one does not continue its campaign."""
    (tmp_path / "helper.py").write_text("RATE = 0.02\n")
    mine = tiny_program(tmp_path, begin="from helper import RATE\n", **{"lr=0.02": "lr=RATE"})
    program = load_program(str(mine))
    before = {file: file.read_bytes() for file in (mine, tmp_path / "helper.py")}
    for file, text in before.items():
        file.write_bytes(text + b"# edited\n")
    run_program(program, words(tiny_npz, tmp_path))
    warnings = capsys.readouterr().err.splitlines()
    assert [line[:36] for line in warnings] == [
        "Warning: mine.py was changed after i",
        "Warning: helper.py was changed after",
    ]
    (code,) = codes(tmp_path)
    assert (tmp_path / "out" / f"source-{code}.py").read_bytes() == before[mine]
    stored = zipfile.ZipFile(tmp_path / "out" / f"source-{code}.zip").read("helper.py")
    assert stored == b"RATE = 0.02\n"
    for file, text in before.items():
        with pytest.raises(ConfigError, match=f"^{file.name} was changed since campaign night began, as above: undo"):
            run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
        assert capsys.readouterr().err == "  + # edited\n"
        file.write_bytes(text)
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    assert codes(tmp_path) == [code, code]


def test_a_program_edited_while_python_starts_it_is_recorded_as_it_ran(tiny_npz, tmp_path):
    """`python mine.py` reads it, and imports torch for seconds, before anything of ours runs."""
    begin = "open('began', 'w').close()\nimport time\nRAN = 'old'\ntime.sleep(2 * (__name__ == '__main__'))\n"
    write = {"    def run(seed):": "    open('ran', 'w').write(RAN)\n\n    def run(seed):"}
    mine = tiny_program(tmp_path, begin=begin, **write)
    how = {"cwd": tmp_path, "env": environment(PYTHONPATH=REPO), "stdout": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "mine.py", *words(tiny_npz, tmp_path)], **how) as process:
        while not (tmp_path / "began").exists():
            assert process.poll() is None
        mine.write_text(mine.read_text().replace("RAN = 'old'", "RAN = 'new'"))
    assert process.returncode == 0
    (code,) = codes(tmp_path)
    ran = (tmp_path / "ran").read_text()
    assert f"RAN = '{ran}'" in (tmp_path / "out" / f"source-{code}.py").read_text()


def test_the_text_of_core_that_was_loaded_is_recorded(tmp_path, monkeypatch, capsys):
    program = load_program("muon")
    today = source.digests(program)
    file = Path(optim.__file__)
    monkeypatch.setitem(loading.TEXTS, file, b"# before an edit\n" + file.read_bytes())
    now = source.digests(program)
    assert now["code"] == today["code"]
    assert now["core"] != today["core"]
    monkeypatch.setattr(source, "commit", lambda: "unknown")
    source.store(program, tmp_path)
    assert capsys.readouterr().err.startswith("Warning: large_batch_cifar_10_fast/core/optim.py was changed after")
    stored = zipfile.ZipFile(tmp_path / f"core-{now['core']}.zip").read("large_batch_cifar_10_fast/core/optim.py")
    assert stored == loading.TEXTS[file]


@pytest.mark.parametrize(
    ("was", "advice"),
    [
        ("0123abc", r"go back to its commit \(git checkout 0123abc\)"),
        ("0123abc-dirty", "undo that"),
        ("now", "undo that"),
    ],
)
def test_a_change_since_another_commit_names_it(was, advice, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "commit", lambda: "now")
    row = {"campaign": "night", "code": "0", "core": "0", "commit": was}
    with pytest.raises(ConfigError, match=rf"^muon.py was changed since campaign night began: {advice}, or another$"):
        source.refuse_change(load_program("muon"), tmp_path, row, "another")


@pytest.mark.parametrize("inside_a_function", [False, True])
def test_helpers_of_one_name_are_each_programs_own_also_beside_an_installed_package(
    inside_a_function, tmp_path, monkeypatch
):
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "common.py").write_text("WHOSE = 'installed'\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    begin = "def whose():\n    from common import WHOSE\n    return WHOSE\n"
    if not inside_a_function:
        begin = "from common import WHOSE\ndef whose():\n    return WHOSE\n"
    digests = set()
    for folder in ("a", "b", "a"):
        mine = tiny_program(tmp_path / folder, begin=begin)
        (tmp_path / folder / "common.py").write_text(f"WHOSE = '{folder}'\n")
        program = load_program(str(mine))
        assert program.whose() == folder
        digests.add(source.digests(program)["code"])
    assert len(digests) == 2


@pytest.mark.parametrize(("name", "hidden"), [("random", "Python's own random"), ("pandas", "the pandas of ")])
def test_a_helper_that_hides_a_module_in_use_is_one_line(name, hidden, tmp_path):
    mine = tiny_program(tmp_path, begin=f"import {name}\n")
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=rf"mine.py imports {name}, and \S+{name}.py hides {hidden}"):
        load_program(str(mine))


def test_a_program_may_have_any_encoding_and_line_ends_that_python_reads(tiny_npz, tmp_path, capsys):
    mine = tiny_program(tmp_path, begin="# -*- coding: latin-1 -*-\n# \xe9\n")
    text = mine.read_text().replace("\n", "\r\n").encode("latin-1")
    mine.write_bytes(text)
    run_here("--recipe", mine, *words(tiny_npz, tmp_path))
    (code,) = codes(tmp_path)
    assert (tmp_path / "out" / f"source-{code}.py").read_bytes() == text
    mine.write_bytes(text.replace(b"momentum", b"dampening"))
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"^mine.py was changed since"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    shown = capsys.readouterr().err.splitlines()
    assert [line[:3] for line in shown] == ["  -", "  +"], "the line that was changed"
    with pytest.raises(SystemExit):
        read_command(load_program(str(mine)), ["--recipe", "mine.py", "--help"])
    assert re.search(r"--dropout DROPOUT\s+part of the features", capsys.readouterr().out), "its comment"


def test_a_program_that_calls_main_when_it_is_loaded_is_one_line(tmp_path):
    mine = tiny_program(tmp_path, **{'if __name__ == "__main__":\n    main()': "main()"})
    with pytest.raises(ConfigError, match=r"calls main\(\) when it is loaded"):
        load_program(str(mine))


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
        ("width: int", "non-default argument|missing 1 required"),
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


def test_a_program_started_by_python_has_the_digest_of_the_launcher(tiny_npz, tmp_path):
    """By a link to its folder. It has imported the helpers before anything of ours runs; others come later."""
    begin = "import helper\nimport importlib\nimportlib.import_module('by' + 'name')\n"
    begin += "def later():\n    return importlib.import_module('la' + 'te')\n"
    run = {"    def run(seed):": "    assert later().x == 2\n\n    def run(seed):"}
    mine = tiny_program(tmp_path / "real", begin=begin, **run)
    for name, text in (("helper", "import deeper"), ("deeper", ""), ("byname", ""), ("late", "x = 2")):
        mine.with_name(f"{name}.py").write_text(f"{text}\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    result = python(tmp_path / "link" / "mine.py", *words(tiny_npz, tmp_path), cwd=tmp_path, OMP_NUM_THREADS=1)
    assert (result.returncode, result.stderr) == (0, "")
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    code, same = codes(tmp_path)
    assert code == same
    stored = zipfile.ZipFile(tmp_path / "out" / f"source-{code}.zip").namelist()
    assert {"helper.py", "deeper.py", "byname.py"} <= {*stored}


def test_what_is_imported_inside_functions_and_from_our_programs_is_of_the_digest(tmp_path):
    begin = "def late():\n    from lib import ema\n    import broken\n    return ema.x\n"
    begin += "from large_batch_cifar_10_fast import page\nfrom large_batch_cifar_10_fast.muon import dirac_init\n"
    begin += "from pack.act import SiLU\n"
    mine = tiny_program(tmp_path, begin=begin)
    texts = {
        "lib/__init__": "",
        "lib/ema": "def f():\n    from . import deep",
        "lib/deep": "",
        "broken": "import absent",
    }
    texts["pack/act"] = "from torch.nn import SiLU"  # in a folder without __init__.py
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    found = {*source.texts_of(load_program(str(mine)))}
    ours = [f"large_batch_cifar_10_fast/{name}.py" for name in ("muon", "page")]
    assert {"mine.py", "lib/__init__.py", "lib/ema.py", "lib/deep.py", "pack/act.py", *ours} <= found
    assert "broken.py" not in found


def test_a_virtual_environment_in_the_folder_is_no_part_of_the_program(tmp_path, monkeypatch):
    """As our own .venv in a checkout."""
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    (installed / "thing").mkdir(parents=True)
    (installed / "thing" / "__init__.py").write_text("")
    (installed / "thing" / "sub.py").write_text("class C:\n    pass\n")
    monkeypatch.syspath_prepend(installed)
    mine = tiny_program(tmp_path, begin="import thing.sub\n")
    first = load_program(str(mine))
    assert [name for name in source.texts_of(first) if "thing" in name] == []
    assert load_program(str(mine)).thing.sub.C is first.thing.sub.C


def test_a_link_to_a_program_and_to_its_helper_are_as_the_files(tmp_path):
    mine = tiny_program(tmp_path / "files", begin="import helper\n")
    (tmp_path / "elsewhere.py").write_text("x = 1\n")
    (tmp_path / "files" / "helper.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "link.py").symlink_to(mine)
    for path, name in ((mine, "mine"), (tmp_path / "link.py", "link")):
        program = load_program(str(path))
        assert read_command(program, ["--recipe", str(path)])[0] == name
        assert program.helper.x == 1
