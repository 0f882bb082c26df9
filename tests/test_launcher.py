"""The scripts as a user meets them: the launcher and those for Slurm. And links in documents."""

import io
import os
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, REPO, TINY, launch, python, run_here, run_program, write_npz, write_program

from large_batch_cifar_10_fast import apple2019
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.program import read_command
from large_batch_cifar_10_fast.lab.table import read

pytestmark = pytest.mark.slow


def test_the_demo_passes_94_percent_from_inside_the_package_folder(tmp_path):
    package = REPO / "large_batch_cifar_10_fast"
    result = launch("--demo", "--out", tmp_path, cwd=package, script=package / "train_cifar_parallel.sh")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")
    assert {path.name for path in tmp_path.glob("*.tsv")} == {"runs.tsv", "epochs.tsv", "timing_log.tsv"}


def test_progress_is_shown_on_a_terminal(tiny_npz, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: True
    run_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert "run 1 epoch 2: " in stderr.getvalue()


SET = {"OMP_PLACES": 0, "PYTHONOPTIMIZE": 2, "TORCHELASTIC_RUN_ID": 0, "RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("sh {} --demo --nproc 3", "8 workers cannot be split over 3 processes: use 1, 2, 4 or 8"),
        ("PYTHON=/absent/python sh {} --demo", "There is no interpreter /absent/python"),
        ("PYTHON=/bin/true sh {} --demo", "Python 3.11 or newer is needed"),
    ],
    ids=["workers", "no interpreter", "no Python"],
)
def test_what_cannot_work_is_one_line_whatever_an_outer_launcher_set_and_the_folder_holds(tmp_path, start, message):
    for name in ("re", "csv", "email", "numpy", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    result = run_program("bash", "-c", start.format(LAUNCHER), cwd=tmp_path, **SET)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
    assert len([*tmp_path.iterdir()]) == 6, "nothing is written"


def test_under_torchrun_train_needs_no_launcher_and_goes_on_if_its_log_cannot_be_written(tiny_npz, tmp_path):
    train = (
        f"'{sys.executable}' -m torch.distributed.run --nproc_per_node 2 -m large_batch_cifar_10_fast.apple2019 --demo"
    )
    train += f" {' '.join(TINY)} --runs 2 --data '{tiny_npz}' >/dev/full"
    result = run_program("bash", "-c", train, cwd=tmp_path, PYTHONPATH=REPO)
    assert result.returncode == 0, result.stderr
    assert [row["processes"] for row in read(tmp_path / "runs.tsv")] == ["2", "2"]
    assert result.stderr.count("STDOUT cannot be written (No space left on device)") == 1


def test_an_error_of_any_process_is_named_with_its_traceback_also_under_torchrun(tmp_path):
    code = (
        "import os, sys\nfrom large_batch_cifar_10_fast import apple2019\n"
        "from large_batch_cifar_10_fast.core import fast, program, team\n"
    )
    code += "graph = fast.graph\n"
    code += "def fail(*parts, **options): return 1 / (int(os.environ['RANK']) - 1) and graph(*parts, **options)\n"
    code += "fast.graph = fail\n"
    code += "with team.exit_process():\n    program.run_program(apple2019, sys.argv[1:])\n"
    (tmp_path / "program.py").write_text(code)
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "program.py", "--demo", "--no_warmup"]
    result = python(*command, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("process 1 failed (ZeroDivisionError('division by zero'))\n") == 1
    assert "in fail" in result.stderr, "the traceback"
    assert "process 0 failed" not in result.stderr, "it only waited"


@pytest.mark.parametrize("where", ["--nproc 2", "--nproc 1 --teams 2 --runs 2"])
def test_what_one_process_alone_finds_is_one_line_whatever_its_team(tmp_path, where):
    """The last process of all fails, as one that is out of memory does."""
    code = "import os\nif os.environ.get('LOCAL_RANK') == str(int(os.environ.get('LOCAL_WORLD_SIZE', 0)) - 1):\n"
    (tmp_path / "sitecustomize.py").write_text(code + "    os.chdir('other')\n")
    (tmp_path / "other").mkdir()
    write_npz(tmp_path / "few.npz", *draw_shapes(200, 20))
    command = f"bash {LAUNCHER} --demo {' '.join(TINY)} --data few.npz {where}"
    result = run_program("bash", "-c", command, cwd=tmp_path, PYTHONPATH=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "train_cifar_parallel.sh: --data few.npz cannot be read" in result.stderr


def test_a_closed_stdout_and_stderr_change_nothing_else(tiny_npz, tmp_path):
    command = f"bash {LAUNCHER} --demo {' '.join(TINY)} --nproc 1 --data {tiny_npz}"
    for number, closed in enumerate((">&-", ">&- 2>&-")):
        result = run_program("bash", "-c", f"{command} --out {number} {closed}", cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert len(read(tmp_path / str(number) / "runs.tsv")) == 1


@pytest.fixture
def script(tmp_path) -> Path:
    """Return a launcher that needs a package that nobody has, with an empty requirements.txt: it needs no network."""
    (folder := tmp_path / "checkout").mkdir()
    for name in ("train_cifar_parallel.sh", "choose_python.sh"):
        (folder / name).write_text((REPO / name).read_text())
    (folder / "pyproject.toml").write_text('[project]\ndependencies = ["absent-thing>=1"]')
    (folder / "requirements.txt").write_text("")
    (module := folder / "large_batch_cifar_10_fast").mkdir()
    (module / "__init__.py").write_text("")
    (module / "launch.py").write_text("import sys; print(sys.prefix)")
    return folder / "train_cifar_parallel.sh"


def test_a_checkout_with_a_colon_in_its_name_is_one_line(script):
    colon = script.parent.rename(script.parent.with_name("a:b"))
    result = launch(cwd=colon, script=colon / script.name)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"{colon} has a colon in its name" in result.stderr


def test_a_venv_is_made_finished_after_an_interruption_and_made_anew_for_another_interpreter(script):
    venv = script.parent / ".venv"

    def message() -> str:
        result = launch(cwd=script.parent, script=script, PIP_USER=1, PIP_CONSTRAINT="/absent", PYTHONHOME="/absent")
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


def test_all_tasks_of_an_array_take_runs_of_one_campaign(tmp_path):
    """As Slurm runs it, with stand-ins for srun and the launcher."""
    write_program(tmp_path / "srun", 'exec "$@"')
    write_program(tmp_path / "train_cifar_parallel.sh", 'echo "$*"')
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": tmp_path, "SLURM_ARRAY_JOB_ID": 9}
    script = REPO / "docs" / "slurm_array.sbatch"
    words = run_program("bash", script, "--runs", "5", cwd=tmp_path, **job).stdout.split()
    _, options, _ = read_command(apple2019, words)
    assert (options.runs, options.campaign, options.out) == (5, "9", "campaign_9")
