"""A run is a file: none is lost, changed or made twice, whatever is killed, full, edited or moved away."""

import contextlib
import errno
import fcntl
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from conftest import TINY, run_here
from forked import FORKS

from large_batch_cifar_10_fast import ConfigError, files
from large_batch_cifar_10_fast.lab import conduct, store
from large_batch_cifar_10_fast.lab.store import Campaign
from large_batch_cifar_10_fast.lab.table import reached_goal

pytestmark = pytest.mark.slow

RUNS = 200


@pytest.fixture
def small(tiny_npz, tmp_path) -> list[object]:
    return ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night"]


def column(folder: Path, name: str, table: str = "runs.tsv") -> list:
    return pd.read_csv(folder / table, sep="\t")[name].tolist()


def runs(folder: Path) -> list[int]:
    """Return the runs in the table."""
    return column(folder, "run")


def result_of(run: int) -> tuple[dict, list[dict]]:
    """Return the row and the epochs that a seed decides."""
    epochs = [{"epoch": i, "seconds": i, "validation_accuracy": (run * i) % 97 / 97} for i in range(1, 30)]
    return {**epochs[-1], "run": run, "seed": run}, epochs


def make(campaign: Campaign, run: int, **others: float) -> None:
    row, epochs = result_of(run)
    campaign.add_run(run, row | others, epochs)


def begin(folder: Path, **conditions: str) -> Campaign:
    campaign = Campaign(folder, "night", RUNS)
    campaign.agree({"launch": "launch"} | conditions)
    return campaign


# ---- Makers that are killed


def make_all(folder: Path) -> None:
    """Be a launch that makes runs until none is left. A warning, as of a run that was made twice, is written."""
    store.warn = lambda text: (folder / "doubled").write_text(text)
    with begin(folder) as campaign:
        while (run := campaign.take_run()) is not None:
            make(campaign, run)
            campaign.write_tables()


def test_of_makers_that_are_killed_at_any_moment_no_run_is_lost_changed_or_doubled(tmp_path, monkeypatch):
    """Of three makers one is killed after every few runs."""
    dice = random.Random(3)
    makers = []
    seen = {}
    while len(seen) < RUNS // 2:
        assert {maker.exitcode for maker in makers} <= {None, -signal.SIGKILL}
        makers = [maker for maker in makers if maker.is_alive()]
        while len(makers) < 3:
            makers.append(FORKS.Process(target=make_all, args=(tmp_path,), daemon=True))
            makers[-1].start()
        time.sleep(dice.uniform(0, 0.02))
        found = {path.name: path.read_bytes() for path in tmp_path.glob("runs/night/0*.json")}
        assert seen.items() <= found.items(), "a finished run was lost or changed"
        if len(found) > len(seen):
            dice.choice(makers).kill()
        seen = found
    for maker in makers:
        maker.kill()
        maker.join()
    monkeypatch.setattr(store, "warn", store.warn)  # which `make_all` replaces
    make_all(tmp_path)
    store.write_tables(tmp_path)
    assert runs(tmp_path) == [*range(RUNS)]
    assert column(tmp_path, "validation_accuracy") == [result_of(run)[0]["validation_accuracy"] for run in range(RUNS)]
    assert column(tmp_path, "epoch", "epochs.tsv") == RUNS * [*range(1, 30)]
    assert not (tmp_path / "doubled").exists()
    left = {path.name for path in tmp_path.glob("runs/night/[!0]*")}
    assert left == {"campaign.json", "claims", "lock"}, "what killed launches left was deleted"


# ---- Launches beside each other


def claim_run(folder: Path, conditions: dict, ready) -> None:
    """Be another launch, which has conditions, takes a run and does not end."""
    campaign = begin(folder, **conditions)
    ready.send(campaign.take_run())
    time.sleep(300)


@contextlib.contextmanager
def another_launch(folder: Path, **conditions: str) -> Iterator[int]:
    """Start another launch, which makes the run that is yielded until it is killed."""
    mine, others = FORKS.Pipe()
    process = FORKS.Process(target=claim_run, args=(folder, conditions, others), daemon=True)
    process.start()
    assert mine.poll(60)
    yield mine.recv()
    process.kill()
    process.join()


def test_a_run_that_another_launch_makes_is_left_to_it_and_free_when_it_is_killed(small, tmp_path, capsys):
    with another_launch(tmp_path) as first, another_launch(tmp_path) as second:
        assert (first, second) == (0, 1)
        run_here(*small, "--runs", 3)
        assert runs(tmp_path) == [2]
        run_here(*small, "--runs", 2)
        assert capsys.readouterr().out.count("Uploaded") == 1, "nothing is set up"
    run_here(*small, "--runs", 3, "--save", tmp_path / "w.pt")
    assert "w.pt is not written: run 2 is finished" in capsys.readouterr().err
    assert runs(tmp_path) == [0, 1, 2]


def test_an_interrupted_launch_leaves_no_claim_also_in_a_notebook(small, tmp_path, monkeypatch):
    monkeypatch.setattr(conduct, "row_of_run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_here(*small)
    with another_launch(tmp_path) as run:
        assert run == 0


@pytest.mark.parametrize("name", ["seed", "compile"])
def test_another_launch_with_other_conditions_is_refused_before_it_trains(name, small, tmp_path, capsys):
    """Though no run is finished. When that launch has ended without one, its conditions do not matter."""
    with (
        another_launch(tmp_path, **{name: "7"}),
        pytest.raises(ConfigError, match=rf"^campaign night cannot be continued with {name} \(\w+, not 7\)"),
    ):
        run_here(*small, "--runs", 2)
    assert "Train acc" not in capsys.readouterr().out
    run_here(*small)
    assert runs(tmp_path) == [0]


def test_without_locks_and_fsync_a_doubled_run_counts_once_and_another_result_is_told(tmp_path, monkeypatch, capsys):
    """As on some file systems."""
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    with begin(tmp_path) as campaign, begin(tmp_path) as beside:
        assert campaign.take_run() == beside.take_run() == 0
        make(campaign, 0)
        make(beside, 0)
        assert "because locks have no effect here; they differ in times only" in capsys.readouterr().err
        make(beside, 0, validation_accuracy=0.5)
        assert "they differ in validation_accuracy (0.5, not " in capsys.readouterr().err
        assert campaign.take_run() == 1
        make(campaign, 1)
        assert beside.take_run() == 2, "it reads anew what is finished"
    store.write_tables(tmp_path)
    assert column(tmp_path, "validation_accuracy") == [result_of(run)[0]["validation_accuracy"] for run in (0, 1)]


# ---- What happens to files


def test_a_table_that_was_edited_cut_or_deleted_is_whole_again_after_the_next_run(small, tmp_path, capsys):
    """One that cannot be written costs no run."""
    run_here(*small)
    table = tmp_path / "runs.tsv"
    whole = table.read_text()
    for number, damaged in enumerate((whole.replace("night", "x"), whole[:99]), 2):
        table.write_text(damaged)
        run_here(*small, "--runs", number)
        assert table.read_text().startswith(whole)
    table.unlink()
    table.mkdir()
    run_here(*small, "--runs", 4)
    assert "tables are not written" in capsys.readouterr().err
    table.rmdir()
    run_here(*small, "--runs", 5)
    assert runs(tmp_path) == [*range(5)]


def test_a_run_waits_for_a_full_disk_without_end_and_an_interruption_loses_only_it(tmp_path, monkeypatch, capsys):
    with begin(tmp_path) as campaign:
        make(campaign, 0)
        with monkeypatch.context() as full:
            sleep = Mock(side_effect=[None, None, KeyboardInterrupt])
            full.setattr(files, "time", SimpleNamespace(sleep=sleep))
            full.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(KeyboardInterrupt):
                make(campaign, 1)
        assert capsys.readouterr().err.count("Warning: No space left on device: run 1 of ") == 3
    store.write_tables(tmp_path)
    assert runs(tmp_path) == [0]
    assert not [*tmp_path.rglob(".unfinished*")]


def test_exactly_94_percent_is_reached_unless_a_run_diverged():
    for count, loss, reached in ((9399, 1, False), (9400, 1, True), (9999, "nan", False)):
        row = {"validation_count": count, "validation_images": 10000, "train_loss": loss, "validation_loss": 1}
        assert reached_goal(row) == reached
