"""The launcher as a user meets it: the demo, its interpreter, its errors."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO, TINY, launch, python, train_here, write_program

from large_batch_cifar_10_fast import LAUNCH

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


SCRIPT = """
import os, sys, time
from pathlib import Path
from large_batch_cifar_10_fast import distributed, launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, exit_on_config_error
if "RANK" in os.environ:
    with distributed.exit_process():
        if os.environ["RANK"] == "1":
            raise ConfigError("only process 1 sees it")
        time.sleep(60)
arguments = launch.torchrun_arguments
launch.torchrun_arguments = lambda *given: [*arguments(*given)[:-3], __file__]
with exit_on_config_error("train_cifar_parallel.sh"):
    launch.start_processes([], Launch(), 2, Path(), str)
"""


def test_a_config_error_of_any_process_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = python(tmp_path / "script.py", cwd=tmp_path, **{LAUNCH: 0})
    assert (result.returncode, result.stderr) == (2, "train_cifar_parallel.sh: only process 1 sees it\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(tiny_npz, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: is_terminal
    train_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert ("run 1 epoch 2, 0 of 0 runs over 94%: " in stderr.getvalue()) == is_terminal == bool(stderr.getvalue())


def test_files_in_the_current_folder_named_like_modules_are_not_run(tmp_path):
    for name in ("re", "csv", "email", "numpy", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("print('run')")
    result = launch("--version", cwd=tmp_path)
    assert re.fullmatch(r"large_batch_cifar_10_fast [^\n]*\n", result.stdout)
    assert result.stderr == ""


@pytest.fixture
def script(tmp_path) -> Path:
    """Return a launcher that needs a package that nobody has, with an empty requirements.txt: it needs no network."""
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (tmp_path / name).write_text((REPO / name).read_text().replace("torch torchvision numpy", "absent-thing"))
    (tmp_path / "requirements.txt").write_text("")
    (module := tmp_path / "large_batch_cifar_10_fast").mkdir()
    (module / "__init__.py").write_text("")
    (module / "launch.py").write_text("import sys; print(sys.prefix)")
    return tmp_path / "train_cifar_parallel.sh"


@pytest.mark.parametrize(
    ("python", "message"),
    [("/absent/python", "There is no interpreter /absent"), ("/bin/true", "Python 3.11 or newer is")],
)
def test_a_wrong_interpreter_is_one_line(script, python, message):
    result = launch(cwd=script.parent, script=script, PYTHON=python)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(message)


def test_a_checkout_with_a_colon_in_its_name_is_one_line(script):
    (colon := script.parent / "a:b").mkdir()
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (colon / name).write_text((script.parent / name).read_text())
    result = launch(cwd=colon, script=colon / script.name)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"{colon} has a colon in its name" in result.stderr


def test_a_venv_is_made_finished_after_an_interruption_and_made_anew_for_another_interpreter(script):
    venv = script.parent / ".venv"

    def message() -> str:
        result = launch(cwd=script.parent, script=script, PIP_USER=1, PIP_REQUIRE_VIRTUALENV=1)
        assert result.stdout == f"{venv}\n", result.stderr
        return result.stderr.split(" ")[0]

    assert message() == "Making"
    assert message() == ""
    (venv / "complete").unlink()
    assert message() == "Finishing"
    (venv / "bin" / "python").unlink()
    assert message() == "Making"
    (venv / "bin" / "python").unlink()
    write_program(venv / "bin" / "python", 'echo "/another (3, 11)"')
    assert message() == "Making"
