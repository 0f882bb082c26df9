"""Launches beside each other share a campaign: no run is made twice, other conditions are refused before training."""

import fcntl
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from conftest import TINY, run_here
from forked import FORKS

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab.campaign import Campaign
from large_batch_cifar_10_fast.lab.log import Recorder
from large_batch_cifar_10_fast.lab.table import COLUMNS

pytestmark = pytest.mark.slow


@pytest.fixture
def small(tiny_npz, tmp_path) -> list[object]:
    return ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night"]


def runs(folder: Path) -> list[int]:
    return pd.read_csv(folder / "runs.tsv", sep="\t")["run"].tolist()


def claim_run(folder: Path, conditions: dict, ready) -> None:
    """Be another launch, which has conditions, takes a run and does not end."""
    campaign = Campaign("night", folder, 9)
    campaign.agree(conditions)
    ready.send(campaign.take_run())
    time.sleep(300)


class Launch:
    """Another launch that makes a run, until it is killed."""

    def __init__(self, folder: Path, **conditions: str) -> None:
        mine, others = FORKS.Pipe()
        self.process = FORKS.Process(target=claim_run, args=(folder, conditions, others), daemon=True)
        self.process.start()
        assert mine.poll(60)
        self.run = mine.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def test_a_run_that_another_launch_makes_is_left_to_it_and_free_when_it_is_killed(small, tmp_path, capsys):
    others = [Launch(tmp_path), Launch(tmp_path)]
    assert [other.run for other in others] == [0, 1]
    run_here(*small, "--runs", 3)
    assert runs(tmp_path) == [2]
    assert "\n# 2 of 3 runs are being made by other launches\nMaximum" in capsys.readouterr().out
    assert not (tmp_path / "timing_log.tsv").exists(), "it is of run 0"
    run_here(*small, "--runs", 2)
    assert "Uploaded" not in capsys.readouterr().out, "nothing is set up"
    for other in others:
        other.kill()
    run_here(*small, "--runs", 3)
    assert runs(tmp_path) == [2, 0, 1]
    assert (tmp_path / "timing_log.tsv").exists()


def test_a_run_that_was_finished_while_it_was_claimed_is_not_made_again(small, tmp_path):
    """Between reading the table and having the claim, another launch may append the row."""
    run_here(*small, "--runs", 2)
    table = (tmp_path / "runs.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "runs.tsv").write_text("".join(table[:1]))
    with Campaign("night", tmp_path, 2) as campaign:
        (tmp_path / "runs.tsv").write_text("".join(table[:2]))
        assert campaign.take_run() == 1


def test_a_claim_ends_with_its_launch_also_in_a_notebook(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_here(*small)
    other = Launch(tmp_path)
    assert other.run == 0
    other.kill()


def test_another_launch_with_other_conditions_is_refused_before_it_trains(small, tmp_path):
    """Though no run is finished. When that launch has ended without one, its conditions do not matter."""
    other = Launch(tmp_path, options="lr_scaler=0.5", seed="7", compile="True")
    found = r"lr_scaler \(1.0, not 0.5\), .*seed \(0, not 7\)"
    with pytest.raises(ConfigError, match=f"^campaign night cannot be continued with {found}"):
        run_here(*small, "--runs", 2)
    assert runs(tmp_path) == []
    other.kill()
    other = Launch(tmp_path, compile="True")
    with pytest.raises(ConfigError, match=r"cannot be continued with compile \(False, not True\)"):
        run_here(*small, "--runs", 2)
    other.kill()
    run_here(*small)
    assert runs(tmp_path) == [0]


def test_a_row_that_someone_edited_ends_a_launch_after_its_run_is_written(small, tmp_path, monkeypatch):
    run_here(*small)
    table = tmp_path / "runs.tsv"
    edited = table.read_text().replace("night\t0\t0\t", "night\tx\t0\t")
    finish = Recorder.finish

    def edit_and_finish(log, *last):
        table.write_text(edited.replace("CPU ", ""))  # also shorter
        finish(log, *last)

    monkeypatch.setattr(Recorder, "finish", edit_and_finish)
    with pytest.raises(ConfigError, match=r"runs.tsv, line 2: "):
        run_here(*small, "--runs", 3)
    assert table.read_text().count("\n") == 3


def test_of_a_run_that_was_made_twice_one_row_is_written(tmp_path, capsys):
    """Where locks have no effect."""
    row = dict.fromkeys(COLUMNS, "0")
    with Campaign("night", tmp_path, 1) as campaign, Campaign("night", tmp_path, 1) as beside:
        campaign.add_run(0, row | {"campaign": "night"})
        beside.add_run(0, row | {"campaign": "night"})
    assert runs(tmp_path) == [0]
    assert "another launch has also made run 0" in capsys.readouterr().err


def test_a_file_system_without_record_locks_is_warned_of_once(small, tmp_path, monkeypatch, capsys):
    def lockf(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    run_here(*small, "--runs", 2)
    warning = "cannot be locked (No locks available): launches beside each other need an --out of their own\n"
    assert capsys.readouterr().err.count(warning) == 1
    assert runs(tmp_path) == [0, 1]
