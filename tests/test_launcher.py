"""Scripts and commands as a user meets them: started, closed, interrupted, under torchrun and Slurm."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from attack import processes_of
from conftest import LAUNCHER, REPO, TINY, launch, run_program, write_npz, write_program
from forked import FORKS
from torch.distributed import run as torchrun

from large_batch_cifar_10_fast import RENDEZVOUS, ConfigError, __main__, apple2019
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.launch import Processes
from large_batch_cifar_10_fast.lab.program import read_command
from large_batch_cifar_10_fast.lab.store import rows_in

pytestmark = pytest.mark.slow

PACKAGE = "large_batch_cifar_10_fast"
MODULE = f"{sys.executable} -m {PACKAGE}"


@pytest.fixture
def hostile(tmp_path) -> Path:
    """Return a folder with files named like modules."""
    for name in ("re", "csv", "email", "numpy", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    return tmp_path


def test_a_small_demo_learns_in_a_hostile_folder_with_stdout_and_stderr_closed(hostile):
    """Whatever an outer launcher has set. The whole demo has 97%, in two minutes."""
    write_npz(hostile / "few.npz", *draw_shapes(4000, 400))
    small = "--demo --workers 4 --batch_size 16 --epochs 3 --ema_ep 0.3 --no_warmup --nproc 1 --data few.npz"
    outer = {"OMP_PLACES": 0, "PYTHONOPTIMIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    command = f"sh {REPO / PACKAGE / LAUNCHER.name} {small} >&- 2>&-"
    result = run_program("bash", "-c", command, cwd=hostile, **outer)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    (row,) = rows_in(*hostile.glob("runs/*/"))
    assert float(row["validation_accuracy"]) > 0.6


def test_without_a_python_that_can_train_it_is_one_line(hostile):
    for interpreter, message in (("/absent", "There is no interpreter /absent"), ("/bin/true", "Python 3.11 or newer")):
        result = launch("--demo", cwd=hostile, PYTHON=interpreter)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert message in result.stderr


# ---- Commands


def run_command(words: list[str], folder: Path) -> None:
    """Run a command in this forked process, whose training processes are a stand-in that sleeps."""
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None  # which an import may have asked for
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    sys.executable = str(folder / "python")
    sys.argv = [PACKAGE, *words]
    __main__.main()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_experiment_and_all_that_it_started(number, tmp_path):
    (folder := tmp_path / "tmp").mkdir()
    said = tmp_path / "stderr"
    write_program(tmp_path / "python", "touch started$RANK\nexec sleep 60")
    words = ["experiment", "--demo", "--try", "epochs=6", "--runs", "3", "--nproc", "2"]
    process = FORKS.Process(target=run_command, args=(words, tmp_path))
    process.start()
    while not (tmp_path / "started1").exists():  # the last: a stand-in does not end with its launcher
        time.sleep(0.05)
        assert process.is_alive(), said.read_text()
    os.kill(process.pid, number)
    process.join(10)
    process.kill()
    assert process.exitcode == 128 + number
    time.sleep(0.5)
    assert not processes_of(folder)
    assert not list(folder.iterdir())
    assert said.read_text().endswith("\nNot finished: the same command continues.\n")


# ---- Processes


def test_a_program_that_ends_python_is_a_failure(tiny_npz, tmp_path):
    tiny = (REPO / "tests" / "tiny.py").read_text()
    (tmp_path / "mine.py").write_text(tiny.replace("def run(seed):", "def run(seed):\n        raise SystemExit(0)"))
    result = launch("--recipe", "mine.py", "--data", tiny_npz, "--nproc", 1, cwd=tmp_path)
    assert result.returncode == 1
    assert "process 0 failed (SystemExit(0))\ntrain: process 0 ended with status 1; 0 of 1" in result.stderr


def test_what_one_process_alone_finds_is_the_error_of_the_launch_and_ends_the_others(tmp_path):
    program = write_program(
        tmp_path / "program",
        f'[ "$LOCAL_RANK" = 3 ] || exec sleep 60; folder=${{{RENDEZVOUS}#file://}}\n'
        'printf "its line" >"${folder%/*}/error.$$"; exit 2',
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        pytest.raises(ConfigError, match=r"^its line$"),
        Processes([str(program)], environment, count=4, runs=1) as processes,
    ):
        processes.wait()
    assert not processes_of(tmp_path)


def test_torchrun_starts_processes_that_go_on_if_their_log_cannot_be_written(tiny_npz, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stdout = os.dup(1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        torchrun.main(["--nproc_per_node", "2", "-m", PACKAGE, "train", "--demo", *TINY, "--data", str(tiny_npz)])
    finally:
        os.dup2(stdout, 1)
    (row,) = rows_in(*tmp_path.glob("runs/*/"))
    assert row["processes"] == "2"
    assert capfd.readouterr().err.count("STDOUT cannot be written (No space left on device)") == 1


def test_all_tasks_of_an_array_take_runs_of_one_campaign(tmp_path):
    """As Slurm runs it, with stand-ins for srun and the launcher."""
    write_program(tmp_path / "srun", 'exec "$@"')
    write_program(tmp_path / LAUNCHER.name, 'echo "$*"')
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": tmp_path, "SLURM_ARRAY_JOB_ID": 9}
    words = run_program("bash", REPO / "docs" / "slurm_array.sbatch", "--runs", 5, cwd=tmp_path, **job).stdout.split()
    options = read_command(apple2019, words)[1]
    assert (options.runs, options.campaign, options.out) == (5, "9", "campaign_9")


# ---- .venv


def test_a_venv_is_made_finished_after_an_interruption_and_not_taken_for_one_of_another_interpreter(
    tmp_path,
):
    """By a launcher that needs a package that nobody has, with an empty requirements.txt: it needs no network."""
    venv = tmp_path / ".venv"
    for name in (LAUNCHER.name, "cifar10-fast", "choose_python.sh"):
        (tmp_path / name).write_text((REPO / name).read_text())
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["absent-thing>=1"]')
    (tmp_path / "requirements.txt").touch()
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__main__.py").write_text("import sys; print(sys.prefix, *sys.argv[1:])")

    def message() -> str:
        hidden = {"PIP_USER": 1, "PIP_CONSTRAINT": "/absent", "PYTHONHOME": "/absent"}
        result = launch("--runs", "2", cwd=tmp_path, script=tmp_path / LAUNCHER.name, **hidden)
        assert result.stdout == f"{venv} train --runs 2\n", result.stderr
        return result.stderr.split(" ")[0]

    assert message() == "Making"
    assert message() == ""
    command = {"script": tmp_path / "cifar10-fast", "cwd": REPO}
    assert launch("compare", "a b", **command).stdout == f"{venv} compare a b\n"
    assert launch("--install", **command).stdout == f"{venv}/bin/python has what is needed\n"
    (venv / "complete").unlink()
    assert message() == "Finishing"
    (venv / "bin" / "python").unlink()
    write_program(venv / "bin" / "python", 'echo "/another (3, 11)"')
    is_made = f". {tmp_path}/choose_python.sh; top={tmp_path}; is_made_of {sys.executable}"
    assert run_program("bash", "-c", is_made, cwd=tmp_path).returncode == 1
