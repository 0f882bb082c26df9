"""A campaign loses nothing: killed and resumed, or made in shares, it equals an uninterrupted one."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from attack import processes_of
from conftest import DIFFERENT, LAUNCHER, TINY, environment, run_here, train_together, without_progress

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab.results import read_results

pytestmark = pytest.mark.slow

RUNS = 5
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def arguments(tiny_npz) -> list[str]:
    return ["--demo", *TINY, "--data", str(tiny_npz), "--runs", str(RUNS), "--seed", "5"]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> tuple[Path, str]:
    """Return folder and log of an uninterrupted campaign of two processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train_together(2, *arguments, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return folder, result.stdout


def test_log_and_tables_hold_every_run_and_epoch(uninterrupted):
    """Without the lines that begin with #, the log has the published form."""
    folder, text = uninterrupted
    found = read_results(f"{folder}/runs.tsv")
    lines = re.sub("(?m)^#.*\n", "", text).splitlines()
    words = ["Uploaded data", "Compute patch", *RUNS * ["Train acc"], "Maximum training", "Lowest accuracy", "0 runs"]
    assert [" ".join(line.split()[:2]) for line in lines] == words
    form = r"Train acc \S+ loss \S+, validation acc (0\.\d{4}) loss (\d+\.\d{3}) wall time (\d+\.\d{3})s\n"
    printed = np.array(re.findall(form, text), float)
    np.testing.assert_allclose(printed[:, [0, 2]], found.runs[["accuracy", "seconds"]], atol=6e-4)
    assert float(lines[-3].split()[3]) == found.runs["seconds"].max()
    assert found.runs["seed"].tolist() == [*map(str, range(5, 5 + RUNS))]
    assert found.epochs["epoch"].tolist() == RUNS * [1, 2]
    np.testing.assert_allclose(found.epochs["accuracy"][1::2], found.runs["accuracy"])
    curve = pd.read_csv(folder / "timing_log.tsv", sep="\t")
    np.testing.assert_allclose(curve["top1Accuracy"], 100 * found.epochs["accuracy"][:2], rtol=1e-5)


def results(folder: Path) -> pd.DataFrame:
    """Return the rows by run, without the columns that differ if a run is made again."""
    rows = pd.read_csv(folder / "runs.tsv", sep="\t", dtype=str).sort_values("run", ignore_index=True)
    return rows.drop(columns=[*DIFFERENT, "device"])


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start a launch in `folder`, under nohup; kill all processes at the end."""
    command = ["nohup", "bash", str(LAUNCHER), *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": folder, "env": environment(OMP_NUM_THREADS=1, TMPDIR=folder), "start_new_session": True}
    with subprocess.Popen(command, **how, **pipes) as process:
        try:
            yield process
        finally:
            for pid in processes_of(folder):
                os.kill(pid, signal.SIGKILL)


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows_of(out: Path) -> int:
    """Return the number of finished runs."""
    return len([*out.glob("runs/*/[0-9]*.json")])


def trainers(folder: Path) -> list[int]:
    return sorted(processes_of(folder, "LARGE_BATCH_LAUNCHER="))


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen, in hexadecimal."""
    files = {link.resolve().name for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for table in Path("/proc/net").glob("tcp*") for line in table.read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in files}


def test_ended_and_continued_a_campaign_equals_an_uninterrupted_one(arguments, tmp_path, uninterrupted):
    """Ended by the loss of a process, and by Ctrl-C. nohup ignores SIGHUP."""
    words = [*arguments, "--campaign", "night", "--nproc", "2"]
    with started(tmp_path, *words) as process:
        wait_for(lambda: rows_of(tmp_path) == 1)
        assert set() < listening(processes_of(tmp_path)) <= LOOPBACK, "the rendezvous is on this machine"
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGHUP)
        wait_for(lambda: rows_of(tmp_path) == 2)
        os.kill(trainers(tmp_path)[1], signal.SIGKILL)
        check_end(process, tmp_path, 1, "process 1 was ended by SIGKILL")
    kept = {path: path.read_bytes() for path in tmp_path.glob("runs/night/0*.json")}
    with started(tmp_path, *words) as process:
        wait_for(lambda: len(trainers(tmp_path)) == 2 and listening(trainers(tmp_path)))
        os.killpg(process.pid, signal.SIGINT)
        check_end(process, tmp_path, 128 + signal.SIGINT, "ended by SIGINT")
    result = train_together(2, *arguments, "--resume", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), "no run is made twice"
    assert {path: path.read_bytes() for path in kept} == kept, "finished runs are not touched"
    check_equal(tmp_path, result.stdout, *uninterrupted)


def check_end(process: subprocess.Popen, folder: Path, status: int, reason: str) -> None:
    """Of a launch that was ended no process is left, and its last line says how it ended and what continues it."""
    assert process.wait(timeout=20) == status
    wait_for(lambda: not processes_of(folder))
    made = f"; {rows_of(folder)} of {RUNS} runs are finished"
    how = f"train: {reason}.*{made}; the same command with --campaign night continues\n"
    assert re.fullmatch(how, without_progress(process.stderr.read()))


def check_equal(folder: Path, log: str, other: Path, other_log: str) -> None:
    pd.testing.assert_frame_equal(results(folder), results(other))
    assert log.splitlines()[-2:] == other_log.splitlines()[-2:]


def test_two_launches_make_the_runs_of_one_and_end_with_their_launcher(arguments, tmp_path, uninterrupted):
    words = [*arguments, "--campaign", "both", "--save", "w.pt", "--nproc", "2"]
    with started(tmp_path, *words) as process:
        wait_for(lambda: len(trainers(tmp_path)) == 2 and [*tmp_path.glob("runs/both/campaign.json")])
        process.kill()
        wait_for(lambda: not processes_of(tmp_path))
    assert rows_of(tmp_path) < RUNS, "they trained without it"
    with started(tmp_path, *words) as process, started(tmp_path, *words) as other:
        for launch in (process, other):
            errors = without_progress(launch.communicate(timeout=200)[1])
            assert (launch.returncode, errors) == (0, "")
    check_equal(tmp_path, train_together(2, *words[:-2], cwd=tmp_path).stdout, *uninterrupted)
    assert torch.load(tmp_path / "w.pt", weights_only=True)["about"]["run"] == str(RUNS - 1)


def test_other_conditions_are_refused_in_one_line_that_names_them(arguments, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0] / "runs", tmp_path / "runs")
    (path,) = tmp_path.glob("runs/*/campaign.json")
    campaign = json.loads(path.read_text())
    campaign["conditions"] |= {"code": "7", "torch": "7"}
    path.write_text(json.dumps(campaign))
    before = path.read_bytes()
    options = ["--lr_scaler", 1.25, "--seed", 3, "--holdout", 100, "--precision", "bf16", "--resume"]
    with pytest.raises(ConfigError, match=r"^campaign \S+ cannot be continued with [^\n]*$") as error:
        run_here(*arguments, *options, "--out", tmp_path)
    found = ["lr_scaler (1.25, not 1.0)", "seed (3, not 5)", "precision (bf16, not fp32)", "processes (1, not 2)"]
    found += ["digest (", "code (", "torch (", "device (CPU "]
    for condition in found:
        assert condition in str(error.value)
    assert path.read_bytes() == before
