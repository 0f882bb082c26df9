"""Campaigns that are killed, healed, or on a disk that is full, each held against one that was left alone."""

import contextlib
import errno
import gc
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import ends
import pandas as pd
from conftest import TINY, children_of, is_alive, train_here

from large_batch_cifar_10_fast.campaign import COLUMNS, PARTS, read_rows
from large_batch_cifar_10_fast.options import ConfigError

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT)
DIFFERENT = ("campaign", "started", *PARTS, "seconds", "last_validation", "goal_seconds", "peak_memory")
RUNS, SLOWEST_END, SLOWEST_ROW = 12, 60, 300


def start(folder: Path, npz: Path, *more: str, runs: int = RUNS, **given: object) -> subprocess.Popen:
    command = more or ["--demo", *TINY, "--no_compile", "--runs", runs, "--data", npz]
    return ends.start(folder, *command, stdout=subprocess.DEVNULL, TMPDIR=folder, **given)


def rows_on_disk(table: Path) -> set[bytes]:
    """Its whole lines, without the head."""
    return set(table.read_bytes().split(b"\n")[1:-1]) if table.exists() else set()


def processes_in(folder: Path) -> list[int]:
    """All that live and were started with this folder for temporary files, whoever their parents are by now."""
    mark, found = f"TMPDIR={folder}\0".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes() and is_alive(int(place.name)):
                found.append(int(place.name))
    return found


def strike(process: subprocess.Popen, table: Path, dice: random.Random) -> tuple[str, set[bytes], bool] | None:
    """A random signal for a random process, at a random moment or as soon as a row is written: what it was, the rows
    that were on the disk by then, and whether any is of this launch; None if all had ended."""
    writing, size = dice.random() < 0.5, table.stat().st_size if table.exists() else 0
    moment = SLOWEST_ROW + time.monotonic() if writing else time.monotonic() + dice.uniform(0, 20)
    while process.poll() is None and time.monotonic() < moment:
        if writing and table.exists() and table.stat().st_size > size:
            break
        time.sleep(0.001)
    family = [process.pid, *children_of(process.pid)]
    victim, number = dice.choice(range(len(family) + 1)), dice.choice(SIGNALS)
    if process.poll() is not None:
        return None
    there = rows_on_disk(table)
    for pid in family if victim == len(family) else family[victim : victim + 1]:
        with contextlib.suppress(ProcessLookupError):  # the end of the first may have ended it
            os.kill(pid, number)
    training = table.exists() and table.stat().st_size > size
    whom = "all" if victim == len(family) else "another" if victim else "the launcher"
    return f"{number.name} to {whom}", there, training


def kill_campaigns(npz: Path, folder: Path, kills: int, dice: random.Random) -> dict[str, object]:
    """Campaigns that are killed and resumed again and again, each held against one that was left alone: in turn of one
    team of two processes, and of two teams."""
    same, expected = [name for name in COLUMNS if name not in DIFFERENT], {}
    for teams in (1, 2):
        place = folder / f"undisturbed_{teams}"
        place.mkdir(parents=True)
        undisturbed = start(place, npz, teams=teams, nproc=3 - teams)
        assert undisturbed.wait() == 0, undisturbed.stderr.read()
        expected[teams] = pd.read_csv(place / "runs.tsv", sep="\t").sort_values("run", ignore_index=True)[same]
    faults = (
        "rows lost",
        "rows lost at once",
        "rows doubled",
        "campaigns with a changed row",
        "processes left",
        "hangs",
        "ends of their own",
    )
    found, done, struck = Counter(dict.fromkeys(faults, 0)), 0, Counter()
    while done < kills:
        place = folder / f"campaign_{found['campaigns']}"
        place.mkdir()
        teams = 1 + found["campaigns"] % 2
        process, there = start(place, npz, teams=teams, nproc=3 - teams), set()
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
                there |= blow[1]
                found["in training"] += blow[2]
                found["rows lost at once"] += len(there - rows_on_disk(place / "runs.tsv"))
                found["processes left"] += len(processes_in(place))
                found["ends in more than one line"] += told.count("\n") > 1
            table = place / "runs.tsv"
            made = len(read_rows(table)) if table.exists() else 0
            found["ends of their own"] += not blow and (process.returncode != 0 or made < RUNS)
            if made == RUNS or found["ends of their own"]:  # a blow may come after the last row
                break
            process = start(place, npz, *(["--resume", "--data", npz] if made else []), teams=teams, nproc=3 - teams)
        rows = pd.read_csv(place / "runs.tsv", sep="\t")
        found["rows lost"] += len(set(range(RUNS)) - set(rows["run"]))
        found["rows lost at once"] += len(there - rows_on_disk(place / "runs.tsv"))
        found["rows doubled"] += int(rows["run"].duplicated().sum())
        ordered = rows.drop_duplicates("run").sort_values("run", ignore_index=True)[same]
        found["campaigns with a changed row"] += not ordered.equals(expected[teams])
        found["campaigns"] += 1
        shutil.rmtree(place)
    return {"kills": done, **found, "by": dict(struck)}


def heal_campaign(npz: Path, folder: Path, kills: int, dice: random.Random) -> dict[str, object]:
    """One campaign with --restarts, a process of which is ended so many times, held against one that was left alone."""
    runs, tables, struck = 4 * kills, [], Counter()
    for name, restarts in (("undisturbed", 0), ("healed", kills)):
        place = folder / name
        place.mkdir(parents=True)
        process = start(place, npz, runs=runs, restarts=restarts)
        for _ in range(restarts):
            made = (place / "runs.tsv").read_bytes().count(b"\n") if (place / "runs.tsv").exists() else 1
            while process.poll() is None and not (place / "runs.tsv").exists():
                time.sleep(0.01)
            while process.poll() is None and (place / "runs.tsv").read_bytes().count(b"\n") <= made:
                time.sleep(0.01)
            time.sleep(dice.uniform(0, 1))
            workers = ends.workers_of(process)
            number = dice.choice(SIGNALS)
            os.kill(dice.choice(workers), number)
            struck[number.name] += 1
            while any(map(is_alive, workers)):
                time.sleep(0.01)
        status, told = process.wait(), process.stderr.read()
        tables.append(pd.read_csv(place / "runs.tsv", sep="\t")[[name for name in COLUMNS if name not in DIFFERENT]])
    facts = {"heals": sum(struck.values()), "runs": len(tables[1]), "status": status, "lines": told.count("\n")}
    return {**facts, "equal to the undisturbed": tables[0].equals(tables[1]), "by": dict(struck)}


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """A disk that is full when a file has this many bytes: the last write arrives in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_at_sync(number: int) -> Iterator[None]:
    """A disk that tells only when it is asked whether all is on it that it is full; so asked for the nth time."""
    asked, truly = iter(range(1, sys.maxsize)), os.fsync

    def fsync(file: int) -> None:
        if next(asked) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        truly(file)

    with mock.patch.object(os, "fsync", fsync):
        yield


def full_disk(place: Path, npz: Path, full: contextlib.AbstractContextManager, runs: int) -> str:
    """A campaign on a disk that is full at some moment, gone on with when there is room: how the first part ended."""
    campaign = ["--demo", *TINY, "--epochs", 1, "--no_compile", "--runs", runs, "--data", npz, "--save", place / "w.pt"]
    said = "done"
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            with full:
                train_here(*campaign, "--out", place)
        except (ConfigError, OSError, RuntimeError) as end:
            said = type(end).__name__
        gc.collect()  # the table is closed, and free to be written
        rows = read_rows(place / "runs.tsv") if (place / "runs.tsv").exists() else []
        if len(rows) < runs:
            train_here(*campaign, "--out", place, *(["--resume"] if rows else []))
    return said


def fill_disks(npz: Path, folder: Path, times: int, dice: random.Random) -> dict[str, object]:
    """Every call for the disk's word fails once, and then files end at random bytes; each campaign is gone on with."""
    runs, found, ended = 2, Counter(), Counter()
    found |= dict.fromkeys(("rows lost or doubled", "campaigns with a changed row", "files left", "no weights"), 0)
    folder.mkdir()
    full_disk(folder, npz, contextlib.nullcontext(), runs)
    same = [name for name in COLUMNS if name not in DIFFERENT]
    expected, complete = (
        pd.read_csv(folder / "runs.tsv", sep="\t")[same],
        sorted(path.name for path in folder.iterdir()),
    )
    largest = (folder / "runs.tsv").stat().st_size
    faults = [full_at_sync(number) for number in range(1, runs + 4)]
    faults += [no_file_beyond(dice.randrange(largest)) for _ in range(len(faults), times)]
    for number, fault in enumerate(faults[:times]):
        place = folder / str(number)
        place.mkdir()
        ended[full_disk(place, npz, fault, runs)] += 1
        rows = pd.read_csv(place / "runs.tsv", sep="\t")
        found["rows lost or doubled"] += sorted(rows["run"]) != list(range(runs))
        found["campaigns with a changed row"] += not rows.sort_values("run", ignore_index=True)[same].equals(expected)
        found["files left"] += len({path.name for path in place.iterdir()} - {*complete, "runs.tsv.broken"})
        found["no weights"] += not (place / "w.pt").exists()
        shutil.rmtree(place)
    return {"full disks": sum(ended.values()), **found, "by": dict(ended)}
