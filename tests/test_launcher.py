"""The launcher as a user meets it: the demo, its folders, the wrong interpreter."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPO, environment, is_alive, launch

from large_batch_cifar_10_fast import LAUNCH
from large_batch_cifar_10_fast.launch import progress_of, torchrun_arguments
from large_batch_cifar_10_fast.options import Launch
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO

pytestmark = pytest.mark.slow


def test_the_demo_passes_94_percent_from_inside_the_package_folder(tmp_path):
    package = REPO / "large_batch_cifar_10_fast"
    result = launch("--demo", "--out", tmp_path, cwd=package, script=package / "train_cifar_parallel.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("# large_batch_cifar_10_fast ")
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")
    assert len(pd.read_csv(tmp_path / "timing_log.tsv", sep="\t")) == DEMO["epochs"]


def test_a_process_whose_launcher_is_gone_ends_before_torch_is_imported():
    code = "import large_batch_cifar_10_fast.options, sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (0, "False\n")
    mine = subprocess.run(command, cwd=REPO, env=environment(**{LAUNCH: os.getpid()}), capture_output=True, text=True)
    assert (mine.returncode, mine.stdout) == (0, "False\n")
    orphan = subprocess.run(command, cwd=REPO, env=environment(**{LAUNCH: 1}), capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout, orphan.stderr) == (1, "", "")


def test_the_closing_line_names_what_is_wrong_with_a_table_that_was_damaged_meanwhile(tmp_path):
    assert progress_of(str(tmp_path), "mine") == "no run was finished"
    (tmp_path / "runs.tsv").write_text("a\tb\n")
    assert "has other columns" in progress_of(str(tmp_path), "mine")


def test_a_signal_that_is_ignored_goes_on_being_ignored(monkeypatch):
    """As nohup has it."""
    assert "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT" in torchrun_arguments(Launch(), 1, "scratch")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT" in torchrun_arguments(Launch(), 1, "scratch")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_an_interpreter_there_is_one_clear_line(tmp_path):
    result = launch("--demo", cwd=tmp_path, PYTHON="/absent/python")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "There is no interpreter /absent/python: name one in PYTHON\n"


def test_files_of_the_folder_a_user_stands_in_are_not_run(tmp_path):
    for name in ("re", "csv", "email", "numpy", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("print('run')")
    result = launch("--version", cwd=tmp_path)
    assert result.stdout.startswith("large_batch_cifar_10_fast ")
    assert "run" not in result.stdout.split()
    assert result.stderr == ""


def _stand_in_repository(folder: Path) -> Path:
    """The scripts, asking for a package that nobody has, with an empty requirements.txt: no network is needed."""
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (folder / name).write_text((REPO / name).read_text().replace("torch torchvision numpy", "absent-thing"))
    (folder / "requirements.txt").write_text("")
    module = folder / "large_batch_cifar_10_fast"
    module.mkdir()
    (module / "__init__.py").write_text("")
    (module / "launch.py").write_text("import sys; print(sys.prefix, *sys.argv[1:])")
    return folder / "train_cifar_parallel.sh"


def _refuse_what_is_no_python(script: Path) -> None:
    result = launch("--x", cwd=script.parent, script=script, PYTHON="/bin/true")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Python 3.11 or newer is needed; /bin/true is not: name another in PYTHON\n"


def test_a_venv_is_made_when_needed_finished_when_half_made_and_then_left_alone(tmp_path):
    script = _stand_in_repository(tmp_path)
    venv = tmp_path / ".venv"
    first = launch("--x", cwd=tmp_path, script=script)
    assert first.stdout == f"{venv} --x\n", first.stderr
    assert re.match(r"Making .*\.venv: .* lacks some of: absent-thing", first.stderr)
    assert launch("--x", cwd=tmp_path, script=script).stderr == ""
    _refuse_what_is_no_python(script)
    (venv / "complete").unlink()
    assert launch("--x", cwd=tmp_path, script=script).stderr.startswith("Finishing ")
    (venv / "complete").unlink()
    (venv / "bin" / "python").unlink()
    _refuse_what_is_no_python(script)
    again = launch("--x", cwd=tmp_path, script=script)
    assert again.stderr.startswith("Making ")
    assert again.stdout == f"{venv} --x\n"
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").write_text('#!/bin/sh\necho "/another (3, 11)"\n')
    (venv / "bin" / "python").chmod(0o755)
    anew = launch("--x", cwd=tmp_path, script=script)
    assert anew.stderr.startswith("Making "), "another interpreter's"
    assert anew.stdout == f"{venv} --x\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_installation_ends_with_its_launch(tmp_path, number):
    script = _stand_in_repository(tmp_path)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    asked, waits = f'[ "$2" = -c ] && exec {sys.executable} "$@"\n[ "$4" = --version ] && exit', "exec sleep 60"
    pip.write_text(f"#!/bin/sh\n{asked}\necho $$ > {tmp_path}/pid\n{waits}\n")
    pip.chmod(0o755)
    with subprocess.Popen(["bash", str(script)], env=environment(), stderr=subprocess.DEVNULL) as process:
        start = time.monotonic()
        while not (written := tmp_path / "pid").exists() or not written.read_text():
            assert time.monotonic() - start < 20, "nothing is installed"
            time.sleep(0.01)
        process.send_signal(number)
    installing = int((tmp_path / "pid").read_text())
    while is_alive(installing) and time.monotonic() - start < 25:
        time.sleep(0.01)
    assert not is_alive(installing)
