"""A campaign loses nothing: killed and resumed it equals an uninterrupted one; and what it refuses."""

import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import TINY, children_of, is_alive, launch, train_together
from disturbances import DIFFERENT
from ends import ENDS, listening, started, until, workers_of

from large_batch_cifar_10_fast.campaign import COLUMNS
from large_batch_cifar_10_fast.launch import check_launch, only_campaign_in
from large_batch_cifar_10_fast.options import ConfigError

pytestmark = pytest.mark.slow

RUNS = 10
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def _arguments(npz, *more):
    return ["--demo", *TINY, "--data", str(npz), *map(str, more)]


@pytest.fixture(scope="module")
def uninterrupted(tiny_npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train_together(2, *_arguments(tiny_npz, "--runs", RUNS), cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return folder, result.stdout


def test_ended_in_every_way_and_resumed_a_campaign_equals_an_uninterrupted_one(tiny_npz, tmp_path, uninterrupted):
    """Each time all processes end within seconds, in one line, and finished rows stay."""
    table, arguments, made, kept, warning = tmp_path / "runs.tsv", _arguments(tiny_npz, "--runs", RUNS), 0, "", ""
    (temporary := tmp_path / "temporary").mkdir()
    for end, status, message in ENDS:
        with started(tmp_path, *arguments, TMPDIR=temporary) as process:
            until(tmp_path, made + 1, process)
            children = children_of(process.pid)
            if not made:
                assert len(workers_of(process)) == 2
                assert (addresses := listening(children)), "the processes meet somewhere"
                assert addresses <= LOOPBACK, "and nothing listens beyond this machine"
            began = time.monotonic()
            end(process)
            assert process.wait(timeout=10) == status
            while any(map(is_alive, children)) and time.monotonic() - began < 10:
                time.sleep(0.05)
            assert not any(map(is_alive, children))
            told = process.stderr.read()
        assert table.read_text().startswith(kept), "finished rows are not touched"
        kept, arguments = table.read_text(), ["--resume"]
        made = kept.count("\n") - 1
        assert made < RUNS
        left = [*temporary.glob("large_batch_*"), *temporary.glob("torchelastic_*")]
        report = tmp_path / "last_failure.txt"
        if message:
            details = f" (details: {report.name})" if status == 1 else ""
            going_on = f"{made} of its {RUNS} runs are made, continue with --resume{details}\n"
            assert (told, left) == (f"{warning}train_cifar_parallel.sh: {message}; {going_on}", [])
            assert report.exists() == (status == 1)
            report.unlink(missing_ok=True)
        else:
            assert (told, len(left)) == ("", 1)
        warning = ""
        if status == 1:
            with open(table, "a") as unfinished:
                unfinished.write("20990101T000000-1\t2099")  # the power failed in the middle of a row
            warning = "Warning: the last row of runs.tsv was half-written: it is in runs.tsv.broken now\n"
    result = train_together(2, "--resume", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")

    assert (tmp_path / "runs.tsv").read_text().startswith(kept), "finished rows are not touched"
    assert "20990101T000000-1\t2099" in (tmp_path / "runs.tsv.broken").read_text()
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    expected = pd.read_csv(uninterrupted[0] / "runs.tsv", sep="\t")
    assert rows["run"].tolist() == list(range(RUNS))
    assert rows["campaign"].nunique() == 1
    same = [name for name in COLUMNS if name not in DIFFERENT]
    pd.testing.assert_frame_equal(rows[same], expected[same])
    assert result.stdout.count("Train acc") == RUNS, "the log of a resumed campaign tells all its runs"
    assert result.stdout.splitlines()[-1] == uninterrupted[1].splitlines()[-1]
    accuracies = [line.split(",")[1].split()[2] for line in result.stdout.splitlines() if line.startswith("Train")]
    assert accuracies == [f"{accuracy:.4f}" for accuracy in expected["validation_accuracy"]]


def test_with_restarts_a_campaign_heals_itself_and_equals_an_undisturbed_one(tiny_npz, tmp_path, uninterrupted):
    (tmp_path / "runs.tsv").write_text((uninterrupted[0] / "runs.tsv").read_text())  # another campaign's rows
    with started(tmp_path, *_arguments(tiny_npz, "--runs", RUNS), restarts=1) as process:
        until(tmp_path, RUNS + 2, process)
        os.kill(workers_of(process)[-1], signal.SIGKILL)
        told, errors = process.communicate(timeout=200)
    assert (process.returncode, errors.count("\n")) == (0, 2), errors
    assert "process 1 was ended by SIGKILL (out of memory?)" in errors
    assert errors.endswith("Warning: started again, 0 of 1 restarts left\n")
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[RUNS:].reset_index(drop=True)
    same = [name for name in COLUMNS if name not in DIFFERENT]
    pd.testing.assert_frame_equal(rows[same], pd.read_csv(uninterrupted[0] / "runs.tsv", sep="\t")[same])
    assert rows["campaign"].nunique() == 1
    assert ", 0 of 10 runs made before" in told
    assert told.count("# data ") == 2, "a restart is a resume, with a log of its own"
    assert told.splitlines()[-1] == uninterrupted[1].splitlines()[-1]


def test_teams_make_the_same_rows_and_weights_as_one_after_the_other(tiny_npz, tmp_path):
    """Bit for bit, times apart; each run once."""
    arguments = _arguments(tiny_npz, "--runs", 5, "--save", "w.pt", "--no_compile")
    made = {}
    for teams in (1, 2):
        (tmp_path / str(teams)).mkdir()
        result = launch(*arguments, cwd=tmp_path / str(teams), teams=teams, nproc=1, OMP_NUM_THREADS=1)
        assert (result.returncode, result.stderr) == (0, "")
        rows = pd.read_csv(tmp_path / str(teams) / "runs.tsv", sep="\t")
        made[teams] = rows, torch.load(tmp_path / str(teams) / "w.pt", weights_only=True), result.stdout
    (alone, weights, _), (rows, same_weights, log) = made[1], made[2]
    same = [name for name in COLUMNS if name not in (*DIFFERENT, "device")]
    pd.testing.assert_frame_equal(rows.sort_values("run").reset_index(drop=True)[same], alone[same])
    assert rows[["campaign", "started"]].drop_duplicates().shape == (1, 2)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert rows["device"].str.contains("2 teams of 1 x 1 threads").all()
    told = sorted(line.split(", ")[1].split(" loss")[0] for line in log.splitlines() if line.startswith("Train acc"))
    assert told == sorted(f"validation acc {accuracy:.4f}" for accuracy in rows["validation_accuracy"])
    assert "8 workers on 1 process, CPU" in log
    assert len(pd.read_csv(tmp_path / "2" / "timing_log.tsv", sep="\t")) == 2


@pytest.fixture
def unfinished(uninterrupted, tmp_path):
    """The first three rows of a campaign."""
    lines = (uninterrupted[0] / "runs.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "runs.tsv").write_text("".join(lines[:4]))
    return tmp_path


def _refused(folder: Path, monkeypatch, *arguments: str) -> str:
    """What the launcher says before it starts anything."""
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as error:
        check_launch([*arguments, "--nproc", "2"])
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr_scaler", "1.25"], "lr_scaler (1.0 then, 1.25 now)"),
        (["--runs", "12"], f"runs ({RUNS} then, 12 now)"),
        (["--seed", "3"], "seed (0 then, 3 now)"),
        (["--data", "synthetic"], "digest ("),
        (["--demo"], "batch_size (16 then, 32 now)"),
    ],
)
def test_resume_refuses_other_settings_and_says_which(unfinished, monkeypatch, arguments, message):
    before = (unfinished / "runs.tsv").read_bytes()
    assert message in _refused(unfinished, monkeypatch, "--resume", *arguments)
    assert (unfinished / "runs.tsv").read_bytes() == before


@pytest.mark.parametrize("column", ["code", "torch", "processes"])
def test_resume_refuses_other_code_and_machines(unfinished, monkeypatch, column):
    rows = pd.read_csv(unfinished / "runs.tsv", sep="\t", dtype=str)
    rows[column] = "7"
    rows["options"] += " gone=1" * (column == "code")
    rows.to_csv(unfinished / "runs.tsv", sep="\t", index=False, na_rep="")
    assert f"had other {column} (7 then" in _refused(unfinished, monkeypatch, "--resume")


@pytest.mark.parametrize(
    ("column", "old", "new", "message"),
    [
        ("options", "epochs=2", "epochs=two", "has epochs=two: its table was changed"),
        ("options", "epochs=2", "epochs=2 gone=None", "has gone=None: its table"),
        ("options", "epochs=2", "epochs=2 loss_scale=2", "has loss_scale=2: its table"),
        ("options", " epochs=2", "", "lacks options of apple2019: its table"),
        ("precision", "fp32", "fp17", "has precision=fp17: its table"),
        ("no_warmup", "True", "perhaps", "has no_warmup=perhaps: its table"),
    ],
)
def test_resume_refuses_words_that_no_campaign_wrote(unfinished, monkeypatch, column, old, new, message):
    rows = pd.read_csv(unfinished / "runs.tsv", sep="\t", dtype=str, keep_default_na=False)
    assert rows[column].str.contains(old).all()
    rows[column] = rows[column].str.replace(old, new)
    rows.to_csv(unfinished / "runs.tsv", sep="\t", index=False)
    assert message in _refused(unfinished, monkeypatch, "--resume")


def test_resume_refuses_where_there_is_nothing_to_resume(uninterrupted, tmp_path, monkeypatch):
    assert "there is no campaign in ." in _refused(tmp_path, monkeypatch, "--resume")
    out = str(uninterrupted[0])
    assert f"has all its {RUNS} runs" in _refused(tmp_path, monkeypatch, "--resume", "--out", out)


def test_a_second_campaign_in_the_same_folder_is_refused_while_the_first_runs(tmp_path):
    with only_campaign_in(tmp_path / "out"):
        with pytest.raises(ConfigError, match="another campaign is running in"), only_campaign_in(tmp_path / "out"):
            pass
        with only_campaign_in(tmp_path / "another"):
            pass
    with only_campaign_in(tmp_path / "out"):
        pass


def test_campaigns_are_appended_under_one_header(unfinished, tiny_npz):
    before = (unfinished / "runs.tsv").read_text()
    assert train_together(2, *_arguments(tiny_npz), cwd=unfinished).returncode == 0
    after = (unfinished / "runs.tsv").read_text()
    assert after.startswith(before)
    assert after.count("\n") == before.count("\n") + 1
