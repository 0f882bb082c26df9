"""Kill random processes of small campaigns, resume each until it is complete, and give the launcher invalid options.

    python tests/attack.py [--kills N] [--options N] [--seed S]

An AssertionError names a lost or changed row, a process that is left, or an end without one line and status 2.
"""

import argparse
import contextlib
import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LAUNCHER = Path(__file__).resolve().parent.parent / "train_cifar_parallel.sh"
RUNS = 12
CAMPAIGN = f"--demo --batch_size 16 --ghost_batch 8 --width 4 --epochs 2 --ema_ep 0.4 --no_warmup --runs {RUNS}"
CAMPAIGN += " --no_compile --data ../images.npz"
KINDS = ("--nproc 2 --teams 1", "--nproc 1 --teams 2")
EQUAL = ("run", "seed", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_count")
RECIPES = ("apple2019", "basenet", "page", "fastai", "muon", "muon2024")
BAD_NUMBERS = ["", "--", "-", "-1", "x", "nan", "inf", "-inf", "1e308", "9" * 30, "9" * 5000, "²", "a\nb", "%s", "1,,2"]


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """Start the launcher in `folder`. TMPDIR marks all its processes."""
    variables = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", str(LAUNCHER), *arguments], cwd=folder, env=variables, **pipes)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that were started in `folder`, also those whose parents have ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def table_of(folder: Path) -> set[tuple[str, ...]]:
    """Return the columns of runs.tsv that do not depend on time, without a half-written last row."""
    path = folder / "runs.tsv"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    rows = [tuple(row[name] for name in EQUAL) for row in csv.DictReader(lines, delimiter="\t")]
    assert len({row[0] for row in rows}) == len(rows), "a run is doubled"
    return set(rows)


def complete(folder: Path, kind: str, kills: int, dice: random.Random) -> int:
    """Start a campaign, and resume it until it is complete; kill at most `kills` processes. Return how many."""
    folder.mkdir()
    killed = 0
    while len(before := table_of(folder)) < RUNS:
        process = start(folder, *kind.split(), *(["--resume"] if before else CAMPAIGN.split()))
        if killed < kills:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0, 10))
            if family := processes_of(folder):
                os.kill(dice.choice(family), signal.SIGKILL)
                killed += 1
        _, errors = process.communicate(timeout=120)
        time.sleep(1)
        assert not processes_of(folder), "a process is left"
        assert before <= table_of(folder), "a row is lost or changed"
        assert killed or process.returncode == 0, errors
    return killed


def kill(place: Path, kills: int, dice: random.Random) -> None:
    """Compare campaigns of which processes were killed with the first of each kind, which is undisturbed."""
    noise, tables, killed = np.random.default_rng(0), [], 0
    images = [noise.integers(0, 256, (count, 32, 32, 3), np.uint8) for count in (643, 101)]
    labels = [noise.integers(0, 10, count) for count in (643, 101)]
    parts = {"train_images": images[0], "test_images": images[1], "train_labels": labels[0], "test_labels": labels[1]}
    np.savez(place / "images.npz", **parts)
    while len(tables) < len(KINDS) or killed < kills:
        number, folder = len(tables) % len(KINDS), place / str(len(tables))
        killed += complete(folder, KINDS[number], kills - killed if len(tables) >= len(KINDS) else 0, dice)
        tables.append(table_of(folder))
        assert tables[-1] == tables[number], "a campaign differs from an undisturbed one"
    print(f"{killed} kills in {len(tables) - len(KINDS)} campaigns: all equal an undisturbed campaign")


def refuse(folder: Path, dice: random.Random) -> None:
    """Give the launcher an option of a recipe with a number that it cannot have."""
    recipe = ["--recipe", dice.choice(RECIPES), "--data", "synthetic"]
    options = re.findall(r"--(\w+) (?:INT|FLOAT)", start(folder, *recipe, "--help").communicate()[0])
    process = start(folder, *recipe, option := f"--{dice.choice(options)}={dice.choice(BAD_NUMBERS)}")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.count("\n")) == (2, "", 1), (recipe, option, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"kills": 100, "options": 100, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        kill(Path(place), given.kills, dice)
        for _ in range(given.options):
            refuse(Path(place), dice)
    print(f"{given.options} invalid options: each ended in one line with status 2")


if __name__ == "__main__":
    main()
