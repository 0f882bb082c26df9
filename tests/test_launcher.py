"""Scripts and commands as a user meets them: started, closed, interrupted, under torchrun and Slurm."""

import io
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from attack import processes_of
from conftest import LAUNCHER, REPO, TINY, launch, python, run_here, run_program, write_npz, write_program
from forked import FORKS
from PIL import Image
from torch.distributed import run as torchrun

from large_batch_cifar_10_fast import RENDEZVOUS, ConfigError, __main__, apple2019
from large_batch_cifar_10_fast.core.printing import print_line, show
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import train
from large_batch_cifar_10_fast.lab.process import exit_process
from large_batch_cifar_10_fast.lab.program import read_command
from large_batch_cifar_10_fast.lab.store import rows_of

pytestmark = pytest.mark.slow

COMMAND = "large_batch_cifar_10_fast"
HOSTILE = ("re", "csv", "email", "numpy", "importlib", "torch")


@pytest.fixture
def hostile(tmp_path) -> Path:
    """Return a folder with files named like modules."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    return tmp_path


def test_a_small_demo_learns_in_a_hostile_folder_with_stdout_and_stderr_closed(hostile):
    """Whatever an outer launcher has set. The whole demo has 97%, in two minutes."""
    write_npz(hostile / "few.npz", *draw_shapes(4000, 400))
    script = REPO / "large_batch_cifar_10_fast" / "train_cifar_parallel.sh"
    small = "--demo --workers 4 --batch_size 16 --epochs 3 --ema_ep 0.3 --no_warmup --nproc 1 --data few.npz"
    outer = {"OMP_PLACES": 0, "PYTHONOPTIMIZE": 2, "TORCHELASTIC_RUN_ID": 0, "RANK": 1, "LOCAL_RANK": 1}
    outer |= {"WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    result = run_program("bash", "-c", f"sh {script} {small} >&- 2>&-", cwd=hostile, **outer)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert {path.name for path in hostile.glob("*.tsv")} == {"runs.tsv", "epochs.tsv", "timing_log.tsv"}
    ((row,),) = rows_of(hostile).values()
    assert float(row["validation_accuracy"]) > 0.6


def test_progress_is_shown_on_a_terminal(tiny_npz, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: True
    run_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert "run 1 epoch 2: " in stderr.getvalue()


def test_without_a_python_that_can_train_it_is_one_line(hostile):
    for interpreter, message in (("/absent", "There is no interpreter /absent"), ("/bin/true", "Python 3.11 or newer")):
        result = launch("--demo", cwd=hostile, PYTHON=interpreter)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert message in result.stderr


# ---- Commands


def test_without_a_command_there_is_help_and_an_unknown_one_is_one_line(tmp_path):
    module = f"{sys.executable} -m {COMMAND}"
    helped = run_program("bash", "-c", module, cwd=tmp_path, PYTHONPATH=REPO)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("Example: cifar10-fast train ")
    assert all(f"\n  {command} " in helped.stdout for command in __main__.COMMANDS)
    unknown = python("-m", COMMAND, "trian", cwd=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f"trian: there is no such command: use {', '.join(__main__.COMMANDS)}\n"
    closed = run_program("bash", "-c", f"{module} trian >&- 2>&-", cwd=tmp_path, PYTHONPATH=REPO)
    assert (closed.returncode, closed.stdout, closed.stderr) == (2, "", "")


def test_a_reader_that_ends_early_ends_a_command_without_a_word(tmp_path):
    command = f"set -o pipefail; {sys.executable} -m {COMMAND} --help | true"
    result = run_program("bash", "-c", command, cwd=tmp_path, PYTHONPATH=REPO, PYTHONUNBUFFERED="")
    assert (result.returncode, result.stderr) == (141, "")


def test_closed_streams_change_nothing_of_what_a_command_writes(tmp_path):
    """The file that is opened next does not get what is printed, or a warning."""
    for shape in ("a", "b"):
        (tmp_path / "photos" / shape).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 40), (number, 2, 3)).save(tmp_path / "photos" / shape / f"{number}.png")
    (tmp_path / "photos" / "a" / "text.png").write_text("no picture")
    command = f"{sys.executable} -m {COMMAND} photos photos photos.npz <&- >&- 2>&-"
    result = run_program("bash", "-c", command, cwd=tmp_path, PYTHONPATH=REPO)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert np.load(tmp_path / "photos.npz")["train_images"].shape == (4, 32, 32, 3)


def run_command(words: list[str], folder: Path) -> None:
    """Run a command in this forked process, whose training processes are a stand-in that sleeps."""
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None  # which an import may have asked for
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    sys.executable = str(folder / "python")
    sys.argv = [COMMAND, *words]
    __main__.main()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_experiment_and_all_that_it_started(number, tmp_path):
    (tmp_path / "tmp").mkdir()
    write_program(tmp_path / "python", "touch started\nexec sleep 60")
    words = ["experiment", "--demo", "--try", "epochs=6", "--runs", "3"]
    process = FORKS.Process(target=run_command, args=(words, tmp_path))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
        assert process.is_alive(), (tmp_path / "stderr").read_text()
    while not processes_of(tmp_path / "tmp"):  # `exec` hides the environment of a process for a moment
        time.sleep(0.05)
        assert process.is_alive(), (tmp_path / "stderr").read_text()
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    os.kill(process.pid, number)
    process.join(10)
    alive = process.is_alive()
    process.kill()
    assert not alive
    assert process.exitcode == 128 + number
    time.sleep(0.5)
    assert not processes_of(tmp_path / "tmp")
    assert not list((tmp_path / "tmp").iterdir())
    said = (tmp_path / "stderr").read_text().splitlines()
    assert said == ["baseline: to run 1 of 3", "Not finished: the same command continues."]


# ---- Processes


def test_what_one_process_alone_finds_is_the_error_of_the_launch_and_ends_the_others(tmp_path):
    program = write_program(
        tmp_path / "program",
        f'[ "$LOCAL_RANK" = 3 ] || exec sleep 60; folder=${{{RENDEZVOUS}#file://}}\n'
        'printf "its line" >"${folder%/*}/error.$$"; exit 2',
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        pytest.raises(ConfigError, match=r"^its line$"),
        train.Processes([str(program)], environment, [0, 1], teams=2, processes=2) as processes,
    ):
        processes.wait()
    assert not processes_of(tmp_path)


def test_a_process_names_its_error_with_its_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="1"), exit_process():
        raise ZeroDivisionError("by zero")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "process 1 failed (ZeroDivisionError('by zero'))"


@pytest.mark.parametrize(("stream", "print_it"), [("stderr", show), ("stdout", print_line)])
def test_a_line_is_one_write_so_that_those_of_two_processes_do_not_mix(stream, print_it, monkeypatch):
    recorded = []
    monkeypatch.setattr(output := io.StringIO(), "write", recorded.append)
    monkeypatch.setattr(sys, stream, output)
    print_it("a line")
    assert [text for text in recorded if text] == ["a line\n"]


def test_torchrun_starts_processes_that_go_on_if_their_log_cannot_be_written(tiny_npz, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stdout = os.dup(1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        words = ["--demo", *TINY, "--runs", "2", "--data", str(tiny_npz)]
        torchrun.main(["--nproc_per_node", "2", "-m", f"{COMMAND}.apple2019", *words])
    finally:
        os.dup2(stdout, 1)
    assert [row["processes"] for row in next(iter(rows_of(tmp_path).values()))] == ["2", "2"]
    assert capfd.readouterr().err.count("STDOUT cannot be written (No space left on device)") == 1


def test_all_tasks_of_an_array_take_runs_of_one_campaign(tmp_path):
    """As Slurm runs it, with stand-ins for srun and the launcher."""
    write_program(tmp_path / "srun", 'exec "$@"')
    write_program(tmp_path / "train_cifar_parallel.sh", 'echo "$*"')
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": tmp_path, "SLURM_ARRAY_JOB_ID": 9}
    script = REPO / "docs" / "slurm_array.sbatch"
    words = run_program("bash", script, "--runs", "5", cwd=tmp_path, **job).stdout.split()
    _, options, _ = read_command(apple2019, words)
    assert (options.runs, options.campaign, options.out) == (5, "9", "campaign_9")


# ---- .venv


@pytest.fixture
def script(tmp_path) -> Path:
    """Return a launcher that needs a package that nobody has, with an empty requirements.txt: it needs no network."""
    (folder := tmp_path / "checkout").mkdir()
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (folder / name).write_text((REPO / name).read_text())
    (folder / "pyproject.toml").write_text('[project]\ndependencies = ["absent-thing>=1"]')
    (folder / "requirements.txt").write_text("")
    (package := folder / COMMAND).mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; print(sys.prefix, *sys.argv[1:])")
    return folder / LAUNCHER.name


def test_a_venv_with_the_command_is_made_finished_after_an_interruption_and_not_taken_for_one_of_another_interpreter(
    script, tmp_path
):
    venv = script.parent / ".venv"

    def message() -> str:
        hidden = {"PIP_USER": 1, "PIP_CONSTRAINT": "/absent", "PYTHONHOME": "/absent"}
        result = launch("--runs", "2", cwd=script.parent, script=script, **hidden)
        assert result.stdout == f"{venv} train --runs 2\n", result.stderr
        return result.stderr.split(" ")[0]

    assert (message(), message()) == ("Making", "")
    started = run_program(venv / "bin" / "cifar10-fast", "compare", "a b", cwd=tmp_path, PYTHONPATH="")
    assert (started.stdout, started.stderr) == (f"{venv} compare a b\n", "")
    (venv / "complete").unlink()
    assert message() == "Finishing"
    (venv / "bin" / "python").unlink()
    write_program(venv / "bin" / "python", 'echo "/another (3, 11)"')
    is_made = f". {script.parent}/choose_python.sh; top={script.parent}; is_made_of {sys.executable}"
    assert run_program("bash", "-c", is_made, cwd=tmp_path).returncode == 1
