"""Kill random processes of small campaigns, and continue each until complete. Start launches beside each other.

    python tests/attack.py [--kills N] [--seed S] [--pairs N]

Of three launches of one campaign beside each other, kill as many. An AssertionError names the first promise that is
broken. A kill takes about ten seconds, a pair of launches twenty.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
LAUNCHER = ("bash", REPO / "train_cifar_parallel.sh")
PROCESS = (*LAUNCHER, "--nproc", "1")  # a launch of one process
CAMPAIGN = "--demo --batch_size 16 --ghost_batch 8 --width 4 --epochs 2 --no_warmup --ema_ep 0.4 --data ../images.npz"
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")  # in which a launch is process 1
KINDS = ("--nproc 2", "--nproc 1")
EQUAL = ("run", "seed", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_count")
RUNS = 4


def start(folder: Path, command: Sequence[object], options: str) -> subprocess.Popen:
    """Start a launch in `folder`. TMPDIR marks all its processes."""
    variables = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    variables["PYTHONPATH"] = str(REPO)
    how = {"cwd": folder, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command), *CAMPAIGN.split(), *options.split()], **how)


def processes_of(folder: Path) -> list[int]:
    """Return the processes of launches that were started in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def kill_one(folder: Path, dice: random.Random) -> int:
    """Kill one of the processes of `folder`; return how many were killed."""
    with contextlib.suppress(ProcessLookupError, IndexError):  # it has just ended
        os.kill(dice.choice(processes_of(folder)), signal.SIGKILL)
        return 1
    return 0


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    return list(csv.DictReader(path.read_text().splitlines(), delimiter="\t"))


def table_of(folder: Path) -> list[tuple[str, ...]]:
    """Return what does not depend on time, by run, from the files of the finished runs."""
    rows = [json.loads(path.read_text())["row"] for path in folder.glob("runs/night/0*.json")]
    return sorted(tuple(str(row[name]) for name in EQUAL) for row in rows)


def complete(folder: Path, kind: str, kills: int, dice: random.Random) -> int:
    """Start a campaign until it is complete. Kill at most `kills` processes; return how many."""
    folder.mkdir()
    killed = 0
    while len(before := table_of(folder)) < RUNS:
        again = " --resume" if before and dice.random() < 0.5 else ""
        process = start(folder, LAUNCHER, f"{kind} --runs {RUNS} --campaign night{again}")
        if killed < kills:
            time.sleep(dice.uniform(0, 8))
            killed += kill_one(folder, dice)
        _, errors = process.communicate(timeout=120)
        time.sleep(1)
        assert not processes_of(folder), "a process is left"
        assert set(before) <= set(table_of(folder)), "a row is lost or changed"
        assert killed or process.returncode == 0, errors
    return killed


def check_rows(folder: Path, runs: str) -> None:
    """The rows are of these runs. Each has its epochs, and the last one is the row's."""
    rows = rows_of(folder / "runs.tsv")
    assert sorted(row["run"] for row in rows) == [*runs], "a run is lost or doubled"
    for row in rows:
        epochs = rows_of(folder / "epochs.tsv")
        of_run = [
            each["seconds"] for each in epochs if (each["campaign"], each["run"]) == (row["campaign"], row["run"])
        ]
        assert len(of_run) == 2, "epochs are lost or doubled"
        assert of_run[-1] == row["seconds"], "a curve is another run's"


def make_together(folder: Path, kills: int, dice: random.Random) -> None:
    """Three launches beside each other make the runs of one campaign, while random processes of them are killed."""
    folder.mkdir()
    running: list[subprocess.Popen] = []
    killed = 0
    while running or len(table_of(folder)) < RUNS:
        running = [launch for launch in running if launch.poll() is None]
        while len(running) < 3 and len(table_of(folder)) < RUNS:
            running.append(start(folder, PROCESS, f"--runs {RUNS} --campaign night"))
        time.sleep(dice.uniform(0, 3) if killed < kills else 0.1)
        killed += kill_one(folder, dice) if killed < kills else 0
    check_rows(folder, "0123")


def start_with_other_options(folder: Path, dice: random.Random) -> None:
    """Two launches of one campaign with other rates at about the same time: one is refused before it trains."""
    folder.mkdir()
    pair = []
    for rate in (1, 0.5):
        pair.append(start(folder, PROCESS, f"--runs 2 --campaign night --lr_scaler {rate}"))
        time.sleep(dice.uniform(0, 6) if rate == 1 else 0)
    said = [process.communicate(timeout=300) for process in pair]
    statuses = [process.returncode for process in pair]
    assert sorted(statuses) == [0, 2], said
    output, errors = said[statuses.index(2)]
    assert "lr_scaler (" in errors, errors
    assert "Train acc" not in output, "the refused launch trained"
    check_rows(folder, "01")


def start_in_containers(folder: Path) -> None:
    """Two launches without a name, each process 1 of its container, in the same second: both are campaigns."""
    folder.mkdir()
    pair = [start(folder, CONTAINER + PROCESS, "--runs 2") for _ in range(2)]
    said = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    check_rows(folder, "0011")
    assert len({row["campaign"] for row in rows_of(folder / "runs.tsv")}) == 2, "two launches are one campaign"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("kills", 50), ("seed", 50), ("pairs", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    dice, noise, tables, killed = random.Random(given.seed), np.random.default_rng(0), [], 0
    with tempfile.TemporaryDirectory() as name:
        images, labels = noise.integers(0, 256, (744, 32, 32, 3), np.uint8), noise.integers(0, 10, 744)
        arrays = {"train_images": images[:643], "train_labels": labels[:643]}
        np.savez(Path(name) / "images.npz", **arrays, test_images=images[643:], test_labels=labels[643:])
        for pair in range(given.pairs):
            start_with_other_options(Path(name) / f"options{pair}", dice)
            start_in_containers(Path(name) / f"containers{pair}")
        while len(tables) < 2 or killed < given.kills:  # the first two are undisturbed
            folder, number = Path(name) / str(len(tables)), len(tables) % 2
            killed += complete(folder, KINDS[number], (given.kills - killed) * (len(tables) > 1), dice)
            tables.append(table_of(folder))
            assert tables[-1] == tables[number], "a campaign differs from an undisturbed one"
        make_together(Path(name) / "together", given.kills, dice)
        assert table_of(Path(name) / "together") == tables[1], "launches beside each other made other runs"
    print(f"{killed} kills in {len(tables) - 2} campaigns, {2 * given.pairs} pairs, as many kills of three launches")
    print("beside each other: all promises were kept")


if __name__ == "__main__":
    main()
