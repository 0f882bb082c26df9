"""Attack the program: kill campaigns, hand over bad requests, damaged images and damaged tables, and count what broke.

    python tests/attack.py [--kills N] [--damages N] [--seed S]

Prints one line for each kind of attack; docs/reliability.md has the figures. Everything happens in a temporary folder.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pandas as pd
from conftest import LAUNCHER, TINY, children_of, environment, is_alive, write_npz

from large_batch_cifar_10_fast.images import cifar10
from large_batch_cifar_10_fast.images.sources import load_images
from large_batch_cifar_10_fast.images.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import prepare_launch
from large_batch_cifar_10_fast.request.command_line import RECIPES
from large_batch_cifar_10_fast.results.clock import PARTS
from large_batch_cifar_10_fast.results.logs import read_log
from large_batch_cifar_10_fast.results.tables import COLUMNS, read_rows
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT)
DIFFERENT = ("campaign", "started", *PARTS, "seconds", "last_validation", "goal_seconds", "peak_memory")
RUNS, SLOWEST_END = 12, 60
BAD_VALUES = ["", "--", "-", "-1", "0", "1.5", "x", "nan", "inf", "-inf", "1e308", "9" * 30, "9" * 5000, "²", "a\nb"]
BAD_VALUES += [
    "a\tb",
    "a\udcff",
    "/",
    "/dev/null",
    "/dev/full",
    "no/such/name",
    "x" * 300,
    "http://127.0.0.1/x",
    "%s",
    "24,,28",
]
VARIABLES = ("WORKERS", "NPROC", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RESTARTS", "TIMEOUT")


def start(folder: Path, npz: Path, *more: str) -> subprocess.Popen:
    command = ["bash", str(LAUNCHER), *(more or ["--demo", *TINY, "--no_compile", "--runs", str(RUNS), "--data", npz])]
    variables = environment(NPROC=2, TMPDIR=folder, OMP_NUM_THREADS=1)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([*map(str, command)], cwd=folder, env=variables, **pipes)


def strike(process: subprocess.Popen, table: Path, dice: random.Random) -> tuple[str, list[int]] | None:
    """A random signal for a random process, at a random moment or in that of writing; None if all had ended."""
    writing, size = dice.random() < 0.5, table.stat().st_size if table.exists() else 0
    moment = time.monotonic() + dice.uniform(0, 20)
    while process.poll() is None and time.monotonic() < moment:
        if writing and table.exists() and table.stat().st_size > size:
            break
        time.sleep(0.001)
    family = [process.pid, *children_of(process.pid)]
    victim, number = dice.choice(range(len(family) + 1)), dice.choice(SIGNALS)
    if process.poll() is not None:
        return None
    if victim == len(family):  # as Ctrl-C does it
        os.killpg(process.pid, number)
        return f"{number.name} to all", family
    os.kill(family[victim], number)
    return f"{number.name} to {'the launcher' if victim == 0 else 'another'}", family


def kill_campaigns(npz: Path, folder: Path, kills: int, dice: random.Random) -> dict[str, object]:
    """Campaigns that are killed and resumed again and again, each held against one that was left alone."""
    folder.mkdir()
    undisturbed = start(folder, npz)
    assert undisturbed.wait() == 0, undisturbed.stderr.read()
    same = [name for name in COLUMNS if name not in DIFFERENT]
    expected = pd.read_csv(folder / "runs.tsv", sep="\t")[same]
    found, done, struck = Counter(), 0, Counter()
    found |= dict.fromkeys(("rows lost", "rows doubled", "campaigns with a changed row", "processes left", "hangs"), 0)
    while done < kills:
        place = folder / f"campaign_{found['campaigns']}"
        place.mkdir()
        process = start(place, npz)
        while True:
            blow = strike(process, place / "runs.tsv", dice) if done < kills else None
            try:
                process.wait(SLOWEST_END if blow else 600)
            except subprocess.TimeoutExpired:
                found["hangs"] += 1
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            told = process.stderr.read()
            if blow:
                done, struck[blow[0]] = done + 1, struck[blow[0]] + 1
                time.sleep(0.5)
                left = [pid for pid in blow[1] if is_alive(pid)]
                found["processes left"] += len(left)
                found["ends in more than one line"] += told.count("\n") > 1
            if process.returncode == 0:
                break
            table = place / "runs.tsv"
            begun = table.exists() and read_rows(table)
            process = start(place, npz, *(["--resume", "--data", npz] if begun else []))
        rows = pd.read_csv(place / "runs.tsv", sep="\t")
        found["rows lost"] += len(set(range(RUNS)) - set(rows["run"]))
        found["rows doubled"] += int(rows["run"].duplicated().sum())
        ordered = rows.drop_duplicates("run").sort_values("run").reset_index(drop=True)[same]
        found["campaigns with a changed row"] += not ordered.equals(expected)
        found["campaigns"] += 1
        shutil.rmtree(place)
    return {"kills": done, **found, "by": dict(struck)}


def answer(attempt: Callable[[], object]) -> str:
    """How an attempt was answered: by one line, by doing it, or not as it should be."""
    try:
        attempt()
    except Refusal as refusal:
        return "refused in one line" if "\n" not in str(refusal) else "refused in several lines"
    except SystemExit as end:
        return f"ended with status {end.code}"
    except BaseException as error:
        return f"traceback: {type(error).__name__}"
    return "accepted"


def bad_requests(npz: Path, place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every option of every recipe, and every variable, with every bad value; no mirror is asked for anything."""
    os.chdir(place)
    with mock.patch.object(cifar10, "MIRRORS", ("http://127.0.0.1:9/nobody.listens",)):
        for recipe in RECIPES.values():
            options = [entry.name for owner in (recipe, Settings) for entry in fields(owner) if entry.type != "bool"]
            for name in [*options, "recipe", "no_such_option"]:
                for value in BAD_VALUES:
                    given = [
                        "--recipe",
                        recipe.name,
                        *([] if name == "data" else ["--data", str(npz)]),
                        f"--{name}={value}",
                    ]
                    yield f"{recipe.name} --{name}={value[:20]!r}", lambda given=given: prepare_launch(given, {})
        for name in VARIABLES:
            for value in BAD_VALUES:
                given = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "127.0.0.1:2", name: value}
                yield (
                    f"{name}={value[:20]!r}",
                    lambda given=given: prepare_launch(["--demo", "--data", str(npz)], given),
                )


def damaged(original: bytes, dice: random.Random) -> bytes:
    """A file cut short, with bytes changed, doubled, or replaced by zeros."""
    at, length = dice.randrange(len(original)), dice.choice((1, 1, 4, 100, 10_000))
    kind = dice.randrange(4)
    if kind == 0:
        return original[:at]
    middle = {1: dice.randbytes(length), 2: original[at : at + length] * 2, 3: bytes(length)}[kind]
    return original[:at] + middle + original[at + length :]


def damages(read: Callable[[str], object], path: Path, times: int, dice: random.Random) -> Counter:
    """How reading answered to so many damages of one file."""
    original, found = path.read_bytes(), Counter()
    for _ in range(times):
        path.write_bytes(damaged(original, dice))
        found[answer(lambda: read(str(path)))] += 1
    path.write_bytes(original)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=200, help="of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        npz = write_npz(place / "tiny.npz", *draw_shapes(643, 101))
        (place / "here").mkdir()
        answers = Counter()
        for what, attempt in bad_requests(npz, place / "here"):
            said = answer(attempt)
            answers[said] += 1
            if said not in ("refused in one line", "accepted"):
                print(f"  {what}: {said}", file=sys.stderr)
        print("bad requests:", dict(answers), flush=True)
        print("damaged images:", dict(damages(load_images, npz, asked.damages, dice)), flush=True)
        for file in ("runs.tsv", "timing_log.tsv", "run_log.txt"):
            copied = Path(shutil.copy(LAUNCHER.parent / "logs" / "demo" / file, place))
            print(f"damaged {file}:", dict(damages(read_log, copied, asked.damages, dice)), flush=True)
        os.chdir(place)
        if asked.kills:
            print("kills:", kill_campaigns(npz, place / "campaigns", asked.kills, dice), flush=True)


if __name__ == "__main__":
    main()
