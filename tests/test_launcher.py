"""The launcher as a user meets it: the demo, its interpreter, what surrounds it, its errors."""

import io
import os
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, REPO, TINY, launch, python, run_program, train_here, write_program

from large_batch_cifar_10_fast import LAUNCH
from large_batch_cifar_10_fast.campaign import read_rows

pytestmark = pytest.mark.slow


def test_the_demo_passes_94_percent_from_inside_the_package_folder(tmp_path):
    package = REPO / "large_batch_cifar_10_fast"
    result = launch("--demo", "--out", tmp_path, cwd=package, script=package / "train_cifar_parallel.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")
    assert {path.name for path in tmp_path.iterdir()} == {"runs.tsv", "epochs.tsv", "timing_log.tsv"}


def test_a_process_whose_launcher_is_gone_ends_before_torch_is_imported():
    code = "import large_batch_cifar_10_fast.options, sys; sys.exit('torch' in sys.modules)"
    for launcher, status in ((os.getpid(), 0), (1, 1)):
        assert python("-c", code, cwd=REPO, **{LAUNCH: launcher}).returncode == status


def test_progress_is_shown_on_a_terminal(tiny_npz, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: True
    train_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert "run 1 epoch 2, 0 of 0 runs over 94%: " in stderr.getvalue()


SET = {"OMP_PROC_BIND": "true", "PYTHONOPTIMIZE": 2, "PYTHONPATH": REPO / "tests"}
SET |= {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "outer"}


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("exec sh {} --demo --nproc 3", "8 workers cannot be split over 3 processes: use 1, 2, 4 or 8"),
        ("ulimit -f 8; exec sh {} --demo", "ulimit -f allows files of 8192 bytes, and torch's rendezvous needs more"),
    ],
    ids=["workers", "a limit of file sizes at which torch would hang"],
)
def test_sh_variables_of_an_outer_launcher_and_files_named_like_modules_change_nothing(tmp_path, start, told):
    for name in ("re", "csv", "email", "numpy", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("print('run')")
    result = run_program("bash", "-c", start.format(LAUNCHER), cwd=tmp_path, **SET)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"train_cifar_parallel.sh: {told}")
    assert {path.suffix for path in tmp_path.iterdir()} == {".py"}, "nothing is written"


def test_pythonpath_with_another_pythons_numpy_is_one_line(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError")
    result = launch("--version", cwd=tmp_path, PYTHONPATH=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"PYTHONPATH={tmp_path}" in result.stderr


def test_a_campaign_whose_log_cannot_be_written_goes_on(tiny_npz, tmp_path):
    train = f"'{sys.executable}' -m large_batch_cifar_10_fast.train --demo {' '.join(TINY)} --runs 2 >/dev/full"
    result = run_program("bash", "-c", f"{train} --data '{tiny_npz}'", cwd=tmp_path, PYTHONPATH=REPO)
    assert (result.returncode, len(read_rows(tmp_path / "runs.tsv"))) == (0, 2), result.stderr
    assert result.stderr.count("STDOUT cannot be written (No space left on device)") == 1


@pytest.fixture
def script(tmp_path) -> Path:
    """Return a launcher that needs a package that nobody has, with an empty requirements.txt: it needs no network."""
    (folder := tmp_path / "checkout").mkdir()
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (folder / name).write_text((REPO / name).read_text().replace("torch torchvision numpy", "absent-thing"))
    (folder / "requirements.txt").write_text("")
    (module := folder / "large_batch_cifar_10_fast").mkdir()
    (module / "__init__.py").write_text("")
    (module / "launch.py").write_text("import sys; print(sys.prefix)")
    return folder / "train_cifar_parallel.sh"


@pytest.mark.parametrize(
    ("python", "folder", "message"),
    [
        ("/absent/python", "checkout", "There is no interpreter /absent"),
        ("/bin/true", "checkout", "Python 3.11 or newer is"),
        (sys.executable, "a:b", "/a:b has a colon in its name"),
    ],
    ids=["absent", "no Python", "colon"],
)
def test_a_wrong_interpreter_and_a_colon_in_the_checkouts_name_are_one_line(script, python, folder, message):
    folder = script.parent.rename(script.parent.with_name(folder))
    result = launch(cwd=folder, script=folder / script.name, PYTHON=python)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_a_venv_is_made_finished_after_an_interruption_and_made_anew_for_another_interpreter(script):
    venv = script.parent / ".venv"

    def message() -> str:
        result = launch(cwd=script.parent, script=script, PIP_USER=1, PIP_REQUIRE_VIRTUALENV=1)
        assert result.stdout == f"{venv}\n", result.stderr
        return result.stderr.split(" ")[0]

    assert (message(), message()) == ("Making", "")
    (venv / "complete").unlink()
    assert message() == "Finishing"
    (venv / "bin" / "python").unlink()
    assert message() == "Making"
    (venv / "bin" / "python").unlink()
    write_program(venv / "bin" / "python", 'echo "/another (3, 11)"')
    assert message() == "Making"
