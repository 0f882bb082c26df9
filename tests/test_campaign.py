"""A campaign loses nothing: killed and resumed, or merged from shares, it equals an uninterrupted one."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from attack import processes_of
from conftest import DIFFERENT, LAUNCHER, TINY, edit_table, environment, train_here, train_together

from large_batch_cifar_10_fast import campaign
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.data.cifar10 import load_images
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, RunConfig

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
    assert list(rows.columns) == campaign.COLUMNS
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
    return rows.drop(columns=[*DIFFERENT, "share", "device"], errors="ignore")


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


ENDS = [  # how to end a launch, its status, and the beginning of its closing line
    (lambda launch, folder: kill_process_1(folder), 1, "process 1 was ended by SIGKILL"),
    (lambda launch, _: launch.send_signal(signal.SIGUSR1), 128 + signal.SIGUSR1, "ended by SIGUSR1"),  # as Slurm does
    (lambda launch, _: os.killpg(launch.pid, signal.SIGINT), 128 + signal.SIGINT, "ended by SIGINT"),  # as Ctrl-C does
    (lambda launch, _: launch.kill(), -signal.SIGKILL, ""),
]


def test_ended_in_every_way_and_resumed_a_campaign_equals_an_uninterrupted_one(
    arguments, tmp_path, uninterrupted, capsys
):
    table, report, made, kept = tmp_path / "runs.tsv", tmp_path / "last_failure.txt", 0, ""
    for end, status, reason in ENDS:
        with started(tmp_path, *(["--resume"] if made else arguments)) as process:
            wait_for_rows(table, made + 1, process)
            assert set() < listening(processes_of(tmp_path)) <= LOOPBACK, "the rendezvous is on this machine"
            end(process, tmp_path)
            assert process.wait(timeout=10) == status
            errors = process.stderr.read()
            time.sleep(1)
            assert not processes_of(tmp_path)
        assert table.read_text().startswith(kept), "finished rows are not touched"
        kept = table.read_text()
        made = kept.count("\n") - 1
        line = f"{reason}.*; {made} of its {RUNS} runs are finished, continue with --resume.*\n$" if reason else "^$"
        assert re.search(line, errors)
        assert ("(details: last_failure.txt)" in errors) == report.exists() == (status == 1)
        report.unlink(missing_ok=True)
        if status == 1:
            with open(table, "a") as half_written:
                half_written.write("20990101T000000-1\t2099")
    result = train_together(2, "--resume", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert table.read_text().startswith(kept)
    assert "20990101T000000-1\t2099" in (tmp_path / "runs.tsv.broken").read_text()
    pd.testing.assert_frame_equal(results(table), results(uninterrupted[0]))
    assert result.stdout.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]
    with pytest.raises(SystemExit, match="0"):  # requeued after its last run
        check_launch(["--resume", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]


def test_two_teams_one_killed_and_restarted_make_the_rows_and_weights_of_one(arguments, tmp_path, uninterrupted):
    (table := tmp_path / "runs.tsv").write_text(uninterrupted[0].read_text())  # another campaign's rows
    with started(tmp_path, *arguments, "--teams", "2", "--restarts", "1", "--save", "w.pt") as process:
        wait_for_rows(table, RUNS + 1, process)
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGHUP)  # which nohup ignores
        wait_for_rows(table, RUNS + 2, process)
        kill_process_1(tmp_path)
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "process 1 was ended by SIGKILL" in errors
    assert errors.endswith("Warning: started again, 0 of 1 restarts left\n")
    assert output.splitlines()[-2:] == uninterrupted[1].splitlines()[-2:]
    pd.testing.assert_frame_equal(results(table), results(uninterrupted[0]))
    weights, of_one = (torch.load(path.with_name("w.pt"), weights_only=True) for path in (table, uninterrupted[0]))
    assert all(torch.equal(weights[name], of_one[name]) for name in of_one)


@pytest.fixture
def unfinished(uninterrupted, tmp_path) -> Path:
    (table := tmp_path / "runs.tsv").write_text("".join(uninterrupted[0].read_text().splitlines(keepends=True)[:4]))
    return table


@pytest.mark.parametrize(
    ("options", "edits", "message"),
    [
        (["--lr_scaler", "1.25"], {}, "other lr_scaler (1.0 then, 1.25 now)"),
        (["--seed", "3"], {}, "other seed (5 then, 3 now)"),
        (["--data", "synthetic"], {}, "other digest ("),
        (["--nproc", "1"], {}, "other processes (2 then, 1 now)"),
        ([], {"code": "7", "options": "gone=1"}, "other code (7 then, "),
        ([], {"torch": "7"}, "other torch (7 then, "),
        ([], {"options": "epochs=two"}, "cannot be repeated (argument --epochs: invalid int value: 'two'; "),
        ([], {"seed": "x"}, "runs.tsv, line 2: invalid literal for int() with base 10: 'x'; correct it"),
    ],
)
def test_resume_refuses_other_options_images_code_and_a_damaged_table(unfinished, options, edits, message):
    edit_table(unfinished, **edits)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_launch(["--resume", "--out", str(unfinished.parent), "--nproc", "2", *options])


def test_resume_takes_the_campaigns_number_of_processes_and_the_same_options_again(unfinished, monkeypatch):
    monkeypatch.setattr("large_batch_cifar_10_fast.launch.count_cores", lambda: 8)
    options = pd.read_csv(unfinished, sep="\t")["options"][0].replace("ghost_batch=8", "ghost_batch=1")
    edit_table(unfinished, compile="False", options=options)  # the compiler had failed; ghost batch 0 is the default
    again = ["--compile", "--batch_size", "16", "--ghost_batch", "0"]
    assert check_launch(["--resume", *again, "--out", str(unfinished.parent)])[2] == 2


def test_resume_refuses_another_device(unfinished):
    edit_table(unfinished, device="abacus")
    assert "had other device (abacus then, CPU" in train_together(2, "--resume", cwd=unfinished.parent).stderr


@pytest.fixture(scope="module")
def tables(tiny_npz, tmp_path_factory) -> dict[str, Path]:
    """Return the runs.tsv of a whole campaign and of its two shares."""
    folder = tmp_path_factory.mktemp("shares")
    small = ["--demo", *TINY, "--epochs", 1, "--no_compile", "--data", tiny_npz, "--seed", 7, "--runs", 5]
    for name, share in {"whole": "0/1", "even": "0/2", "odd": "1/2"}.items():
        train_here(*small, "--share", share, "--out", folder / name)
        time.sleep(1)  # the name of a campaign has its second
    return {path.parent.name: path for path in folder.glob("*/runs.tsv")}


def test_merged_shares_equal_the_tables_of_one_launch_and_missing_runs_are_named_and_made(tables, tmp_path, capsys):
    both, half, whole = tmp_path / "both", tmp_path / "half", tables["whole"]
    campaign.main([str(tables["odd"]), str(tables["even"]), "--out", str(both)])
    pd.testing.assert_frame_equal(results(both / "runs.tsv"), results(whole))
    pd.testing.assert_frame_equal(results(both / "epochs.tsv"), results(whole.with_name("epochs.tsv")))
    assert pd.read_csv(both / "epochs.tsv", sep="\t")["campaign"].nunique() == 1
    assert re.fullmatch(f"{both}/runs.tsv: 5 of campaign .*'s 5 runs\n", capsys.readouterr().out)
    campaign.main([str(tables["even"]), "--out", str(half)])
    assert f"; missing: 1, 3 (train_cifar_parallel.sh --resume --out {half} " in capsys.readouterr().out
    train_here("--resume", "--out", half)
    pd.testing.assert_frame_equal(results(half / "runs.tsv"), results(whole))


def test_an_interrupted_share_is_resumed_as_this_share(tables, tmp_path):
    (tmp_path / "runs.tsv").write_text("".join(tables["even"].read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=r"had other share \(0/2 then, 1/2 now\)"):
        read_request(["--resume", "--out", str(tmp_path), "--share", "1/2"])
    train_here("--resume", "--out", tmp_path)
    pd.testing.assert_frame_equal(results(tmp_path / "runs.tsv"), results(tables["even"]))


@pytest.mark.parametrize("column", [*campaign.ALIKE, "seed"])
def test_tables_of_other_images_code_or_options_are_refused(tables, tmp_path, error_line, column):
    rows = pd.read_csv(tables["odd"], sep="\t")
    other = rows[column] + 1 if column in campaign.INTEGERS else "other"
    edit_table(edited := shutil.copy(tables["odd"], tmp_path), **{column: other})
    merge = [str(tables["even"]), str(edited), "--out", str(tmp_path / "merged")]
    assert f"runs.tsv has other {column}" in error_line(campaign.main, merge)


def test_tables_with_the_same_run_and_a_folder_with_tables_are_refused(tables, tmp_path, error_line):
    whole, even, odd = (str(tables[name]) for name in ("whole", "even", "odd"))
    assert "campaign: run 1 is in " in error_line(campaign.main, [whole, odd, "--out", str(tmp_path)])
    assert "was given twice" in error_line(campaign.main, [even, even, "--out", str(tmp_path)])
    (tmp_path / "epochs.tsv").write_text("mine")
    assert "has tables already: choose another --out" in error_line(campaign.main, [even, "--out", str(tmp_path)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("epochs.tsv", "mine")]


@pytest.mark.parametrize("share", ["2/2", "1", "1/", "-1/2", "1/2/3", "a/b", "1/0", "9/99", "1/9999999", " 0/1"])
def test_an_invalid_share_is_refused(share):
    with pytest.raises(ConfigError, match=r"share .* has none of 5 runs: give I/N"):
        RunConfig(runs=5, share=share)
