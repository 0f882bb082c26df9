"""What ran is what is recorded: programs, their helpers and core/, whatever is edited meanwhile. And odd files."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, environment, launch, python, run_here
from test_programs import copy_with

from large_batch_cifar_10_fast import ConfigError, api
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


def rows(tmp_path) -> pd.DataFrame:
    return pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")


@pytest.mark.parametrize("edited", ["mine.py", "helper.py"])
def test_a_program_edited_after_it_was_loaded_is_recorded_as_it_ran(edited, tiny_npz, tmp_path, capsys):
    """And the edited one does not continue its campaign."""
    (tmp_path / "helper.py").write_text("RATE = 0.02\n")
    mine = tiny_program(tmp_path, begin="from helper import RATE\n", **{"lr=0.02": "lr=RATE"})
    program = load_program(str(mine))
    file = tmp_path / edited
    before = file.read_bytes()
    file.write_bytes(before + b"# edited\n")
    run_program(program, words(tiny_npz, tmp_path))
    warning = f"Warning: {edited} was changed after it was loaded: the text that was loaded runs, and is stored\n"
    assert capsys.readouterr().err == warning
    (code,) = rows(tmp_path)["code"]
    if edited == "mine.py":
        assert (tmp_path / "out" / f"source-{code}.py").read_bytes() == before
    else:
        assert zipfile.ZipFile(tmp_path / "out" / f"source-{code}.zip").read(edited) == before
    with pytest.raises(ConfigError, match=f"^{edited} was changed since campaign night began, as above"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    assert capsys.readouterr().err == "  + # edited\n"
    file.write_bytes(before)
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    assert rows(tmp_path)["code"].tolist() == [code, code]


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
    (code,) = rows(tmp_path)["code"]
    ran = (tmp_path / "ran").read_text()
    assert f"RAN = '{ran}'" in (tmp_path / "out" / f"source-{code}.py").read_text()


def test_an_edit_of_core_in_a_running_process_changes_no_digest(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from large_batch_cifar_10_fast.core import optim, source
        from large_batch_cifar_10_fast.lab.program import load_program
        before = source.digest(load_program("muon"))
        file = Path(optim.__file__)
        text = file.read_bytes()
        file.write_bytes(text + b"# edited\\n")
        program = load_program("muon")
        assert source.digest(program) == before
        source.store(program, Path(), before)
        import zipfile
        assert zipfile.ZipFile(f"source-{before}.zip").read("large_batch_cifar_10_fast/core/optim.py") == text
        """
    package = tmp_path / "copy" / "large_batch_cifar_10_fast"
    subprocess.run(["cp", "-r", REPO / "large_batch_cifar_10_fast", package.parent.mkdir() or package], check=True)
    result = python("-c", code, cwd=tmp_path, PYTHONPATH=package.parent)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("Warning: large_batch_cifar_10_fast/core/optim.py was changed after it was loaded")


def test_an_edited_helper_is_loaded_anew_in_one_process(tiny_npz, tmp_path):
    mine = tiny_program(tmp_path, begin="from helper import RATE\n", **{"lr=0.02": "lr=RATE"})
    found = []
    for rate in ("0.02", "0.3"):
        (tmp_path / "helper.py").write_text(f"RATE = {rate}\n")
        how = {"epochs": 1, "batch_size": 40, "precision": "fp32", "data": tiny_npz, "out": tmp_path / rate}
        found.append(api.train(str(mine), **how).iloc[0])
    assert found[0]["code"] != found[1]["code"]
    assert found[0]["train_loss"] != found[1]["train_loss"]


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
        assert source.texts_of(program)["common.py"] == f"WHOSE = '{folder}'\n".encode()
        digests.add(source.digest(program))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("random", "Python's own random"), ("numbers", "Python's own numbers"), ("pandas", "the pandas of ")],
)
def test_a_helper_that_hides_a_module_in_use_is_one_line(name, hidden, tmp_path):
    mine = tiny_program(tmp_path, begin=f"import {name}\n")
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    message = rf"mine.py imports {name}, and \S+{name}.py hides {hidden}"
    with pytest.raises(ConfigError, match=message):
        load_program(str(mine))


@pytest.mark.parametrize("name", ["random", "profile", "numbers"])
def test_a_program_may_be_called_like_a_module_of_pythons_own(name, tiny_npz, tmp_path):
    """For the launcher. `python random.py` cannot import torch, which needs Python's own `random`."""
    tiny_program(tmp_path, f"{name}.py")
    result = launch("--recipe", f"{name}.py", *words(tiny_npz, tmp_path, "--nproc", 1), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert rows(tmp_path)["recipe"].tolist() == [name]


@pytest.mark.parametrize(
    "encoded",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: ("# -*- coding: latin-1 -*-\n# \xe9\n" + text).encode("latin-1"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r").encode(),
    ],
    ids=["byte order mark", "latin-1", "CRLF", "CR"],
)
def test_a_program_may_have_any_encoding_and_line_ends_that_python_reads(encoded, tiny_npz, tmp_path, capsys):
    mine = tiny_program(tmp_path, begin="import helper\n")
    (tmp_path / "helper.py").write_bytes(encoded("x = 1\n"))
    text = encoded(mine.read_text())
    mine.write_bytes(text)
    run_here("--recipe", mine, *words(tiny_npz, tmp_path))
    (code,) = rows(tmp_path)["code"]
    assert (tmp_path / "out" / f"source-{code}.py").read_bytes() == text
    mine.write_bytes(text.replace(b"momentum", b"dampening"))
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"^mine.py was changed since"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2))
    shown = capsys.readouterr().err.splitlines()
    assert [line[:3] for line in shown] == ["  -", "  +"], "the line that was changed"
    with pytest.raises(SystemExit):
        read_command(load_program(str(mine)), ["--recipe", "mine.py", "--help"])
    assert re.search(r"--dropout FLOAT +part of the features", capsys.readouterr().out), "its comment"


def test_a_program_of_an_earlier_edition_is_one_line_that_says_what_changed(tmp_path):
    mine = tiny_program(tmp_path, **{"def train(hyp, images, machine):": "def train(hyp, options, images, team, log):"})
    with pytest.raises(ConfigError, match=r"has a train of 5 parameters, and it is train\(hyp, images, machine\)"):
        load_program(str(mine))


def test_a_program_that_calls_main_when_it_is_loaded_is_one_line(tiny_npz, tmp_path):
    mine = tiny_program(tmp_path, **{'if __name__ == "__main__":\n    main()': "main()"})
    result = python(mine, *words(tiny_npz, tmp_path), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "calls main() when it is loaded" in result.stderr


FIELDS = {  # of a Hyp: a line of it, an option, and the value that this gives
    "choice: Literal[1, 2] = 1": ("--choice 2", 2),
    "rate: Literal[0.1, 0.2] = 0.1": ("--rate 2e-1", 0.2),
    "few: int | None = 3": ("--few None", None),
    "some: Optional[float] = None": ("--some 0.5", 0.5),
    "both: None | int = 3": ("--both 4", 4),
    "kind: Literal['a', 'b'] | None = None": ("--kind b", "b"),
    "names: tuple[str, ...] = ('a', 'b')": ("--names v1.0,x", ("v1.0", "x")),
    "sizes: tuple[float, ...] | None = None": ("--sizes 1,0.5", (1.0, 0.5)),
}


def with_fields(folder: Path, *lines: str, begin: str = "") -> Path:
    begin += "import enum\nfrom typing import TYPE_CHECKING, Optional\nKind = enum.Enum('Kind', 'A B')\n"
    begin += "if TYPE_CHECKING:\n    from collections import OrderedDict\n"
    marker = '    """Two workers of 16 images."""\n'
    added = "".join(f"    {line}  # help\n" for line in lines)
    return tiny_program(folder, begin=begin, **{marker: f"{marker}\n{added}"})


def test_fields_of_these_kinds_are_options_and_are_read_again_from_tables_and_weights(tiny_npz, tmp_path):
    mine = with_fields(tmp_path, *FIELDS)
    given = [word for option, _ in FIELDS.values() for word in option.split()]
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--save", tmp_path / "w.pt"))
    hyp = api.load(tmp_path / "w.pt", program=mine).hyp
    for line, (_, value) in FIELDS.items():
        assert getattr(hyp, line.partition(":")[0]) == value
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--runs", 2))
    with pytest.raises(ConfigError, match=r"cannot be continued with few \(3, not None\)"):
        run_here("--recipe", mine, *words(tiny_npz, tmp_path, *given, "--few", 3, "--runs", 2))
    for wrong in (["--choice", 3], ["--rate", "0.3"], ["--few", "x"], ["--kind", "c"], ["--sizes", "a"]):
        with pytest.raises(ConfigError):
            run_here("--recipe", mine, *words(tiny_npz, tmp_path, *wrong))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("widths: list[int] = None", r"Hyp.widths is of type list\[int\], which is no option's: use int, float"),
        ("widths: tuple = (1, 2)", "Hyp.widths is of type tuple, which"),
        ("widths: tuple[int, int] = (1, 2)", r"Hyp.widths is of type tuple\[int, int\], which"),
        ("widths: dict = None", "Hyp.widths is of type dict, which"),
        ("kind: Kind = Kind.A", "Hyp.kind is of type Kind, which"),
        ("kind: Literal[True, 'a'] = 'a'", "Hyp.kind is of type .*Literal"),
        ("sizes: tuple[int, ...] = ()", "Hyp.sizes is empty, which no option can be"),
        ("kind: int | str = 1", r"Hyp.kind is of type int \| str, which"),
        ("order: 'OrderedDict' = None", "a type in Hyp is unknown .*OrderedDict.*: import it"),
        ("order: int = field(default_factory=int)", "Hyp.order has no default"),
        ("seed: int = 0", "Hyp.seed is an option of all programs"),
        ("nesterov: bool = True", "Hyp.nesterov could not be switched off: use no_nesterov = False"),
    ],
)
def test_a_field_that_can_be_no_option_is_one_line_when_the_program_is_loaded(line, message, tmp_path):
    mine = with_fields(tmp_path, line, begin="from dataclasses import field\n")
    with pytest.raises(ConfigError, match=rf"^recipe mine: {message}"):
        load_program(str(mine))


def test_a_made_dataclass_has_options_without_help(tmp_path):
    begin = "from dataclasses import make_dataclass\n"
    made = (
        "\nHyp = make_dataclass('Hyp', [('epochs', int, 2), ('batch_size', int, 16)], frozen=True)\n\n\nclass Network("
    )
    mine = tiny_program(tmp_path, begin=begin, **{"\nclass Network(": made})
    _, _, hyp = read_command(load_program(str(mine)), ["--recipe", "mine.py", "--epochs", "5"])
    assert (hyp.epochs, hyp.batch_size) == (5, 16)
    mine = tiny_program(tmp_path, **{"@dataclass(frozen=True)\n": ""})
    with pytest.raises(ConfigError, match="Hyp is no dataclass"):
        load_program(str(mine))


def test_a_program_started_by_python_has_the_digest_of_the_launcher(tiny_npz, tmp_path):
    """`python FILE.py` has imported the helper before anything of ours runs."""
    mine = tiny_program(tmp_path, begin="import helper\n")
    (tmp_path / "helper.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("x = 1\n")
    result = python(mine, *words(tiny_npz, tmp_path), cwd=tmp_path, OMP_NUM_THREADS=1)
    assert (result.returncode, result.stderr) == (0, "")
    one_thread = {"OMP_NUM_THREADS": 1}
    result = launch("--recipe", mine, *words(tiny_npz, tmp_path, "--runs", 2, "--nproc", 1), cwd=tmp_path, **one_thread)
    assert (result.returncode, result.stderr) == (0, "")
    assert rows(tmp_path)["code"].nunique() == 1
    (archive,) = (tmp_path / "out").glob("source-*.zip")
    assert {"helper.py", "deeper.py"} <= {*zipfile.ZipFile(archive).namelist()}


def test_what_is_imported_inside_functions_and_from_our_programs_is_of_the_digest(tmp_path):
    begin = "def late():\n    from lib import ema\n    import broken\n    return ema.x\n"
    begin += "from large_batch_cifar_10_fast import page\nfrom large_batch_cifar_10_fast.muon import dirac_init\n"
    mine = tiny_program(tmp_path, begin=begin)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / "lib" / "ema.py").write_text("def f():\n    from . import deep\n")
    (tmp_path / "lib" / "deep.py").write_text("")
    (tmp_path / "broken.py").write_text("import absent_thing\n")
    texts = source.texts_of(load_program(str(mine)))
    ours = [f"large_batch_cifar_10_fast/{name}.py" for name in ("muon", "page")]
    assert {"mine.py", "lib/__init__.py", "lib/ema.py", "lib/deep.py", *ours} <= {*texts}
    assert "broken.py" not in texts


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


def test_imports_by_name_are_found_also_later_and_are_loaded_anew(tiny_npz, tmp_path):
    """At the program's top they belong to its digest, also of `python FILE.py`."""
    begin = "import importlib\nhelp = importlib.import_module('hel' + 'per')\n"
    begin += "def later():\n    return importlib.import_module('la' + 'te')\n"
    run = {"    def run(seed):": "    assert later().x == 2\n\n    def run(seed):"}
    mine = tiny_program(tmp_path, begin=begin, **run)
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "late.py").write_text("x = 2\n")
    result = python(mine, *words(tiny_npz, tmp_path), cwd=tmp_path, OMP_NUM_THREADS=1)
    assert (result.returncode, result.stderr) == (0, "")
    run_here("--recipe", mine, *words(tiny_npz, tmp_path, "--campaign", "other"))
    assert rows(tmp_path)["code"].nunique() == 1
    assert "helper.py" in source.texts_of(load_program(str(mine)))


@pytest.mark.parametrize("started", ["by a link to its folder", "in our folder"])
def test_a_program_may_lie_behind_a_link_or_among_ours(started, tiny_npz, tmp_path):
    if started == "in our folder":
        package = tmp_path / "copy" / "large_batch_cifar_10_fast"
        package.parent.mkdir()
        subprocess.run(["cp", "-r", REPO / "large_batch_cifar_10_fast", package], check=True)
        tiny_program(package)
        command = ["-m", "large_batch_cifar_10_fast.mine"]
        result = python(*command, *words(tiny_npz, tmp_path), cwd=tmp_path, PYTHONPATH=package.parent)
    else:
        tiny_program(tmp_path / "real", begin="import helper\n")
        (tmp_path / "real" / "helper.py").write_text("x = 1\n")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        result = python(tmp_path / "link" / "mine.py", *words(tiny_npz, tmp_path), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert rows(tmp_path)["recipe"].tolist() == ["mine"]


def test_a_link_to_a_program_and_to_its_helper_are_as_the_files(tmp_path):
    mine = tiny_program(tmp_path / "files", begin="import helper\n")
    (tmp_path / "elsewhere.py").write_text("x = 1\n")
    (tmp_path / "files" / "helper.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "link.py").symlink_to(mine)
    for path, name in ((mine, "mine"), (tmp_path / "link.py", "link")):
        program = load_program(str(path))
        assert read_command(program, ["--recipe", str(path)])[0] == name
        assert program.helper.x == 1


def test_a_copy_of_ours_is_edited_and_trained(tiny_npz, tmp_path):
    """With a helper in a folder without __init__.py."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "act.py").write_text("from torch.nn import SiLU\n")
    edits = [("import torch\n", "from pack.act import SiLU\nimport torch\n"), ("nn.GELU()", "SiLU()")]
    mine = copy_with("muon", edits, tmp_path / "mine.py")
    assert "pack/act.py" in source.texts_of(load_program(str(mine)))
