"""A run is a file: none is lost, changed or made twice, whatever is killed, full, edited or moved away."""

import errno
import fcntl
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from conftest import TINY, run_here
from forked import FORKS

from large_batch_cifar_10_fast import ConfigError, LostError, files
from large_batch_cifar_10_fast.lab import store
from large_batch_cifar_10_fast.lab.log import Recorder
from large_batch_cifar_10_fast.lab.store import Campaign
from large_batch_cifar_10_fast.lab.table import reached_goal

pytestmark = pytest.mark.slow


@pytest.fixture
def small(tiny_npz, tmp_path) -> list[object]:
    return ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night"]


def runs(folder: Path) -> list[int]:
    """Return the runs in the table."""
    path = folder / "runs.tsv"
    return pd.read_csv(path, sep="\t")["run"].tolist() if path.exists() else []


def result_of(run: int) -> tuple[dict, list[dict]]:
    """Return the row and the epochs that a seed decides."""
    epochs = [{"epoch": i, "seconds": i, "validation_accuracy": (run * i) % 97 / 97} for i in range(1, 30)]
    return {"run": run, "seed": run, "validation_accuracy": epochs[-1]["validation_accuracy"]}, epochs


def make(campaign: Campaign, run: int) -> None:
    row, epochs = result_of(run)
    campaign.add_run(run, row, epochs)


def begin(folder: Path, count: int = 9, **conditions: str) -> Campaign:
    campaign = Campaign(folder, "night", count)
    campaign.agree({"launch": "launch"} | conditions)
    return campaign


# ---- Makers that are killed

MAKERS = 3
RUNS = 400
KILLS = 100


def make_all(folder: Path) -> None:
    """Be a launch that makes runs until none is left. A warning, as of a run that was made twice, is written."""
    store.warn = lambda text: (folder / "doubled").write_text(text)
    with begin(folder, RUNS) as campaign:
        while (run := campaign.take_run()) is not None:
            row, epochs = result_of(run)
            campaign.add_epochs(run, epochs[:9])
            campaign.add_run(run, row, epochs)
            campaign.write_tables()


def test_of_makers_that_are_killed_at_any_moment_no_run_is_lost_changed_or_doubled(tmp_path, monkeypatch):
    dice = random.Random(3)
    makers = []
    seen: dict[str, bytes] = {}
    killed = 0
    while killed < KILLS:
        makers = [maker for maker in makers if maker.is_alive()]
        while len(makers) < MAKERS:
            makers.append(FORKS.Process(target=make_all, args=(tmp_path,), daemon=True))
            makers[-1].start()
        time.sleep(dice.uniform(0, 0.08))
        dice.choice(makers).kill()
        killed += 1
        for path in (tmp_path / "runs").glob("night/0*.json"):
            text = path.read_bytes()
            assert seen.setdefault(path.name, text) == text, "a finished run was changed"
            assert json.loads(text)["row"]["run"] == int(path.stem)
    for maker in makers:
        maker.kill()
        maker.join()
    monkeypatch.setattr(store, "warn", store.warn)  # which `make_all` replaces
    make_all(tmp_path)
    with begin(tmp_path, RUNS) as campaign:
        campaign.write_tables(at_once=True)
    assert {*seen} <= {path.name for path in (tmp_path / "runs" / "night").iterdir()}, "a finished run was lost"
    assert runs(tmp_path) == [*range(RUNS)]
    expected = [result_of(run)[0]["validation_accuracy"] for run in range(RUNS)]
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["validation_accuracy"].tolist() == expected
    assert pd.read_csv(tmp_path / "epochs.tsv", sep="\t").groupby("run").size().tolist() == RUNS * [29]
    assert not (tmp_path / "doubled").exists()
    names = {path.name for path in (tmp_path / "runs" / "night").iterdir() if not path.name.startswith("0")}
    assert names == {"campaign.json", "claims"}, "what killed launches left was deleted"


# ---- Launches beside each other


def claim_run(folder: Path, conditions: dict, ready) -> None:
    """Be another launch, which has conditions, takes a run and does not end."""
    campaign = begin(folder, **conditions)
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
    assert runs(tmp_path) == [0, 1, 2]
    assert (tmp_path / "timing_log.tsv").exists()


def test_a_claim_ends_with_its_launch_also_in_a_notebook(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_here(*small)
    other = Launch(tmp_path)
    assert other.run == 0
    other.kill()


def test_another_launch_with_other_conditions_is_refused_before_it_trains(small, tmp_path):
    """Though no run is finished. When that launch has ended without one, its conditions do not matter."""
    other = Launch(tmp_path, **{"hyp.lr_scaler": "0.5", "seed": "7", "compile": "True"})
    found = r".*seed \(0, not 7\).*"
    with pytest.raises(ConfigError, match=f"^campaign night cannot be continued with lr_scaler .1.0, not 0.5.{found}"):
        run_here(*small, "--runs", 2)
    assert runs(tmp_path) == []
    other.kill()
    other = Launch(tmp_path, compile="True")
    with pytest.raises(ConfigError, match=r"cannot be continued with compile \(False, not True\)"):
        run_here(*small, "--runs", 2)
    other.kill()
    run_here(*small)
    assert runs(tmp_path) == [0]


def test_two_threads_of_a_process_do_not_share_its_locks(tmp_path):
    with begin(tmp_path), pytest.raises(ConfigError, match="this process already trains campaign night: wait"):
        begin(tmp_path)
    begin(tmp_path).__exit__(None, None, None)


def test_where_locks_have_no_effect_a_doubled_run_counts_once_and_another_result_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "claim", lambda *_: True)
    with begin(tmp_path) as campaign:
        store.OPEN.clear()
        with begin(tmp_path) as beside:
            assert campaign.take_run() == beside.take_run() == 0
            make(campaign, 0)
            make(beside, 0)
            assert "has also made run 0, because locks have no effect here: give each" in capsys.readouterr().err
            row, epochs = result_of(0)
            beside.add_run(0, row | {"validation_accuracy": 0.5}, epochs)
            assert "also made run 0, with another result: the seed did not decide it" in capsys.readouterr().err
            campaign.write_tables(at_once=True)
    assert runs(tmp_path) == [0]


def test_a_file_system_without_record_locks_is_warned_of_once(small, tmp_path, monkeypatch, capsys):
    def lockf(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    run_here(*small, "--runs", 2)
    warning = "cannot be locked (No locks available): launches beside each other need an --out of their own\n"
    assert capsys.readouterr().err.count(warning) == 1
    assert runs(tmp_path) == [0, 1]


# ---- What happens to files


def test_a_table_that_was_edited_cut_or_deleted_is_whole_again_after_the_next_run(small, tmp_path):
    run_here(*small)
    table = tmp_path / "runs.tsv"
    whole = table.read_text()
    for number, damaged in enumerate((whole.replace("night", "x"), whole[:99], None), 1):
        table.unlink() if damaged is None else table.write_text(damaged)
        run_here(*small, "--runs", number + 1)
        assert table.read_text().startswith(whole)
        assert runs(tmp_path) == [*range(number + 1)]


def test_a_campaign_whose_folder_was_moved_away_ends_with_one_line(tmp_path):
    with begin(tmp_path) as campaign:
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        with pytest.raises(
            LostError, match=r"No such file or directory: run 0 of .*night \(seed 0, .*\) is not written"
        ):
            make(campaign, 0)


def test_a_run_waits_for_a_full_disk_without_end_and_an_interruption_loses_only_it(tmp_path, monkeypatch, capsys):
    waits = iter([None, None, KeyboardInterrupt()])

    def sleep(seconds):
        if end := next(waits):
            raise end

    with begin(tmp_path) as campaign:
        make(campaign, 0)
        monkeypatch.setattr(files, "time", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(KeyboardInterrupt):
            make(campaign, 1)
        lines = re.findall(
            r"Warning: No space left on device: run 1 of .*, accuracy 0\.\d+\) is", capsys.readouterr().err
        )
        assert len(lines) == 3
        monkeypatch.undo()
        campaign.write_tables(at_once=True)
    assert runs(tmp_path) == [0]
    assert not [*tmp_path.rglob(".unfinished*")]


def test_a_new_column_does_not_end_an_old_campaign(tmp_path):
    with begin(tmp_path) as campaign:
        make(campaign, 0)
    with begin(tmp_path, humidity="low") as campaign:
        make(campaign, 1)
        campaign.write_tables(at_once=True)
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["humidity"].fillna("").tolist() == ["", "low"]
    with pytest.raises(ConfigError, match=r"humidity \(high, not low\)"):
        begin(tmp_path, humidity="high")


def test_a_table_of_an_earlier_version_is_not_replaced(tmp_path):
    (tmp_path / "runs.tsv").write_text("campaign\n")
    with pytest.raises(ConfigError, match=r"runs.tsv is of an earlier version, and would be replaced: choose another"):
        begin(tmp_path)


def test_a_file_system_without_fsync_is_warned_of_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    for text in ("one", "two"):
        with files.write_atomically(tmp_path / "a") as unfinished:
            unfinished.write_text(text)
    assert (tmp_path / "a").read_text() == "two"
    warning = capsys.readouterr().err
    assert re.fullmatch(
        r"Warning: .*a is written, but a power .* \(Invalid argument\): use another file system\n", warning
    )


@pytest.mark.parametrize(
    ("count", "images", "loss", "reached"),
    [(9399, 10000, 1, False), (9400, 10000, 1, True), (46, 50, 1, False), (47, 50, 1, True), (50, 50, "nan", False)],
)
def test_exactly_94_percent_is_reached_unless_a_run_diverged(count, images, loss, reached):
    row = {"validation_count": count, "validation_images": images, "train_loss": loss, "validation_loss": 1}
    assert reached_goal(row) == reached
