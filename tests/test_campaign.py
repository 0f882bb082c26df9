"""A campaign loses nothing: killed and resumed, or made in shares, it equals an uninterrupted one."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from attack import processes_of
from conftest import DIFFERENT, LAUNCHER, TINY, environment, run_here, train_together, without_progress

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import fast
from large_batch_cifar_10_fast.images.load import load_images
from large_batch_cifar_10_fast.lab import log
from large_batch_cifar_10_fast.lab import table as tables
from large_batch_cifar_10_fast.lab.log import Log
from large_batch_cifar_10_fast.lab.results import read_log
from large_batch_cifar_10_fast.lab.table import COLUMNS

pytestmark = pytest.mark.slow

RUNS = 10
RUN_LINE = r"Train acc (\d\.\d{4}) loss (\d+\.\d{3}), validation acc (\d\.\d{4}) loss (\d+\.\d{3}) "
RUN_LINE += r"wall time (\d+\.\d{3})s"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def arguments(tiny_npz) -> list[str]:
    return ["--demo", *TINY, "--data", str(tiny_npz), "--runs", str(RUNS), "--seed", "5"]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> tuple[Path, str]:
    """Return the table of an uninterrupted campaign of two processes, and its log."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train_together(2, *arguments, "--save", "w.pt", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return folder / "runs.tsv", result.stdout


def test_stdout_is_the_log_and_stderr_is_silent(uninterrupted, tiny_npz):
    _, log = uninterrupted
    head = log.partition("\nUploaded")[0]
    for part in (
        *("8 workers on 2 processes", f"torch {torch.__version__}", "Python 3.", "commit ", "cuDNN ", "seed=5"),
        *("batch_size=16", "643 training and 101 test images", f"SHA-256 {load_images(str(tiny_npz)).digest}"),
    ):
        assert part in head
    published = r"Uploaded data to GPUs \d+\.\d{3}s\nCompute patch whitening statistics:     \d+\.\d{3}s\n"
    published += f"({RUN_LINE}\n){{10}}" + r"Maximum training time \d+\.\d+ median \d+\.\d+\n"
    published += r"Lowest accuracy 0\.\d+ median 0\.\d+\n0 runs reached 0.94 out of 10\n"
    assert re.fullmatch(published, re.sub("(?m)^#.*\n", "", log))
    parts = "upload {}, preprocessing {}, whitening {}, training {}\n".replace("{}", r"\d+\.\d{3}s")
    assert re.search("# wall time of the first run: " + parts + "# not in it: the last validation ", log)


def test_tables_hold_every_run_and_epoch_as_the_log_has_them(uninterrupted):
    table, log = uninterrupted
    names = ("runs.tsv", "epochs.tsv", "timing_log.tsv")
    rows, epochs, curve = (pd.read_csv(table.with_name(name), sep="\t") for name in names)
    assert list(rows.columns) == [*COLUMNS]
    assert rows["seed"].tolist() == [*range(5, 15)]
    assert rows["campaign"].nunique() == 1
    for row, (_, train_loss, accuracy, *_) in zip(rows.iloc, re.findall(RUN_LINE, log), strict=True):
        assert row["validation_accuracy"] == row["validation_count"] / 101
        assert (f"{row['validation_accuracy']:.4f}", f"{row['train_loss']:.3f}") == (accuracy, train_loss)
        assert 2**26 < row["peak_memory"] < 2**36
    maximum, median = re.search(r"Maximum training time (\S+) median (\S+)", log).groups()
    assert (float(maximum), float(median)) == (rows["seconds"].max(), rows["seconds"].median())
    assert epochs[["run", "epoch"]].to_numpy().tolist() == [[run, epoch] for run in rows["run"] for epoch in (1, 2)]
    last = epochs[epochs["epoch"] == 2].reset_index(drop=True)
    for name in ("seconds", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert last[name].tolist() == pytest.approx(rows[name].tolist()), name
    assert list(curve.columns) == ["epoch", "hours", "top1Accuracy"], "as DAWNBench's"
    first = epochs[epochs["run"] == 0]
    assert curve["epoch"].tolist() == first["epoch"].tolist()
    assert curve["top1Accuracy"].tolist() == pytest.approx((100 * first["validation_accuracy"]).tolist(), rel=1e-5)


def results(path: Path) -> pd.DataFrame:
    """Return the last campaign's rows of a table by run, without the columns that differ if a run is made again."""
    rows = pd.read_csv(path, sep="\t", dtype=str)
    rows = rows[rows["campaign"] == rows["campaign"].iloc[-1]].sort_values("run", kind="stable", ignore_index=True)
    return rows.drop(columns=[*DIFFERENT, "device"], errors="ignore")


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start a launch of two processes in `folder`, under nohup; kill all processes at the end."""
    command = ["nohup", "bash", str(LAUNCHER), *arguments, "--nproc", "2"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": folder, "env": environment(OMP_NUM_THREADS=1, TMPDIR=folder), "start_new_session": True}
    with subprocess.Popen(command, **how, **pipes) as process:
        try:
            yield process
        finally:
            for pid in processes_of(folder):
                os.kill(pid, signal.SIGKILL)


def wait_for_rows(table: Path, rows: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not table.exists() or table.read_bytes().count(b"\n") <= rows:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_process_1(folder: Path) -> None:
    trains = b"large_batch_cifar_10_fast.train\0"
    trainers = [pid for pid in processes_of(folder) if trains in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(trainers), signal.SIGKILL)


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen, in hexadecimal."""
    links = [os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    entries = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {entry[1].split(":")[0] for entry in entries if entry[3] == "0A" and f"socket:[{entry[9]}]" in links}


ENDS = [  # how to end a launch, its status, and the beginning of its closing line, if any
    (lambda launch, _: launch.kill(), -signal.SIGKILL, ""),
    (lambda launch, folder: kill_process_1(folder), 1, "process 1 was ended by SIGKILL"),
    (lambda launch, _: launch.send_signal(signal.SIGUSR1), 128 + signal.SIGUSR1, "ended by SIGUSR1"),  # as Slurm does
    (lambda launch, _: os.killpg(launch.pid, signal.SIGINT), 128 + signal.SIGINT, "ended by SIGINT"),  # as Ctrl-C does
]


def test_ended_in_every_way_and_continued_a_campaign_equals_an_uninterrupted_one(arguments, tmp_path, uninterrupted):
    table, made, kept = tmp_path / "runs.tsv", 0, ""
    for end, status, reason in ENDS:
        with started(tmp_path, *arguments, "--campaign", "night") as process:
            wait_for_rows(table, made + 1, process)
            assert set() < listening(processes_of(tmp_path)) <= LOOPBACK, "the rendezvous is on this machine"
            end(process, tmp_path)
            assert process.wait(timeout=10) == status
            errors = without_progress(process.stderr.read())
            time.sleep(1)
            assert not processes_of(tmp_path)
        assert table.read_text().startswith(kept), "finished rows are not touched"
        kept = table.read_text()
        made = kept.count("\n") - 1
        how = f"; {made} of {RUNS} runs are finished; the same command with --campaign night continues"
        assert re.search(f"{reason}.*{how}\n$" if reason else "^$", errors)
        if status == 1:
            with open(table, "a") as half_written:
                half_written.write("20990101T000000-1\t2099")
    result = train_together(2, *arguments, "--resume", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert table.read_text().startswith(kept)
    assert "20990101T000000-1\t2099" in (tmp_path / "runs.tsv.broken").read_text()
    pd.testing.assert_frame_equal(results(table), results(uninterrupted[0]))
    assert result.stdout.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]


def test_two_teams_one_killed_and_started_again_make_the_rows_and_weights_of_one(arguments, tmp_path, uninterrupted):
    (table := tmp_path / "runs.tsv").write_text(uninterrupted[0].read_text())  # another campaign's rows
    teams = [*arguments, "--teams", "2", "--campaign", "both", "--save", "w.pt"]
    with started(tmp_path, *teams) as process:
        wait_for_rows(table, RUNS + 1, process)
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGHUP)  # which nohup ignores
        wait_for_rows(table, RUNS + 2, process)
        kill_process_1(tmp_path)
        assert process.wait(timeout=200) == 1
        assert "process 1 of team 1 was ended by SIGKILL" in process.stderr.read()
    with started(tmp_path, *teams) as process:
        output, errors = process.communicate(timeout=200)
    assert (process.returncode, without_progress(errors)) == (0, "")
    assert output.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]
    pd.testing.assert_frame_equal(results(table), results(uninterrupted[0]))
    weights, of_one = (
        torch.load(path.with_name("w.pt"), weights_only=True)["weights"] for path in (table, uninterrupted[0])
    )
    assert all(torch.equal(weights[name], of_one[name]) for name in of_one)


@pytest.fixture(scope="module")
def small(tiny_npz) -> list[object]:
    return ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--seed", 7]


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """Return the table of a campaign of five runs."""
    run_here(*small, "--runs", 5, "--campaign", "whole", "--out", folder := tmp_path_factory.mktemp("whole"))
    return folder / "runs.tsv"


def test_only_missing_runs_are_trained_and_more_runs_can_be_added(small, whole, monkeypatch, tmp_path):
    trained, finish = [], Log.finish
    monkeypatch.setattr(Log, "finish", lambda log, *last: trained.append(log.run) or finish(log, *last))
    (table := tmp_path / "runs.tsv").write_text("".join(whole.read_text().splitlines(keepends=True)[:3]))
    run_here(*small, "--runs", 3, "--resume", "--out", tmp_path)
    assert trained == [2], "of three, two were finished"
    run_here(*small, "--runs", 3, "--resume", "--out", tmp_path)
    assert trained == [2]
    run_here(*small, "--runs", 5, "--campaign", "whole", "--out", tmp_path)
    assert trained == [2, 3, 4]
    pd.testing.assert_frame_equal(results(table), results(whole))


def test_other_conditions_are_refused_in_one_line_that_names_them(small, whole, tmp_path, monkeypatch):
    edits = {"code": "7", "torch": "7", "device": "abacus", "processes": "2", "environment": "MKL_CBWR=AVX2"}
    rows = pd.read_csv(whole, sep="\t", dtype=str, keep_default_na=False).assign(**edits)
    rows.to_csv(table := tmp_path / "runs.tsv", sep="\t", index=False)
    before = table.read_bytes()
    options = ["--lr_scaler", 1.25, "--seed", 3, "--data", "synthetic", "--precision", "bf16", "--resume"]
    with pytest.raises(ConfigError, match=r"^campaign whole cannot be continued with [^\n]*$") as error:
        run_here(*small, *options, "--out", tmp_path)
    found = "lr_scaler (1.25, not 1.0)", "seed (3, not 7)", "digest (", "precision (bf16, not fp32)", "code ("
    for condition in (*found, "torch (", "device (CPU ", "processes (1, not 2)", "environment (-, not MKL_CBWR=AVX2)"):
        assert condition in str(error.value)
    assert table.read_bytes() == before
    run_here(*small, "--campaign", "another", "--out", tmp_path)
    assert table.read_bytes().startswith(before)
    monkeypatch.setattr(fast, "compile_all", lambda plain, *_: plain._replace(predict=plain.predict.__call__))
    with pytest.raises(ConfigError, match=r"campaign another cannot be continued with compile \(True, not False\)"):
        run_here(*small, "--compile", "--resume", "--runs", 2, "--no_warmup", "--out", tmp_path)


def test_variables_that_change_results_are_a_condition_and_others_of_their_families_are_in_the_log(
    small, whole, tmp_path, monkeypatch, capsys
):
    (table := tmp_path / "runs.tsv").write_text(whole.read_text())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    run_here(*small, "--runs", 6, "--resume", "--out", tmp_path)
    assert "\n# environment, not a condition: NCCL_SOCKET_IFNAME=lo\n" in capsys.readouterr().out
    monkeypatch.setenv("NCCL_ALGO", "Ring,Tree\t\nx y")
    monkeypatch.setenv("TORCHINDUCTOR_USE_FAST_MATH", "1")
    both = "NCCL_ALGO=Ring%2CTree%09%0Ax%20y,TORCHINDUCTOR_USE_FAST_MATH=1"
    with pytest.raises(ConfigError, match=rf"environment \({both}, not -\)"):
        run_here(*small, "--runs", 7, "--resume", "--out", tmp_path)
    run_here(*small, "--runs", 1, "--campaign", "another", "--out", tmp_path)
    assert pd.read_csv(table, sep="\t")["environment"].tolist() == 6 * ["-"] + [both]


def test_epochs_are_written_and_shown_while_a_run_is_made(tiny_npz, tmp_path, capsys, monkeypatch):
    """A run that was interrupted has epochs, but no row; when it is made again, its epochs are written again."""
    monkeypatch.setattr(log, "LONG_EPOCH", 0)
    options, epoch = ["--demo", *TINY, "--data", tiny_npz, "--out", tmp_path, "--campaign", "a"], Log.epoch
    first = iter([True])
    monkeypatch.setattr(Log, "epoch", lambda *given: epoch(*given) if next(first, None) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(*options)
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t").empty
    monkeypatch.setattr(Log, "epoch", epoch)
    run_here(*options)
    epochs = pd.read_csv(tmp_path / "epochs.tsv", sep="\t")
    assert epochs["epoch"].tolist() == [1, 1, 2]
    assert epochs["train_loss"][0] == epochs["train_loss"][1]
    assert read_log(str(tmp_path / "runs.tsv")).epochs["seconds"].tolist() == epochs["seconds"][1:].tolist()
    lines = re.findall(
        r"^run 0, epoch (\d) of 2: loss \S+, accuracy 0\.\d{4}, \d+ images/s", capsys.readouterr().err, re.M
    )
    assert lines == ["1", "1", "2"]


def test_a_finished_run_is_not_lost_if_a_file_cannot_be_written(small, tmp_path, capsys, monkeypatch):
    """Its row, which a full disk did not take, is written with the next one; the other files are missed."""
    (tmp_path / "timing_log.tsv").mkdir()
    (tmp_path / "epochs.tsv").write_text("epoch\tmine\n1\t2\n")
    (weights := tmp_path / "gone").mkdir()
    flush, full = tables.flush_to_disk, iter([None, OSError(28, "No space left on device")])

    def fails_once(descriptor, path):
        if path.name == "runs.tsv" and (error := next(full, None)):
            weights.rmdir()
            weights.touch()
            os.ftruncate(descriptor, path.stat().st_size - 30)
            raise error
        flush(descriptor, path)

    monkeypatch.setattr(tables, "flush_to_disk", fails_once)
    run_here(*small, "--runs", 2, "--out", tmp_path, "--save", weights / "w.pt")
    errors = capsys.readouterr().err
    for name in ("runs.tsv", "epochs.tsv", "timing_log.tsv", "w.pt"):
        assert re.search(f"Warning: .*{name} is not written", errors), errors
    assert (tmp_path / "epochs.tsv").read_text() == "epoch\tmine\n1\t2\n"
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["run"].tolist() == [0, 1]
