"""runs.tsv: whatever happens to it, no row is lost, and none is doubled."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, environment
from disturbances import no_file_beyond

from large_batch_cifar_10_fast.campaign import COLUMNS, EPOCHS, append, append_epochs, read_rows
from large_batch_cifar_10_fast.options import ConfigError


def _row(run, campaign="mine"):
    return {**dict.fromkeys(COLUMNS, "1"), "campaign": campaign, "run": run, "runs": "99", "share": "0/1", "seed": run}


def _runs(path):
    return [row["run"] for row in read_rows(path)]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "out" / "runs.tsv"
    append(path, [_row(0)])
    append(path, [_row(0), _row(1)])
    return path


def test_a_row_is_whole_only_with_all_fields_and_its_newline(table):
    whole = table.read_bytes()
    assert _runs(table) == ["0", "1"]
    for end in (whole[:-1], whole[:-5], whole[:-5] + b"\n"):
        table.write_bytes(end)
        assert _runs(table) == ["0"]
    table.write_bytes(whole.replace(b"\t1\n", b"\n", 1))
    with pytest.raises(ConfigError, match="line 2"):
        read_rows(table)


def _rename_another_over(path):
    other = path.with_name("edited")
    head, first, *_ = path.read_bytes().splitlines(keepends=True)
    other.write_bytes(head + first)
    os.replace(other, path)


@pytest.mark.parametrize(
    "change", [_rename_another_over, lambda path: shutil.rmtree(path.parent), lambda path: os.truncate(path, 0)]
)
def test_a_table_that_was_renamed_deleted_or_truncated_has_all_rows_again(table, change):
    change(table)
    append(table, [_row(0), _row(1), _row(2)])
    assert _runs(table) == ["0", "1", "2"]


def test_a_half_written_last_row_is_put_aside(table, capsys):
    whole = table.read_bytes()
    for begun in (b"mine\t2", b"mine\t2\t\n"):
        table.write_bytes(whole + begun)
        append(table, [_row(2)])
        assert _runs(table) == ["0", "1", "2"]
        assert "runs.tsv was half-written" in capsys.readouterr().err
    table.write_text("campaign\tstar")
    append(table, [_row(0)])
    assert _runs(table) == ["0"], "nor does a half-written header stay"


def test_a_run_that_the_table_has_is_not_doubled_and_other_campaigns_stay(table):
    append(table, [_row(1), _row(0, "another")])
    assert [(row["campaign"], row["run"]) for row in read_rows(table)] == [
        ("mine", "0"),
        ("mine", "1"),
        ("another", "0"),
    ]


@pytest.mark.parametrize("content", ["a\tb\n1\t2\n", None])
def test_a_table_that_somebody_damaged_is_left_alone_and_the_rows_stand_beside_it(table, content):
    content = content or table.read_text() + "damaged\n" + table.read_text().splitlines(keepends=True)[1]
    table.write_text(content)
    with pytest.raises(ConfigError, match=r"this campaign's rows are in .*runs.tsv.broken"):
        append(table, [_row(0), _row(1), _row(2)])
    assert table.read_text() == content
    assert table.with_name("runs.tsv.broken").read_bytes().count(b"\n") == 3


def test_a_row_that_a_full_disk_cut_off_is_written_when_there_is_room(table):
    with no_file_beyond(table.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        append(table, [_row(0), _row(1), _row(2)])
    append(table, [_row(0), _row(1), _row(2), _row(3)])
    assert _runs(table) == ["0", "1", "2", "3"]


def test_half_a_line_of_epochs_tsv_is_removed(tmp_path):
    path, epoch = tmp_path / "epochs.tsv", dict.fromkeys(EPOCHS, 1)
    append_epochs(path, [epoch])
    whole = path.read_text()
    path.write_text(whole + "1\t1")
    append_epochs(path, [epoch, epoch])
    assert path.read_text() == whole + 2 * whole.splitlines(keepends=True)[1]


APPEND_TWENTY = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from test_table import _row, append
for run in range(int(sys.argv[2]), 40, 2):
    append(Path(sys.argv[1]), [_row(run)])
"""


@pytest.mark.slow
def test_launches_that_write_one_table_at_once_lose_no_row(tmp_path):
    path, variables = tmp_path / "runs.tsv", environment(PYTHONPATH=REPO)
    command = [sys.executable, "-c", APPEND_TWENTY, path]
    both = [subprocess.Popen([*command, first], cwd=REPO, env=variables) for first in ("0", "1")]
    assert [process.wait(100) for process in both] == [0, 0]
    assert sorted(map(int, _runs(path))) == list(range(40))


def test_a_file_system_without_locks_is_warned_of_once(tmp_path, monkeypatch, capsys):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    for run in range(3):
        append(tmp_path / "runs.tsv", [_row(run)])
    assert _runs(tmp_path / "runs.tsv") == ["0", "1", "2"]
    assert capsys.readouterr().err.count("cannot be locked (No locks available)") == 1
