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
from large_batch_cifar_10_fast.campaign import CAMPAIGN, SUPERVISED, finished_rows, read_rows
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.launch import SIGNALS, raise_config_error_of_processes
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig

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
from pathlib import Path
from large_batch_cifar_10_fast import launch
from large_batch_cifar_10_fast.options import Launch, exit_on_config_error
given = launch.torchrun_arguments
launch.torchrun_arguments = lambda *arguments: [*given(*arguments)[:-3], sys.argv[1]]
with exit_on_config_error("train_cifar_parallel.sh"):
    sys.exit(launch.start_processes([], Launch(), 2, Path(), str))
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
    raise_config_error_of_processes(tmp_path)
    (tmp_path / "0" / "error.json").write_text('{"message": {"message": "ConfigError: a line: and more"}}')
    with pytest.raises(ConfigError, match=r"^a line: and more$"):
        raise_config_error_of_processes(tmp_path)


def test_a_signal_after_all_processes_have_ended_is_no_traceback(tmp_path, monkeypatch):
    logger = logging.getLogger("torch.distributed")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    monkeypatch.setattr(launch.torchrun, "run", lambda _: signal.signal(signal.SIGTERM, lambda *_: 1 / 0))
    monkeypatch.setattr(launch.torchrun, "parse_args", list)
    try:
        assert launch.start_processes([], Launch(), 1, tmp_path, str) == 0
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
    assert len(finished_rows(str(tmp_path), False)) == 2
    table = tmp_path / "runs.tsv"
    code = read_rows(table)[0]["code"]
    table.write_text(table.read_text().replace(code, "0" * 12))
    with pytest.raises(ConfigError, match=f"had other code \\(000000000000 then, {code} now\\)"):
        finished_rows(str(tmp_path), False)


@pytest.mark.slow
def test_another_machine_looks_for_its_own_images_where_the_firsts_are_not(tiny_npz, tmp_path, monkeypatch):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", "2", "--data", str(tiny_npz), "--out", str(tmp_path)]
    train_here(*arguments)
    rows = read_rows(tmp_path / "runs.tsv")[:1]
    monkeypatch.setattr(command_line, "finished_rows", lambda *_: rows)
    here, absent, usual = str(tiny_npz), "/absent/tiny.npz", RunConfig().data
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
