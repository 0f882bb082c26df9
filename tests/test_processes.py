"""What processes tell each other and their launcher, and what they may go on with."""

import logging
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pandas as pd
import pytest
import torch
from conftest import REPO, TINY, environment, free_port, train_here

from large_batch_cifar_10_fast import launch
from large_batch_cifar_10_fast.launch import refuse_as_processes_did
from large_batch_cifar_10_fast.request import command_line
from large_batch_cifar_10_fast.request.checks import check_request
from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.request.planning import SIGNALS
from large_batch_cifar_10_fast.results.resuming import CAMPAIGN
from large_batch_cifar_10_fast.results.tables import read_rows
from large_batch_cifar_10_fast.settings.ending import LAUNCH
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings, is_first_machine
from large_batch_cifar_10_fast.training import meeting
from large_batch_cifar_10_fast.training.meeting import launched_teams, meet

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


def test_a_process_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    for rank, absent in ((0, "1 and 2"), (1, "0")):
        with pytest.raises(TimeoutError, match=f"^waited for process {absent} longer than TIMEOUT$"):
            meet(rank, 3, timedelta(seconds=1))
    monkeypatch.setattr(meeting, "SLACK", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # it takes calls, and never answers
        monkeypatch.setenv("MASTER_PORT", str(stopped.getsockname()[1]))
        with pytest.raises(TimeoutError, match=r"^waited for process 0 longer than TIMEOUT$"):
            meet(1, 3, timedelta(seconds=1))


def test_what_is_left_of_another_launchs_variables_is_answered(monkeypatch):
    assert is_first_machine({"NODE_RANK": "1"})
    assert not is_first_machine({"NODE_RANK": "1", "NNODES": "2"})
    assert not is_first_machine({"GROUP_RANK": "1"}), "as torchrun tells its processes"
    monkeypatch.setenv("TEAMS", "2")
    with pytest.raises(Refusal, match="TEAMS=2 cannot be made of 1 processes"):
        launched_teams()


def test_what_is_refused_when_runs_are_made_tells_how_to_go_on(tiny_npz, tmp_path, monkeypatch, capsys):
    arguments = ["--demo", *TINY, "--no_compile", "--data", str(tiny_npz), "--out", str(tmp_path)]
    for variable in ("OMP_NUM_THREADS", LAUNCH, CAMPAIGN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(variable, "")  # and put back after what main makes of it

    def launch_that_runs_out_of_memory(runs: int, *more: str, spoil: bool = False) -> str:
        def run(*_):
            for run in range(runs):
                train_here(*arguments, "--runs", "2", "--share", f"{run}/2")
            if spoil:
                (tmp_path / "runs.tsv").write_text("a\tb\n")
            raise Refusal("no memory")

        monkeypatch.setattr(launch, "run_processes", run)
        monkeypatch.setattr(sys, "argv", ["launch", *arguments, "--runs", "2", *more])
        with pytest.raises(SystemExit) as end:
            launch.main()
        assert end.value.code == 2
        return capsys.readouterr().err

    for spoil in (False, True):
        assert launch_that_runs_out_of_memory(0, spoil=spoil) == "train_cifar_parallel.sh: no memory\n"
    (tmp_path / "runs.tsv").unlink()
    told = launch_that_runs_out_of_memory(1, "--share", "0/2")
    assert told == "train_cifar_parallel.sh: no memory; all its 1 runs are made\n"


def test_a_signal_after_all_processes_have_ended_is_no_traceback(tmp_path, monkeypatch):
    logger = logging.getLogger("torch.distributed")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    monkeypatch.setattr(launch.torchrun, "run", lambda _: signal.signal(signal.SIGTERM, lambda *_: 1 / 0))
    monkeypatch.setattr(launch.torchrun, "parse_args", list)
    try:
        assert launch.run_processes([], Settings(), str(tmp_path)) == 0
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


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


@pytest.mark.slow
def test_memory_that_a_step_frees_is_there_for_the_next_without_the_system():
    """128 MB are 32 thousand pages, which the system would clear one by one, each time anew.

    The heap grows at first, by up to eight blocks, as its beginning is aligned."""
    program = """
import resource, torch
from large_batch_cifar_10_fast.training.meeting import join_world
with join_world(1):
    for _ in range(25):
        block = torch.ones(32, 1024, 1024)
        del block
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    variables = environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=variables, cwd=REPO, capture_output=True, text=True)
    faults = [int(line) for line in ran.stdout.split()]
    assert len(faults) == 25, ran.stderr
    assert faults[-1] - faults[12] < 1000
