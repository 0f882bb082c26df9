"""Teams, which make whole runs side by side: what they tell the first process, and how long it waits for them."""

import errno
import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import TINY, launch

from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.request.checks import check_agreement
from large_batch_cifar_10_fast.results import run_log
from large_batch_cifar_10_fast.results.clock import PARTS, Clock
from large_batch_cifar_10_fast.results.journal import Journal
from large_batch_cifar_10_fast.results.lines import as_pairs, from_pairs
from large_batch_cifar_10_fast.results.provenance import device_name
from large_batch_cifar_10_fast.results.run_log import RunLog
from large_batch_cifar_10_fast.results.tables import read_rows
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings
from large_batch_cifar_10_fast.training import meeting
from large_batch_cifar_10_fast.training.tally import Score
from large_batch_cifar_10_fast.training.teams import answer_teams, say_alive, say_finished, tell_first
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
# Python reads it at its start: the second team tells its rows well after the first has finished.
SLOW_TEAM = """
import json, os, time
if os.environ.get("RANK") == "1":
    at_once = json.dumps
    json.dumps = lambda thing, **more: (time.sleep(3 * isinstance(thing, list)), at_once(thing, **more))[1]
"""


@pytest.mark.slow
def test_the_first_team_does_not_leave_before_the_others_are_done(tiny_npz, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_TEAM)
    variables = {"TEAMS": 2, "NPROC": 2, "OMP_NUM_THREADS": 1, "PYTHONPATH": tmp_path / "slow"}
    out = tmp_path / "a$$b"  # in torchrun's templates a single $
    arguments = ["--demo", *TINY, "--no_compile", "--runs", 2, "--data", tiny_npz, "--out", out]
    result = launch(*arguments, cwd=tmp_path, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    rows = pd.read_csv(out / "runs.tsv", sep="\t")
    assert len(rows) == 2
    told = sorted(line.split(", ")[1].split(" loss")[0] for line in result.stdout.splitlines() if "Train acc" in line)
    assert told == sorted(f"validation acc {accuracy:.4f}" for accuracy in rows["validation_accuracy"]), (
        "each in its line"
    )
    assert result.stdout.endswith("out of 2\n")


@pytest.fixture
def teams():
    """Two of one process each; whatever waits for them ends with the test."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    yield (teams := [World(0, 1, CPU, 8, team=team, teams=2, store=store) for team in (0, 1)])
    for team in teams:
        say_finished(team)


def test_the_first_process_answers_the_teams_until_all_have_finished(teams):
    first, second = teams
    listening = ThreadPoolExecutor(1).submit(answer_teams, first, lambda word: f"{word} it is")
    assert [tell_first(second, word) for word in ("one", "two")] == ["one it is", "two it is"]
    say_finished(first)
    time.sleep(0.3)
    assert not listening.done()
    say_finished(second)
    listening.result(2)


def test_of_a_team_that_is_stopped_or_far_away_nothing_may_be_heard_any_more(teams, monkeypatch):
    monkeypatch.setenv("TIMEOUT", "1")
    listening = ThreadPoolExecutor(1).submit(answer_teams, teams[0], str)
    time.sleep(1.5)
    assert not listening.done(), "its own runs go on"
    say_finished(teams[0])
    for _ in range(3):
        time.sleep(0.5)
        assert not listening.done(), "a run of another's goes on"
        say_alive(teams[1])
    with pytest.raises(TimeoutError, match="waited for process 1 longer than TIMEOUT"):
        listening.result(5)


def test_where_the_first_process_does_not_answer_it_is_named(teams):
    teams[1].store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="waited for process 0 longer than TIMEOUT"):
        tell_first(teams[1], "one")


def test_another_teams_row_is_in_the_table_before_it_goes_on_and_it_ends_of_what_is_wrong_there(
    teams, tmp_path, capsys, monkeypatch
):
    """The second team's machine has no such folder."""
    monkeypatch.setattr(run_log, "SIGNS", 0)  # of life, at every step
    first, second = teams
    for subject, word in (("device", "another"), ("campaign", "{}")):
        second.store.set(f"{subject}/1", word)
    images = {"images": "none", "train": 0, "test": 0, "digest": "0" * 12}
    logs = []
    for world, out in ((first, tmp_path), (second, tmp_path / "elsewhere")):
        settings = Settings(runs=5, out=str(out), data=str(tmp_path / f"images_{world.team}"))
        logs.append(RunLog(settings, Apple2019(), world, lambda: images, []))
        logs[-1].set_up(Clock(world.synchronize, dict.fromkeys(PARTS, 1.0)), 1, compiled=False)
    clock = Clock(second.synchronize, dict.fromkeys(PARTS, 1.0))
    clock.last["validation"] = 1.0

    def make(run, log=logs[1]):
        for epoch in range(1, run + 2):
            assert [*log.progress("a step", run, epoch)] == [*"a step"]
            log.epoch(clock, Score(95, 100, 1.0))
        log.run(run, clock, Score(1, 3, 1 / 3), Score(95, 100, math.nan if run == 2 else 1.0), network=None)

    with pytest.raises(Refusal, match="another campaign is writing"):
        Journal(tmp_path / "runs.tsv")
    for run in (1, 0, 2):
        make(run)
        row = read_rows(tmp_path / "runs.tsv")[-1]
        assert (row["run"], row["seed"], row["train_accuracy"]) == (str(run), str(run), repr(1 / 3))
        assert (row["goal_epoch"], row["campaign"]) == ("" if run == 2 else "1", logs[0].facts["campaign"])
        assert row["data"] == str(tmp_path / "images_0"), "where --resume, on the first machine, finds them"
    assert (tmp_path / "timing_log.tsv").read_text().count("\n") == 2, "of run 0"
    assert first.store.add("alive", 0) == (2 + 1 + 3) * len("a step")
    with mock.patch("os.fsync", side_effect=lambda _: time.sleep(0.3)):
        told = ThreadPoolExecutor(1).submit(make, 3)
        make(4, logs[0])
        told.result(5)
    assert sorted(row["run"] for row in read_rows(tmp_path / "runs.tsv")) == ["0", "1", "2", "3", "4"]
    assert logs[0].runs_to_make == logs[1].runs_to_make, "they are handed out by their places"
    assert capsys.readouterr().err.startswith("Warning: run 2 (seed 2) stopped after epoch 3 of 18: ")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.fsync", side_effect=full), pytest.raises(OSError, match="No space left"):
        make(3)
    (tmp_path / "runs.tsv").write_text("a\tb\n")
    with pytest.raises(Refusal, match="has other columns"):
        make(3)
    assert not (tmp_path / "elsewhere").exists()
    logs[1].summary()
    with pytest.raises(Refusal, match="has other columns"):
        logs[0].summary()


@pytest.mark.parametrize("what", ["recipe", "width", "seed", "precision", "images", "code", "torch", "finished_runs"])
def test_teams_of_one_process_have_to_agree_as_well(teams, what):
    request = Settings(), Apple2019(), SimpleNamespace(digest="0" * 12), []
    mine = from_pairs(_said_by(teams[0], request))
    teams[1].store.set("request/1", as_pairs({**mine, what: "another"}))
    mine[what] = mine[what] or "none"
    with pytest.raises(Refusal, match=rf"^process 1 has other {what} \(another, not {mine[what]}\) than process 0: "):
        check_agreement(*request, teams[0])
    teams[1].store.set("request/1", _said_by(teams[0], request))
    check_agreement(*request, teams[0])


def _said_by(world, request):
    """What a process tells the others of its request."""
    said = []
    with mock.patch.object(World, "all_gather_words", lambda self, subject, word: said.append(word) or [word]):
        check_agreement(*request, world)
    return said[0]


def test_machines_that_were_told_of_other_teams_refuse_before_they_form_any(monkeypatch):
    store = dist.HashStore()
    dist.PrefixStore("large_batch", store).set("teams/1", "2")
    for name, value in (("has_other_machines", True), ("refuse_with_others", None), ("meet", store)):
        monkeypatch.setattr(meeting, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=ZeroDivisionError("they agree")))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    joining = {teams: meeting.join_world(8, teams) for teams in (1, 2)}
    with pytest.raises(Refusal, match="process 1 has TEAMS=2, process 0 TEAMS=1: give all machines the same"):
        joining[1].__enter__()
    with pytest.raises(ZeroDivisionError, match="they agree"):
        joining[2].__enter__()


def test_a_log_names_every_kind_of_device(teams):
    teams[1].store.set("device/1", "Z80")
    assert device_name(teams[0]).endswith(f"and Z80, 2 teams of 1 x {torch.get_num_threads()} threads")


def test_of_its_own_team_a_process_names_the_silent_and_not_who_is_training(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE", timedelta(seconds=0.2))
    store = dist.HashStore()

    def waiting():
        return meeting.naming_the_silent(store, rank=3, world_size=4, team=range(2, 4))

    with pytest.raises(TimeoutError, match="waited for process 2 longer"), waiting():
        raise RuntimeError("timed out")
    store.set("given up/2", "")
    with pytest.raises(TimeoutError, match="waited for process 0 and 1 longer"), waiting():
        raise RuntimeError("timed out")


def test_whoever_has_joined_names_the_silent(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE", timedelta(seconds=0.2))
    monkeypatch.setattr(meeting, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", mock.Mock())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match="waited for process 1 longer"), meeting.join_world(8):
        raise RuntimeError("timed out")
