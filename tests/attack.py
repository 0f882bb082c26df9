"""Attack the program: kill campaigns, fill the disk, hand over bad requests and damaged files, and count what broke.

    PYTHONPATH=$PWD python tests/attack.py [--kills N] [--heals N] [--damages N] [--full N] [--seed S]

Prints one line for each kind of attack; docs/reliability.md has the figures. Everything happens in a temporary folder.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

from conftest import LAUNCHER, TINY, train_here, write_npz
from disturbances import fill_disks, heal_campaign, kill_campaigns

from large_batch_cifar_10_fast.command_line import RECIPES
from large_batch_cifar_10_fast.data import cifar10
from large_batch_cifar_10_fast.data.cifar10 import load_images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig
from large_batch_cifar_10_fast.read_logs import read_log

BAD_VALUES = ["", "--", "-", "-1", "0", "1.5", "x", "nan", "inf", "-inf", "1e308", "9" * 30, "9" * 5000, "²", "a\nb"]
BAD_VALUES += ["a\tb", "a\udcff", "/", "/dev/null", "/dev/full", "no/such/name", "x" * 300, "http://127.0.0.1/x", "%s"]
BAD_VALUES += ["24,,28", "2/2", "0/0"]
NOBODY = "http://127.0.0.1:9/nobody.listens"


def answer(attempt: Callable[[], object]) -> str:
    """How an attempt was answered: by one line, by doing it, or not as it should be."""
    try:
        attempt()
    except ConfigError as error:
        return "refused in one line" if "\n" not in str(error) else "refused in several lines"
    except SystemExit as end:
        return f"ended with status {end.code}"
    except BaseException as error:
        return f"traceback: {type(error).__name__}"
    return "accepted"


def bad_requests(npz: Path, place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every option of every recipe with every bad value; no mirror is asked for anything."""
    os.chdir(place)
    with mock.patch.object(cifar10, "MIRRORS", (NOBODY,)):
        for recipe in RECIPES.values():
            options = [
                entry.name for owner in (recipe, RunConfig, Launch) for entry in fields(owner) if entry.type != "bool"
            ]
            for name in [*options, "recipe", "no_such_option"]:
                for value in BAD_VALUES:
                    images = [] if name == "data" else ["--data", str(npz)]
                    given = ["--recipe", recipe.name, *images, f"--{name}={value}"]
                    yield f"{recipe.name} --{name}={value[:20]!r}", partial(check_launch, given)


def damaged(original: bytes, dice: random.Random) -> bytes:
    """A file cut short, with bytes changed, doubled, or replaced by zeros."""
    at, length = dice.randrange(len(original)), dice.choice((1, 1, 4, 100, 10_000))
    kind = dice.randrange(4)
    if kind == 0:
        return original[:at]
    middle = {1: dice.randbytes(length), 2: original[at : at + length] * 2, 3: bytes(length)}[kind]
    return original[:at] + middle + original[at + length :]


def unfinished_table(npz: Path, folder: Path) -> Path:
    """That of a campaign of four runs, of which two are made."""
    arguments = ["--demo", *TINY, "--no_compile", "--runs", 4, "--data", npz, "--out", folder]
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(*arguments)
    table = folder / "runs.tsv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))
    return table


def go_on_with(table: str) -> None:
    """As far as the launcher looks at it; no mirror is asked for images that the table may name."""
    with mock.patch.object(cifar10, "MIRRORS", (NOBODY,)):
        check_launch(["--resume", "--out", str(Path(table).parent), "--nproc", "1"])


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
    parser.add_argument("--heals", type=int, default=10, help="ends of a process, in a campaign of four times the runs")
    parser.add_argument("--damages", type=int, default=200, help="of each kind of file")
    parser.add_argument("--full", type=int, default=40, help="disks")
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
        found = damages(go_on_with, unfinished_table(npz, place / "unfinished"), asked.damages, dice)
        print("damaged runs.tsv, gone on with:", dict(found), flush=True)
        os.chdir(place)
        if asked.full:
            print("full disks:", fill_disks(npz, place / "full", asked.full, dice), flush=True)
        if asked.heals:
            print("heals:", heal_campaign(npz, place / "heals", asked.heals, dice), flush=True)
        if asked.kills:
            print("kills:", kill_campaigns(npz, place / "campaigns", asked.kills, dice), flush=True)


if __name__ == "__main__":
    main()
