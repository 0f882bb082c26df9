"""Small data sets, and ways to train: as a user starts it, forked, or in the test's own process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from forked import FORKS, train_forked

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.data.synthetic import draw_shapes

REPO = Path(__file__).resolve().parent.parent
LAUNCHER = REPO / "train_cifar_parallel.sh"

# The tests are of mathematics and behaviour, and mean the same on every machine: they run on the CPU. Those of
# test_gpu.py start programs of their own, with GPU among their variables.
COUNT = "import torch; print(torch.cuda.device_count())"
if "TESTS_GPUS" not in os.environ:  # what pytest-xdist starts inherits the answer, and would see no GPU any more
    seen = int(
        subprocess.run([sys.executable, "-c", COUNT], cwd=REPO, capture_output=True, text=True, check=True).stdout
    )
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(seen)))
    os.environ["TESTS_GPUS"] = named if seen else ""
GPU = {"CUDA_VISIBLE_DEVICES": os.environ["TESTS_GPUS"]}
GPUS = len(os.environ["TESTS_GPUS"].split(",")) if os.environ["TESTS_GPUS"] else 0
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# What a shell starts in the background, or nohup, ignores some of these, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)

# What launchers set for processes of theirs: no test is to see it.
for name in [*os.environ]:
    if name.startswith(("LARGE_BATCH_", "TORCHELASTIC_")):
        del os.environ[name]

# Eight workers of 16 images in two ghost groups, five steps an epoch: every part of the method in about a second.
TINY = ["--batch_size", "16", "--ghost_batch", "8", "--width", "4", "--epochs", "2", "--ema_ep", "0.4", "--no_warmup"]


@pytest.fixture(scope="session")
def tiny_npz(tmp_path_factory) -> Path:
    """643 training images, which 8 workers do not share evenly, and 101 for the test."""
    return write_npz(tmp_path_factory.mktemp("images") / "tiny.npz", *draw_shapes(643, 101))


def write_npz(path: Path, train_images, train_labels, test_images, test_labels) -> Path:
    np.savez(
        path, train_images=train_images, train_labels=train_labels, test_images=test_images, test_labels=test_labels
    )
    return path


def random_pictures(count: int, labels=None):
    """Noise: images uint8 [count, 32, 32, 3] and labels, drawn unless given."""
    random = np.random.default_rng(count)
    labels = random.integers(0, 10, count) if labels is None else np.asarray(labels)
    return random.integers(0, 256, (count, 32, 32, 3), np.uint8), labels


def environment(**variables: object) -> dict[str, str]:
    """This one, but for the tests' own number of threads, and with these."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHON": sys.executable, **{name: str(value) for name, value in variables.items()}}


def launch(*arguments: object, cwd: Path, script: Path = LAUNCHER, **variables: object) -> subprocess.CompletedProcess:
    """Start the launcher in `cwd` and wait for its end. Keywords in lower case are options, others variables."""
    return subprocess.run(
        ["bash", str(script), *map(str, arguments), *options_among(variables)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
    )


def options_among(variables: dict[str, object]) -> list[str]:
    """Take those in lower case out of them, as options of the command line."""
    names = [name for name in variables if name.islower() and not name.endswith("_proxy")]
    return [word for name in names for word in (f"--{name}", str(variables.pop(name)))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def train_together(processes: int, *arguments: object, cwd: Path, **variables: object) -> subprocess.CompletedProcess:
    """So many processes in `cwd` that meet as those of our launcher do: a status that is not 0, if any process has
    one, and what all of them say."""
    command, rendezvous = [str(argument) for argument in arguments], {"MASTER_PORT": free_port()}
    rendezvous |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": False}
    places = [environment(**rendezvous, **variables, RANK=rank, LOCAL_RANK=rank) for rank in range(processes)]
    return _train_forked([(command, place, cwd) for place in places])


def train_on_machines(*commands: list[str], folders: list[Path]) -> subprocess.CompletedProcess:
    """A process on each machine, with its command in its folder, which meet at a store like torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    rendezvous |= {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    places = [environment(**rendezvous, RANK=rank, GROUP_RANK=rank) for rank in range(len(commands))]
    return _train_forked([*zip(commands, places, folders, strict=True)])


def _train_forked(processes: list[tuple[list[str], dict[str, str], Path]]) -> subprocess.CompletedProcess:
    """Without the five seconds of a core that each new interpreter takes to import torch and make an optimizer."""
    deadline, ranks = time.monotonic() + 200, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for command, place, cwd in processes:
                told = (command, place, cwd, Path(folder))
                ranks.append(FORKS.Process(target=train_forked, args=told, daemon=True))
                ranks[-1].start()
            while running := [rank for rank in ranks if rank.exitcode is None]:
                if any(rank.exitcode for rank in ranks):
                    deadline = min(deadline, time.monotonic() + 10)  # in which the others may notice, too
                if not wait([rank.sentinel for rank in running], max(0, deadline - time.monotonic())):
                    break
            status = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
            files = [sorted(Path(folder).glob(f"{name}_*")) for name in ("stdout", "stderr")]
            output, errors = ("".join(file.read_text() for file in several) for several in files)
            assert status or not running, f"{len(running)} of {len(ranks)} processes hang: {output}{errors}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return subprocess.CompletedProcess([command for command, *_ in processes], status, output, errors)


def train_here(*arguments: object) -> None:
    """One process, in this one: no interpreter to start, no torch to import. Results go to --out."""
    train.main([*map(str, arguments)])


class Recorder:
    """In a log's place: takes down what a run says."""

    def __init__(self):
        self.validations, self.train = [], None

    def progress(self, steps, run, epoch):
        return steps

    def epoch(self, clock, train, validation):
        self.validations.append(validation)

    def run(self, run, clock, train, validation, network):
        self.train = train
        assert validation is self.validations[-1]


def children_of(pid: int) -> list[int]:
    """All living processes below one, read from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
