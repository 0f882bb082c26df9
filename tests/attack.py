"""Kill random processes of small campaigns, and continue each until complete.

    python tests/attack.py [--kills N] [--seed S]

An AssertionError names the first promise that is broken. A kill takes about ten seconds.
"""

import argparse
import contextlib
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LAUNCHER = Path(__file__).resolve().parent.parent / "train_cifar_parallel.sh"
CAMPAIGN = "--demo --batch_size 16 --ghost_batch 8 --width 4 --epochs 2 --no_warmup --runs 8"
CAMPAIGN += " --ema_ep 0.4 --data ../images.npz --campaign night"
KINDS = ("--nproc 2 --teams 1", "--nproc 1 --teams 2")
EQUAL = ("run", "seed", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_count")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """Start the launcher in `folder`. TMPDIR marks all its processes."""
    variables = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    how = {"cwd": folder, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", str(LAUNCHER), *arguments], **how)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that were started in `folder`, also those whose parents have ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def table_of(folder: Path) -> list[tuple[str, ...]]:
    """Return the columns of runs.tsv that do not depend on time, by run, without a half-written last row."""
    path = folder / "runs.tsv"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return sorted(tuple(row[name] for name in EQUAL) for row in csv.DictReader(lines, delimiter="\t"))


def complete(folder: Path, kind: str, kills: int, dice: random.Random) -> int:
    """Start a campaign again until it is complete. Kill at most `kills` processes; return how many."""
    folder.mkdir()
    killed = 0
    while len(before := table_of(folder)) < 8:
        process = start(
            folder, *kind.split(), *CAMPAIGN.split(), *(["--resume"] if before and dice.random() < 0.5 else [])
        )
        if killed < kills:
            time.sleep(dice.uniform(0, 8))
            if family := processes_of(folder):
                os.kill(dice.choice(family), signal.SIGKILL)
                killed += 1
        _, errors = process.communicate(timeout=120)
        time.sleep(1)
        assert not processes_of(folder), "a process is left"
        assert set(before) <= set(table_of(folder)), "a row is lost or changed"
        assert killed or process.returncode == 0, errors
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=50)
    given = parser.parse_args()
    dice, noise, tables, killed = random.Random(given.seed), np.random.default_rng(0), [], 0
    with tempfile.TemporaryDirectory() as name:
        images, labels = noise.integers(0, 256, (744, 32, 32, 3), np.uint8), noise.integers(0, 10, 744)
        arrays = {"train_images": images[:643], "train_labels": labels[:643]}
        np.savez(Path(name) / "images.npz", **arrays, test_images=images[643:], test_labels=labels[643:])
        while len(tables) < 2 or killed < given.kills:  # the first two are undisturbed
            folder, number = Path(name) / str(len(tables)), len(tables) % 2
            killed += complete(folder, KINDS[number], (given.kills - killed) * (len(tables) > 1), dice)
            tables.append(table_of(folder))
            assert tables[-1] == tables[number], "a campaign differs from an undisturbed one"
    print(f"{killed} kills in {len(tables) - 2} campaigns: all promises were kept")


if __name__ == "__main__":
    main()
