"""Kill random processes of small campaigns, and continue each until complete. Start launches beside each other.

    python tests/attack.py [--kills N] [--seed S] [--pairs N]

Of three launches of one campaign beside each other, kill as many. An AssertionError names the first promise that is
broken. A kill takes about ten seconds, a pair of launches forty.
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
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LAUNCHER = Path(__file__).resolve().parent.parent / "train_cifar_parallel.sh"
CAMPAIGN = "--demo --batch_size 16 --ghost_batch 8 --width 4 --epochs 2 --no_warmup --runs 8"
CAMPAIGN += " --ema_ep 0.4 --data ../images.npz"
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")  # in which each launcher is process 1
KINDS = ("--nproc 2 --teams 1", "--nproc 1 --teams 2")
EQUAL = ("run", "seed", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_count")


def start(folder: Path, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen:
    """Start the launcher in `folder`, within another command. TMPDIR marks all its processes."""
    variables = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    how = {"cwd": folder, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*within, "bash", str(LAUNCHER), *CAMPAIGN.split(), *arguments], **how)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that were started in `folder`, also those whose parents have ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, without a half-written last one."""
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return list(csv.DictReader(lines, delimiter="\t"))


def table_of(folder: Path) -> list[tuple[str, ...]]:
    """Return the columns of runs.tsv that do not depend on time, by run."""
    return sorted(tuple(row[name] for name in EQUAL) for row in rows_of(folder / "runs.tsv"))


def complete(folder: Path, kind: str, kills: int, dice: random.Random) -> int:
    """Start a campaign again until it is complete. Kill at most `kills` processes; return how many."""
    folder.mkdir()
    killed = 0
    while len(before := table_of(folder)) < 8:
        again = ["--resume"] if before and dice.random() < 0.5 else []
        process = start(folder, *kind.split(), "--campaign", "night", *again)
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


def check_epochs(folder: Path) -> None:
    """Each run has the epochs of the launch that wrote its row, and the last one is the row's."""
    for row in rows_of(folder / "runs.tsv"):
        of_run = [each for each in rows_of(folder / "epochs.tsv") if each["launch"] == row["launch"]]
        of_run = [each["seconds"] for each in of_run if each["run"] == row["run"]]
        assert len(of_run) == 2, "epochs are lost or doubled"
        assert of_run[-1] == row["seconds"], "a curve is another run's"


def make_together(folder: Path, kills: int, dice: random.Random) -> None:
    """Three launches beside each other make the runs of one campaign, while random processes of them are killed."""
    folder.mkdir()
    launches: list[subprocess.Popen] = []
    killed = 0
    while len(table_of(folder)) < 8 or any(launch.poll() is None for launch in launches):
        running = sum(launch.poll() is None for launch in launches)
        for _ in range(3 - running if len(table_of(folder)) < 8 else 0):
            launches.append(start(folder, "--nproc", "1", "--campaign", "night"))
        time.sleep(dice.uniform(0, 3) if killed < kills else 0.1)
        family = processes_of(folder)
        if killed < kills and family:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(dice.choice(family), signal.SIGKILL)
                killed += 1
    for launch in launches:
        launch.communicate()
    rows = rows_of(folder / "runs.tsv")
    assert sorted(row["run"] for row in rows) == [*"01234567"], "a run is lost or doubled"
    check_epochs(folder)


def start_with_other_options(folder: Path, dice: random.Random) -> None:
    """Two launches of one campaign with other rates at about the same time: one is refused before it trains."""
    folder.mkdir()
    one = start(folder, "--nproc", "1", "--runs", "4", "--campaign", "night", "--lr_scaler", "1")
    time.sleep(dice.uniform(0, 6))
    other = start(folder, "--nproc", "1", "--runs", "4", "--campaign", "night", "--lr_scaler", "0.5")
    said = [process.communicate(timeout=300) for process in (one, other)]
    assert sorted([one.returncode, other.returncode]) == [0, 2], said
    output, errors = said[one.returncode == 0]
    assert "lr_scaler (" in errors, errors
    assert "Train acc" not in output, "the refused launch trained"
    rates = {row["options"].split()[0] for row in rows_of(folder / "runs.tsv")}
    assert len(rates) == 1, "a campaign has two kinds of runs"
    check_epochs(folder)


def start_in_containers(folder: Path) -> None:
    """Two launches without a name, each process 1 of its container, in the same second: both are campaigns."""
    folder.mkdir()
    pair = [start(folder, "--nproc", "1", "--runs", "3", within=CONTAINER) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    rows = rows_of(folder / "runs.tsv")
    assert len({row["campaign"] for row in rows}) == 2, "two launches are one campaign"
    assert sorted(row["run"] for row in rows) == ["0", "0", "1", "1", "2", "2"]
    check_epochs(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=4)
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
