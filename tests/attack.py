"""Kill random processes of a small campaign, of one launch at a time and of three beside each other.

    python tests/attack.py [--kills N] [--seed S]

An AssertionError names the first promise that is broken. A kill takes about ten seconds.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
LAUNCHER = REPO / "train_cifar_parallel.sh"
CAMPAIGN = "--demo --batch_size 16 --ghost_batch 8 --width 4 --epochs 2 --no_warmup --ema_ep 0.4 --data ../images.npz"
EQUAL = ("run", "seed", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_count")
RUNS = 4


def start(folder: Path, options: str) -> subprocess.Popen:
    """Start a launch in `folder`. TMPDIR marks all its processes."""
    variables = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", str(LAUNCHER), *CAMPAIGN.split(), *options.split()]
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def processes_of(folder: Path, variable: str = "") -> list[int]:
    """Return the processes of launches that were started in `folder`, and have an environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_text(errors="replace")
            if f"TMPDIR={folder}\0" in variables and variable in variables:
                found.append(int(process.name))
    return found


def kill_one(folder: Path, dice: random.Random) -> int:
    """Kill one of the processes of `folder`; return how many were killed."""
    with contextlib.suppress(ProcessLookupError, IndexError):  # it has just ended
        os.kill(dice.choice(processes_of(folder)), signal.SIGKILL)
        return 1
    return 0


def table_of(folder: Path) -> list[tuple[str, ...]]:
    """Return what does not depend on time, by run, from the files of the finished runs."""
    rows = [json.loads(path.read_text())["row"] for path in folder.glob("runs/night/0*.json")]
    return sorted(tuple(str(row[name]) for name in EQUAL) for row in rows)


def make(folder: Path, kind: str, launches: int, kills: int, dice: random.Random) -> list[tuple[str, ...]]:
    """Make a campaign by launches beside each other, and start others for those that end. Return its rows."""
    folder.mkdir()
    running: list[subprocess.Popen] = []
    killed = 0
    while running or len(table_of(folder)) < RUNS:
        before = table_of(folder)
        running = [launch for launch in running if launch.poll() is None]
        while len(running) < launches and len(table_of(folder)) < RUNS:
            again = " --resume" if before and dice.random() < 0.5 else ""
            running.append(start(folder, f"{kind} --runs {RUNS} --campaign night{again}"))
        time.sleep(dice.uniform(0, 8 / launches) if killed < kills else 0.1)
        killed += kill_one(folder, dice) if killed < kills else 0
        assert set(before) <= set(table_of(folder)), "a row is lost or changed"
    time.sleep(1)
    assert not processes_of(folder), "a process is left"
    rows = table_of(folder)
    assert len(rows) == RUNS, "a run is doubled"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=50)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        noise = np.random.default_rng(0)
        arrays = {}
        for part, count in (("train", 643), ("test", 101)):
            arrays[f"{part}_images"] = noise.integers(0, 256, (count, 32, 32, 3), np.uint8)
            arrays[f"{part}_labels"] = noise.integers(0, 10, count)
        np.savez(Path(name) / "images.npz", **arrays)
        for kind, launches in (("--nproc 2", 1), ("--nproc 1", 3)):
            undisturbed = make(Path(name) / f"undisturbed{launches}", kind, 1, 0, dice)
            rows = make(Path(name) / f"killed{launches}", kind, launches, given.kills, dice)
            assert rows == undisturbed, "a campaign differs from an undisturbed one"
    print(f"{given.kills} kills of one launch, and as many of three beside each other: all promises were kept")


if __name__ == "__main__":
    main()
