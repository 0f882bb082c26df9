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
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from attack import processes_of
from conftest import (
    ALONE,
    DIFFERENT,
    LAUNCHER,
    TINY,
    environment,
    run_here,
    train_together,
    without_progress,
    write_npz,
)

from large_batch_cifar_10_fast import ConfigError, LostError
from large_batch_cifar_10_fast.core.score import Epoch, Score
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import log
from large_batch_cifar_10_fast.lab.log import Recorder
from large_batch_cifar_10_fast.lab.options import Options
from large_batch_cifar_10_fast.lab.process import exit_process
from large_batch_cifar_10_fast.lab.results import read_log
from large_batch_cifar_10_fast.lab.store import finished_runs, write_tables

pytestmark = pytest.mark.slow

RUNS = 5
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def arguments(tiny_npz) -> list[str]:
    return ["--demo", *TINY, "--data", str(tiny_npz), "--runs", str(RUNS), "--seed", "5"]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> tuple[Path, str]:
    """Return table and log of an uninterrupted campaign of two processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train_together(2, *arguments, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return folder / "runs.tsv", result.stdout


def test_log_and_tables_hold_every_run_and_epoch(uninterrupted):
    """Without the lines that begin with #, the log has the published form."""
    runs, text = uninterrupted
    found = read_log(str(runs))
    lines = re.sub("(?m)^#.*\n", "", text).splitlines()
    words = ["Uploaded data", "Compute patch", *RUNS * ["Train acc"], "Maximum training", "Lowest accuracy", "0 runs"]
    assert [" ".join(line.split()[:2]) for line in lines] == words
    form = r"Train acc \S+ loss \S+, validation acc (\S+) loss (\S+) wall time (\S+)s"
    printed = [re.fullmatch(form, line).groups() for line in lines[2 : 2 + RUNS]]
    for place, (name, places) in enumerate((("accuracy", 4), ("validation_loss", 3), ("seconds", 3))):
        assert [float(values[place]) for values in printed] == [round(value, places) for value in found.runs[name]]
    assert float(lines[-3].split()[3]) == found.runs["seconds"].max()
    assert found.runs["seed"].tolist() == [*range(5, 5 + RUNS)]
    assert (101 * found.runs["accuracy"] % 1).round(9).isin([0, 1]).all()
    assert found.epochs["epoch"].tolist() == RUNS * [1, 2]
    for name in ("seconds", "accuracy", "validation_loss"):
        assert found.epochs[name][1::2].tolist() == pytest.approx(found.runs[name].tolist())
    curve = pd.read_csv(runs.with_name("timing_log.tsv"), sep="\t")
    assert (3600 * curve["hours"]).tolist() == pytest.approx(found.epochs["seconds"][:2].tolist(), rel=1e-5)
    assert (curve["top1Accuracy"] / 100).tolist() == pytest.approx(found.epochs["accuracy"][:2].tolist(), rel=1e-5)


def results(path: Path) -> pd.DataFrame:
    """Return the rows of a table by run, without the columns that differ if a run is made again."""
    rows = pd.read_csv(path, sep="\t", dtype=str).sort_values("run", ignore_index=True)
    return rows.drop(columns=[*DIFFERENT, "device"], errors="ignore")


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start a launch in `folder`, under nohup; kill all processes at the end."""
    command = ["nohup", "bash", str(LAUNCHER), *map(str, arguments)]
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
    trains = b"large_batch_cifar_10_fast.lab.process\0"
    return sorted(pid for pid in processes_of(folder) if trains in Path(f"/proc/{pid}/cmdline").read_bytes())


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen, in hexadecimal."""
    links = [os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    entries = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {entry[1].split(":")[0] for entry in entries if entry[3] == "0A" and f"socket:[{entry[9]}]" in links}


def test_ended_and_continued_a_campaign_equals_an_uninterrupted_one(arguments, tmp_path, uninterrupted):
    """Ended by the loss of a process, and by Ctrl-C. nohup ignores SIGHUP."""
    table = tmp_path / "runs.tsv"
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
        wait_for(lambda: len(trainers(tmp_path)) == 2)
        os.killpg(process.pid, signal.SIGINT)
        check_end(process, tmp_path, 128 + signal.SIGINT, "ended by SIGINT")
    result = train_together(2, *arguments, "--resume", cwd=tmp_path)
    assert result.returncode == 0
    assert {path: path.read_bytes() for path in kept} == kept, "finished runs are not touched"
    pd.testing.assert_frame_equal(results(table), results(uninterrupted[0]))
    assert result.stdout.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]


def check_end(process: subprocess.Popen, folder: Path, status: int, reason: str) -> None:
    """Of a launch that was ended no process is left, and its last line says how it ended and what continues it."""
    assert process.wait(timeout=20) == status
    wait_for(lambda: not processes_of(folder))
    made = f"; {rows_of(folder)} of {RUNS} runs are finished"
    how = f"train: {reason}.*{made}; the same command with --campaign night continues\n"
    assert re.fullmatch(how, without_progress(process.stderr.read()))


def test_two_teams_make_the_rows_and_weights_of_one_process_and_end_with_their_launcher(small, tmp_path):
    words = [*small, "--runs", 4, "--campaign", "both", "--save", "w.pt"]
    (alone := tmp_path / "alone").mkdir()
    of_one = train_together(1, *words, cwd=alone)
    with started(tmp_path, *words, "--nproc", 1, "--teams", 2) as process:
        wait_for(lambda: len(trainers(tmp_path)) == 2)
        process.kill()
        wait_for(lambda: not processes_of(tmp_path))
    assert rows_of(tmp_path) == 0, "they trained without it"
    with started(tmp_path, *words, "--nproc", 1, "--teams", 2) as process:
        output, errors = process.communicate(timeout=200)
    assert (process.returncode, without_progress(errors)) == (0, "")
    assert output.splitlines()[-2:] == of_one.stdout.splitlines()[-2:]
    pd.testing.assert_frame_equal(results(tmp_path / "runs.tsv"), results(alone / "runs.tsv"))
    weights, others = (torch.load(folder / "w.pt", weights_only=True)["weights"] for folder in (tmp_path, alone))
    assert all(torch.equal(weights[name], others[name]) for name in others)


@pytest.fixture(scope="module")
def small(tiny_npz) -> list[object]:
    return ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--seed", 7]


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    run_here(*small, "--runs", 5, "--campaign", "whole", "--out", folder := tmp_path_factory.mktemp("whole"))
    return folder / "runs.tsv"


def test_only_missing_runs_are_trained_and_more_runs_can_be_added(small, whole, monkeypatch, tmp_path):
    trained, finish = [], Recorder.finish
    monkeypatch.setattr(Recorder, "finish", lambda log, *last: trained.append(log.run) or finish(log, *last))
    for kept in ("source", "runs"):
        shutil.copytree(whole.parent / kept, tmp_path / kept)
    for run in (2, 3, 4):
        (tmp_path / "runs" / "whole" / f"{run:04}.json").unlink()
    table = tmp_path / "runs.tsv"
    run_here(*small, "--runs", 3, "--resume", "--out", tmp_path)
    assert trained == [2], "of three, two were finished"
    run_here(*small, "--runs", 3, "--resume", "--out", tmp_path)
    assert trained == [2]
    run_here(*small, "--runs", 5, "--campaign", "whole", "--out", tmp_path)
    assert trained == [2, 3, 4]
    pd.testing.assert_frame_equal(results(table), results(whole))


def test_other_conditions_are_refused_in_one_line_that_names_them(small, whole, tmp_path, monkeypatch):
    """Variables that are known to change results are a condition, too."""
    shutil.copytree(whole.parent / "runs", tmp_path / "runs")
    path = tmp_path / "runs" / "whole" / "campaign.json"
    campaign = json.loads(path.read_text())
    campaign["conditions"] |= {"code": "7", "torch": "7", "device": "abacus", "processes": "2"}
    path.write_text(json.dumps(campaign))
    before = path.read_bytes()
    others = write_npz(tmp_path / "others.npz", *draw_shapes(643, 102))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_ALGO", "Ring,Tree\t\nx y")
    options = ["--lr_scaler", 1.25, "--seed", 3, "--data", others, "--precision", "bf16", "--campaign", "whole"]
    with pytest.raises(ConfigError, match=r"^campaign whole cannot be continued with [^\n]*$") as error:
        run_here(*small, *options, "--out", tmp_path)
    found = ["lr_scaler (1.25, not 1.0)", "seed (3, not 7)", "precision (bf16, not fp32)", "processes (1, not 2)"]
    found += ["digest (", "code (", "torch (", "device (CPU ", "environment (NCCL_ALGO=Ring%2CTree%09%0Ax%20y, not -)"]
    for condition in found:
        assert condition in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("seconds", "lines"), [(4, 13), (11, 40), (0.1, 0)])
def test_without_a_terminal_an_epoch_is_seen_in_ten_seconds(seconds, lines, monkeypatch, capsys):
    """Of forty epochs."""
    now = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = SimpleNamespace(last={"training": seconds, "validation": 0}.get)
    recorder = Recorder(Options(), ALONE, {}, None)
    recorder.machine = SimpleNamespace(clock=clock)
    recorder.run_epochs = 40
    for number in range(1, 41):
        now[0] += seconds
        recorder.show_epoch(Epoch(number, now[0], Score(1, 2, 0.5), Score(1, 2, 0.5), None), 100)
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_epochs_are_in_the_table_while_a_run_is_made(tiny_npz, tmp_path, monkeypatch):
    """A run that was interrupted has epochs, but no row, until the next launch."""
    options, epoch = ["--demo", *TINY, "--data", tiny_npz, "--out", tmp_path, "--campaign", "a"], Recorder.epoch
    first = iter([True])
    monkeypatch.setattr(Recorder, "epoch", lambda *given: epoch(*given) if next(first, None) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(*options)
    write_tables(tmp_path)
    assert pd.read_csv(tmp_path / "epochs.tsv", sep="\t")["epoch"].tolist() == [1]
    monkeypatch.setattr(Recorder, "epoch", epoch)
    run_here(*options)
    assert pd.read_csv(tmp_path / "epochs.tsv", sep="\t")["epoch"].tolist() == [1, 2]


def test_a_run_is_not_lost_if_tables_cannot_be_written(small, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "lock").touch()
    (tmp_path / "runs.tsv").mkdir()
    run_here(*small, "--out", tmp_path, "--campaign", "night")
    assert re.search("Warning: runs.tsv is not written", capsys.readouterr().err)
    assert finished_runs(tmp_path / "runs" / "night") == [0]


def test_what_cannot_be_kept_ends_a_process_with_one_line(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="1"), exit_process():
        raise LostError("No space left on device: w.pt is not written")
    assert capsys.readouterr().err == "process 0: No space left on device: w.pt is not written\n"
