"""What processes tell each other and their launcher, and what they may go on with."""

import logging
import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch
from conftest import REPO, TINY, environment, train_here

from large_batch_cifar_10_fast import command_line, launch
from large_batch_cifar_10_fast.campaign import CAMPAIGN, STARTED, SUPERVISED, finished_rows, read_rows
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.ending import LAUNCH
from large_batch_cifar_10_fast.launch import SIGNALS, raise_config_error_of_processes
from large_batch_cifar_10_fast.options import ConfigError, Launch, Settings

ONE_REFUSES = """
import os, time
from large_batch_cifar_10_fast.options import ConfigError
from large_batch_cifar_10_fast.distributed import leaving
with leaving():
    if os.environ["RANK"] == "1":
        raise ConfigError("only this one sees it")
    time.sleep(60)
"""
LAUNCH_THEM = """
import sys
from large_batch_cifar_10_fast import launch
from large_batch_cifar_10_fast.options import Launch, Settings, exit_on_config_error
with exit_on_config_error("train_cifar_parallel.sh"), launch.scratch_folder() as scratch:
    arguments = launch.torchrun_arguments(Launch(), 2, scratch)[:-3]
    sys.exit(launch.run_processes([*arguments, sys.argv[1]], Settings(), Launch(), scratch))
"""


@pytest.mark.slow
def test_a_refusal_of_any_process_is_one_line(tmp_path):
    (tmp_path / "one_refuses.py").write_text(ONE_REFUSES)
    variables = environment(PYTHONPATH=REPO, LARGE_BATCH_LAUNCH=0, TMPDIR=tmp_path)
    command = [sys.executable, "-c", LAUNCH_THEM, tmp_path / "one_refuses.py"]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (2, "train_cifar_parallel.sh: only this one sees it\n")


def test_what_no_process_finished_writing_is_no_refusal(tmp_path):
    for number, text in enumerate(("", "{", '{"message": "killed"}', '{"message": {"message": "ValueError: x"}}')):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "error.json").write_text(text)
    raise_config_error_of_processes(str(tmp_path))
    (tmp_path / "0" / "error.json").write_text('{"message": {"message": "ConfigError: a line: and more"}}')
    with pytest.raises(ConfigError, match=r"^a line: and more$"):
        raise_config_error_of_processes(str(tmp_path))


def test_what_is_refused_when_runs_are_made_tells_how_to_go_on(tiny_npz, tmp_path, monkeypatch, capsys):
    arguments = ["--demo", *TINY, "--no_compile", "--data", str(tiny_npz), "--out", str(tmp_path)]
    for variable in ("OMP_NUM_THREADS", LAUNCH, CAMPAIGN, STARTED, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(variable, "")  # and put back after what main makes of it

    def launch_that_runs_out_of_memory(runs: int, *more: str, spoil: bool = False) -> str:
        def run(*_):
            for run in range(runs):
                train_here(*arguments, "--runs", "2", "--share", f"{run}/2")
            if spoil:
                (tmp_path / "runs.tsv").write_text("a\tb\n")
            raise ConfigError("no memory")

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
        assert launch.run_processes([], Settings(), Launch(), str(tmp_path)) == 0
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@pytest.mark.slow
def test_a_campaign_heals_only_with_its_own_code(tiny_npz, tmp_path, monkeypatch):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    monkeypatch.setenv(CAMPAIGN, "mine")
    train_here(*arguments)
    monkeypatch.setenv(SUPERVISED, "1")
    settings, _ = read_request(arguments)
    assert len(finished_rows(settings)) == 2
    table = tmp_path / "runs.tsv"
    code = read_rows(table)[0]["code"]
    table.write_text(table.read_text().replace(code, "0" * 12))
    with pytest.raises(ConfigError, match=f"had other code \\(000000000000 then, {code} now\\)"):
        finished_rows(settings)


@pytest.mark.slow
def test_another_machine_looks_for_its_own_images_where_the_firsts_are_not(tiny_npz, tmp_path, monkeypatch):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    train_here(*arguments)
    rows = read_rows(tmp_path / "runs.tsv")[:1]
    monkeypatch.setattr(command_line, "finished_rows", lambda settings: rows)
    here, absent, usual = str(tiny_npz), "/absent/tiny.npz", Settings().data
    for rank, there, data in (("0", here, here), ("0", absent, absent), ("1", here, here), ("1", absent, usual)):
        rows[0]["data"] = there
        monkeypatch.setenv("RANK", rank)
        assert read_request(["--resume", "--out", str(tmp_path)])[0].data == data


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
    with pytest.raises(ConfigError, match=r"had other compile \(True then, False now\)"):
        train_here("--resume", "--out", tmp_path)
    assert capsys.readouterr().err.startswith("Warning: not compiled (no compiler): ")
    assert len(pd.read_csv(table, sep="\t")) == 1


@pytest.mark.slow
def test_memory_that_a_step_frees_is_there_for_the_next_without_the_system():
    """128 MB are 32 thousand pages, which the system would clear one by one, each time anew.

    The heap grows at first, by up to eight blocks, as its beginning is aligned."""
    program = """
import resource, torch
from large_batch_cifar_10_fast.distributed import init_distributed
with init_distributed(1):
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
