"""The launcher as a user meets it: the demo, signals, dead workers, the wrong interpreter."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import LAUNCHER, REPO, TINY, children_of, environment, is_alive, launch

from large_batch_cifar_10_fast.launch import advice, scratch_folder
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO
from large_batch_cifar_10_fast.request.planning import torchrun_arguments
from large_batch_cifar_10_fast.results.resuming import CAMPAIGN
from large_batch_cifar_10_fast.settings.ending import LAUNCH
from large_batch_cifar_10_fast.settings.settings import Settings

pytestmark = pytest.mark.slow


def test_the_demo_passes_94_percent_from_inside_the_package_folder(tmp_path):
    package = REPO / "large_batch_cifar_10_fast"
    result = launch("--demo", "--out", tmp_path, cwd=package, script=package / "train_cifar_parallel.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("# large_batch_cifar_10_fast ")
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")
    assert len(pd.read_csv(tmp_path / "timing_log.tsv", sep="\t")) == DEMO["epochs"]


@pytest.fixture
def campaign_at_run_two(tiny_npz, tmp_path, monkeypatch):
    """A campaign too long to end by itself, with at least one finished run; its process and its workers'."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    process = subprocess.Popen(
        [
            "bash",
            str(LAUNCHER),
            "--demo",
            *TINY,
            "--runs",
            "5000",
            "--no_compile",
            "--data",
            str(tiny_npz),
            "--out",
            str(tmp_path),
        ],
        env=environment(NPROC=2, TMPDIR=temporary),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    runs = tmp_path / "runs.tsv"
    while not (runs.exists() and runs.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = children_of(process.pid)
    workers = [pid for pid in children if "large_batch_cifar_10_fast.train" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    yield process, children, workers, tmp_path / "runs.tsv"
    for pid in (process.pid, *children):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def _kill_worker(process, workers):
    """While the launcher is busy, so that it could hear from the other process first."""
    process.send_signal(signal.SIGSTOP)
    os.kill(workers[1], signal.SIGKILL)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)


def _terminate(process, workers):
    process.terminate()


def _interrupt(process, workers):
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the whole group gets it


def _kill_launcher(process, workers):
    process.kill()


def _listening(pids: list[int]) -> set[str]:
    """On which addresses any of these processes waits to be called, as the kernel writes them."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {os.readlink(link)[8:-1] for link in links if os.readlink(link).startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    entries = [line.split() for table in tables for line in table]
    return {fields[1].split(":")[0] for fields in entries if fields[3] == "0A" and fields[9] in sockets}


ENDS = [
    (_kill_worker, 1, "process 1 was ended by SIGKILL (out of memory?); "),
    (_terminate, 128 + signal.SIGTERM, "ended by SIGTERM; "),
    (_interrupt, 128 + signal.SIGINT, "ended by SIGINT; "),
    (_kill_launcher, -signal.SIGKILL, None),
]


@pytest.mark.parametrize(("blow", "status", "message"), ENDS)
def test_all_processes_end_within_seconds_in_one_line_and_finished_rows_stay(
    campaign_at_run_two, blow, status, message, tmp_path
):
    process, children, workers, runs = campaign_at_run_two
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert (addresses := _listening(children)), "the processes meet somewhere"
    assert addresses <= loopback, "and nothing listens beyond this machine"
    start = time.monotonic()
    blow(process, workers)
    assert process.wait(timeout=10) == status
    while any(map(is_alive, children)) and time.monotonic() - start < 10:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
    told, made = process.stderr.read(), len(pd.read_csv(runs, sep="\t"))
    temporary = tmp_path / "temporary"
    left = [*temporary.glob("large_batch_*"), *temporary.glob("torchelastic_*")]
    if message is None:
        assert (told, len(left)) == ("", 1)
        with scratch_folder():
            assert not left[0].exists(), "the next launch clears it away"
    else:
        details = f" (details: {runs.parent}/last_failure.txt)" if status == 1 else ""
        going_on = f"{made} of its 5000 runs are made, go on with --resume{details}\n"
        assert told == f"train_cifar_parallel.sh: {message}{going_on}"
        assert not left
        assert (runs.parent / "last_failure.txt").exists() == (status == 1)
    rows = pd.read_csv(runs, sep="\t")
    assert len(rows) >= 1
    assert rows["seconds"].notna().all()
    assert rows["run"].tolist() == list(range(len(rows)))


def test_a_folder_in_use_is_left_to_its_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as first, scratch_folder() as second:
        assert Path(first).exists()
        assert first != second
    assert not list(tmp_path.iterdir())


def test_a_process_whose_launcher_is_gone_ends_before_torch_is_imported():
    code = "import large_batch_cifar_10_fast.settings.settings, sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (0, "False\n")
    mine = subprocess.run(command, cwd=REPO, env=environment(**{LAUNCH: os.getpid()}), capture_output=True, text=True)
    assert (mine.returncode, mine.stdout) == (0, "False\n")
    orphan = subprocess.run(command, cwd=REPO, env=environment(**{LAUNCH: 1}), capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout, orphan.stderr) == (1, "", "")


def test_advice_names_what_is_wrong_with_a_table_that_was_spoilt_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv(CAMPAIGN, "mine")
    assert advice(Settings(out=str(tmp_path))) == "no run was finished"
    (tmp_path / "runs.tsv").write_text("a\tb\n")
    assert "has other columns" in advice(Settings(out=str(tmp_path)))


def test_a_signal_that_is_ignored_goes_on_being_ignored(monkeypatch):
    """As nohup has it."""
    assert "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT" in torchrun_arguments({}, 1, "scratch")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT" in torchrun_arguments({}, 1, "scratch")
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_installation_ends_with_its_launch(tmp_path, number):
    script = _stand_in_repository(tmp_path)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text(f'#!/bin/sh\n[ "$4" = --version ] && exit\necho $$ > {tmp_path}/pid\nexec sleep 60\n')
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
