"""Small data sets, and ways to train: as a user starts it, in forked processes, or in the test's own process."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import FORKS, train_forked

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import printing
from large_batch_cifar_10_fast.core.clock import PARTS
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.conduct import run_program as make_runs
from large_batch_cifar_10_fast.lab.program import load_program, recipe_of

CPU = torch.device("cpu")
ALONE = Team(0, 1, CPU, 1)  # one process with one worker
REPO = Path(__file__).resolve().parent.parent
LAUNCHER = REPO / "train_cifar_parallel.sh"
# Columns in which two launches of the same runs differ.
DIFFERENT = (
    "campaign",
    "commit",
    *PARTS,
    "seconds",
    "cpu_seconds",
    "last_validation",
    "goal_seconds",
    "peak_memory",
    "launch",
)

# The tests run on the CPU. Only test_gpu.py starts programs with GPU among their environment variables.
if "TESTS_GPUS" not in os.environ:  # the processes of pytest-xdist inherit it
    found = torch.cuda.device_count()  # asks the driver, and does not start CUDA
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    os.environ["TESTS_GPUS"] = names if found else ""
GPU = {"CUDA_VISIBLE_DEVICES": os.environ["TESTS_GPUS"]}
GPUS = len(os.environ["TESTS_GPUS"].split(",")) if os.environ["TESTS_GPUS"] else 0
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell's background job, or nohup, ignores some signals. The programs that the tests start must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
for name in [*os.environ]:
    if name.startswith("TORCHELASTIC_"):
        del os.environ[name]

# Eight workers of 16 images in two ghost groups, five steps an epoch: every part of the method in about a second.
TINY = ["--batch_size", "16", "--ghost_batch", "8", "--width", "4", "--epochs", "2", "--ema_ep", "0.4", "--no_warmup"]


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    """Each test is warned anew."""
    printing.warn_once.cache_clear()


@pytest.fixture(scope="session")
def tiny_npz(tmp_path_factory) -> Path:
    """643 training images, which 8 workers do not share evenly, and 101 test images."""
    return write_npz(tmp_path_factory.mktemp("images") / "tiny.npz", *draw_shapes(643, 101))


def write_npz(path: Path, *arrays) -> Path:
    np.savez(path, **dict(zip(("train_images", "train_labels", "test_images", "test_labels"), arrays, strict=True)))
    return path


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def environment(**variables: object) -> dict[str, str]:
    """Return this environment with more variables, but without the tests' own number of threads."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHON": sys.executable, **{name: str(value) for name, value in variables.items()}}


def run_program(*command: object, cwd: Path, **variables: object) -> subprocess.CompletedProcess:
    how = {"capture_output": True, "text": True, "timeout": 280, "cwd": cwd, "env": environment(**variables)}
    result = subprocess.run([*map(str, command)], **how)
    return subprocess.CompletedProcess(command, result.returncode, result.stdout, without_progress(result.stderr))


def without_progress(errors: str) -> str:
    """Drop lines on compiling, on long epochs, of which a busy machine has some, on few images, and on weights."""
    return re.sub(
        r"(?m)^(compiling, |run \d+, epoch |for \d+ training images|.* has the weights of run ).*\n", "", errors
    )


def launch(*arguments: object, cwd: Path, script: Path = LAUNCHER, **variables: object) -> subprocess.CompletedProcess:
    return run_program("bash", script, *arguments, cwd=cwd, **variables)


def python(*arguments: object, cwd: Path, **variables: object) -> subprocess.CompletedProcess:
    """Start a Python program that can import the package."""
    return run_program(sys.executable, *arguments, cwd=cwd, **{"PYTHONPATH": REPO} | variables)


@pytest.fixture
def error_line(capsys):
    """Return a function that calls a command, which must raise a ConfigError of one line and print nothing."""

    def call(command, *arguments: object) -> str:
        with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
            command(*arguments)
        output = capsys.readouterr()
        assert (output.out, output.err) == ("", "")
        return str(error.value)

    return call


def run_here(*arguments: object) -> None:
    """Run a program in this process; which, says --recipe. The tables go to --out."""
    words = [*map(str, arguments)]
    make_runs(load_program(recipe_of(words)), words)


def train_together(processes: int, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """Train in several processes of this machine. Return a failing status, if any, and all output."""
    return _train_forked(processes * [[*map(str, arguments)]], processes * [cwd], on_a_machine=processes)


def train_on_machines(*commands: list[str], folders: list[Path]) -> subprocess.CompletedProcess:
    """Train in one process for each machine, with its own command and folder, by a store like torchrun's."""
    return _train_forked(commands, folders, on_a_machine=1)


def _train_forked(commands, folders: list[Path], on_a_machine: int) -> subprocess.CompletedProcess:
    """Fork the processes: a new interpreter imports torch for seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    rendezvous |= {"WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": on_a_machine}
    places = [environment(**rendezvous, RANK=rank, LOCAL_RANK=rank % on_a_machine) for rank in range(len(commands))]
    processes = zip(commands, places, folders, strict=True)
    deadline = time.monotonic() + 200
    with tempfile.TemporaryDirectory() as folder:
        ranks = [FORKS.Process(target=train_forked, args=(*place, Path(folder)), daemon=True) for place in processes]
        for rank in ranks:
            rank.start()
        while (running := any(rank.exitcode is None for rank in ranks)) and time.monotonic() < deadline:
            if any(rank.exitcode for rank in ranks):
                deadline = min(deadline, time.monotonic() + 10)  # the others have to notice a failure
            time.sleep(0.01)
        status = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        for rank in ranks:
            rank.kill()
        read = [[path.read_text() for path in sorted(Path(folder).glob(f"std{name}_*"))] for name in ("out", "err")]
    output, errors = "".join(read[0]), without_progress("".join(read[1]))
    assert status or not running, f"a process hangs: {output}{errors}"
    return subprocess.CompletedProcess(commands, status, output, errors)
