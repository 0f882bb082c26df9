"""What processes and teams tell each other and their launcher, and in which order they leave."""

import errno
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import REPO, TINY, environment, launch, train_here

from large_batch_cifar_10_fast.launch import refuse_as_processes_did
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.request import command_line
from large_batch_cifar_10_fast.request.checks import check_agreement, check_request
from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.results.clock import PARTS, Clock
from large_batch_cifar_10_fast.results.journal import Journal
from large_batch_cifar_10_fast.results.provenance import device_name
from large_batch_cifar_10_fast.results.resuming import CAMPAIGN
from large_batch_cifar_10_fast.results.run_log import RunLog
from large_batch_cifar_10_fast.results.tables import read_rows
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings, is_first_machine
from large_batch_cifar_10_fast.training import world as worlds
from large_batch_cifar_10_fast.training.process import launched_teams
from large_batch_cifar_10_fast.training.tally import Score
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
ONE_REFUSES = """
import os, time
from large_batch_cifar_10_fast.settings.settings import Refusal
from large_batch_cifar_10_fast.training.process import leaving
with leaving():
    if os.environ["RANK"] == "1":
        raise Refusal("only this one sees it")
    time.sleep(60)
"""
LAUNCH_THEM = """
import sys
from large_batch_cifar_10_fast import launch
from large_batch_cifar_10_fast.settings.settings import Settings, refusals_end
with refusals_end("train_cifar_parallel.sh"), launch.scratch_folder() as scratch:
    arguments = launch.torchrun_arguments(launch.os.environ, 2, scratch)[:-2]
    sys.exit(launch.run_processes([*arguments, sys.argv[1]], Settings(), scratch))
"""
# Python reads it at its start: the second team tells its rows well after the first has finished.
SLOW_TEAM = """
import json, os, time
if os.environ.get("RANK") == "1":
    at_once = json.dumps
    json.dumps = lambda thing, **more: (time.sleep(3 * isinstance(thing, list)), at_once(thing, **more))[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_refusal_of_any_process_is_one_line_and_nothing_is_started_anew(tmp_path, restarts):
    (tmp_path / "one_refuses.py").write_text(ONE_REFUSES)
    variables = environment(PYTHONPATH=REPO, LARGE_BATCH_LAUNCH=0, TMPDIR=tmp_path, RESTARTS=restarts)
    command = [sys.executable, "-c", LAUNCH_THEM, tmp_path / "one_refuses.py"]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (2, "train_cifar_parallel.sh: only this one sees it\n")


def test_what_no_process_finished_writing_is_no_refusal(tmp_path):
    for number, text in enumerate(("", "{", '{"message": "killed"}', '{"message": {"message": "ValueError: x"}}')):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "error.json").write_text(text)
    refuse_as_processes_did(str(tmp_path))
    (tmp_path / "0" / "error.json").write_text('{"message": {"message": "Refusal: a line: and more"}}')
    with pytest.raises(Refusal, match=r"^a line: and more$"):
        refuse_as_processes_did(str(tmp_path))


@pytest.mark.slow
def test_the_first_team_does_not_leave_before_the_others_are_done(tiny_npz, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_TEAM)
    variables = {"TEAMS": 2, "NPROC": 2, "OMP_NUM_THREADS": 1, "PYTHONPATH": tmp_path / "slow"}
    result = launch("--demo", *TINY, "--no_compile", "--runs", 2, "--data", tiny_npz, cwd=tmp_path, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
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
    store.set_timeout(worlds.timedelta(seconds=10))
    yield (teams := [World(0, 1, CPU, 8, team=team, teams=2, store=store) for team in (0, 1)])
    for team in teams:
        team.say_finished()


def test_the_first_process_answers_the_teams_until_all_have_finished(teams):
    first, second = teams
    listening = ThreadPoolExecutor(1).submit(first.answer_teams, "row", lambda word: f"{word} it is")
    assert [second.tell_first("row", word) for word in ("one", "two")] == ["one it is", "two it is"]
    first.say_finished()
    time.sleep(0.3)
    assert not listening.done()
    second.say_finished()
    listening.result(2)


def test_of_another_machine_nothing_may_be_heard_any_more(teams, monkeypatch):
    monkeypatch.setattr(worlds, "has_other_machines", lambda: True)
    monkeypatch.setenv("TIMEOUT", "1")
    listening = ThreadPoolExecutor(1).submit(teams[0].answer_teams, "row", str)
    time.sleep(1.5)
    assert not listening.done(), "its own runs go on"
    teams[0].say_finished()
    for _ in range(3):
        time.sleep(0.5)
        assert not listening.done(), "a run of another's goes on"
        teams[1].say_alive()
    with pytest.raises(TimeoutError, match="waited for process 1 longer than TIMEOUT"):
        listening.result(5)


def test_where_the_first_process_does_not_answer_it_is_named(teams):
    teams[1].store.set_timeout(worlds.timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="waited for process 0 longer than TIMEOUT"):
        teams[1].tell_first("row", "one")


def test_another_teams_row_is_in_the_table_before_it_goes_on_and_it_ends_of_what_is_wrong_there(
    teams, tmp_path, capsys
):
    """The second team's machine has no such folder."""
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
        for _ in range(run + 1):
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
    assert first.store.add("alive", 0) == 2 + 1 + 3, "epochs"
    with mock.patch("os.fsync", side_effect=lambda _: time.sleep(0.3)):
        told = ThreadPoolExecutor(1).submit(make, 3)
        make(4, logs[0])
        told.result(5)
    assert sorted(row["run"] for row in read_rows(tmp_path / "runs.tsv")) == ["0", "1", "2", "3", "4"]
    assert logs[0].runs_to_make == logs[1].runs_to_make, "they are handed out by their places"
    assert capsys.readouterr().err == "Warning: run 2 (seed 2) diverged: its loss is not finite\n"
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


def test_teams_of_one_process_have_to_agree_as_well(teams):
    teams[1].store.set("request/1", "recipe=another")
    with pytest.raises(Refusal, match=r"process 1 has other recipe \(another, not apple2019\), "):
        check_agreement(Settings(), Apple2019(), SimpleNamespace(digest="0" * 12), [], teams[0])


def test_a_log_names_every_kind_of_device(teams):
    teams[1].store.set("device/1", "Z80")
    assert device_name(teams[0]).endswith(f"and Z80, 2 teams of 1 x {torch.get_num_threads()} threads")


def test_of_its_own_team_a_process_names_the_silent_and_not_who_is_training(monkeypatch):
    monkeypatch.setattr(worlds, "GRACE", worlds.timedelta(seconds=0.2))
    store = dist.HashStore()
    world = World(1, 2, CPU, 8, team=1, teams=2, store=store)  # place 3 of 4; 0 and 1 are the other team
    with pytest.raises(TimeoutError, match="waited for process 2 longer"), world.naming_the_silent():
        raise RuntimeError("timed out")
    store.set("given up/2", "")
    with pytest.raises(TimeoutError, match="waited for process 0 and 1 longer"), world.naming_the_silent():
        raise RuntimeError("timed out")


def test_what_is_left_of_another_launchs_variables_is_answered(monkeypatch):
    assert is_first_machine({"NODE_RANK": "1"})
    assert not is_first_machine({"NODE_RANK": "1", "NNODES": "2"})
    assert not is_first_machine({"GROUP_RANK": "1"}), "as torchrun tells its processes"
    monkeypatch.setenv("TEAMS", "2")
    with pytest.raises(Refusal, match="TEAMS=2 cannot be made of 1 processes"):
        launched_teams()


@pytest.mark.slow
def test_a_campaign_heals_only_with_its_own_code(tiny_npz, tmp_path, monkeypatch):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    monkeypatch.setenv(CAMPAIGN, "mine")
    train_here(*arguments)
    request = read_request(arguments, {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_request(*request, 1)
    table = tmp_path / "runs.tsv"
    code = read_rows(table)[0]["code"]
    table.write_text(table.read_text().replace(code, "0" * 12))
    with pytest.raises(Refusal, match=f"had other code \\(000000000000 then, {code} now\\)"):
        check_request(*request, 1)


@pytest.mark.slow
def test_another_machine_looks_for_its_own_images_where_the_firsts_are_not(tiny_npz, tmp_path, monkeypatch):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    train_here(*arguments)
    rows = read_rows(tmp_path / "runs.tsv")[:1]
    monkeypatch.setattr(command_line, "finished_rows", lambda settings: rows)
    here, absent, usual = str(tiny_npz), "/absent/tiny.npz", Settings().data
    for rank, there, data in (("0", here, here), ("0", absent, absent), ("1", here, here), ("1", absent, usual)):
        rows[0]["data"] = there
        variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert read_request(["--resume", "--out", str(tmp_path)], {})[0].data == data


@pytest.mark.slow
def test_runs_that_were_compiled_are_not_mixed_with_runs_that_cannot_be(tiny_npz, tmp_path, monkeypatch, capsys):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    train_here(*arguments)
    table = tmp_path / "runs.tsv"
    rows = pd.read_csv(table, sep="\t", dtype=str, keep_default_na=False)
    rows.assign(compile="True").iloc[:1].to_csv(table, sep="\t", index=False)

    def fail(images):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda network, **_: fail)
    with pytest.raises(Refusal, match=r"had other compile \(True then, False now\)"):
        train_here("--resume", "--out", tmp_path)
    assert capsys.readouterr().err.startswith("Warning: not compiled (no compiler): ")
    assert len(pd.read_csv(table, sep="\t")) == 1
