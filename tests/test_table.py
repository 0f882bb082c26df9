"""runs.tsv: whatever happens to it, no row is lost, and none is doubled."""

import errno
import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab import table as tables
from large_batch_cifar_10_fast.lab.table import COLUMNS, Reader, Table, reached_goal, read

FAIL = Mock(side_effect=OSError(errno.ENOLCK, "full or without locks"))


def _row(run, campaign="mine"):
    return {**dict.fromkeys(COLUMNS, "1"), "campaign": campaign, "run": run, "seed": run}


def append(path, *runs):
    """Append in a launch of its own."""
    Table(path, COLUMNS, durable=True).append(*map(_row, runs))


def _runs(path):
    return [int(row["run"]) for row in read(path)]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "out" / "runs.tsv"
    append(path, 0, 1)
    return path


def test_a_table_that_was_renamed_is_begun_anew(table):
    launch = Table(table, COLUMNS, durable=True)
    launch.append(_row(2))
    reader = Reader(table)
    assert len(reader.new_rows()) == 3
    table.rename(table.with_name("old.tsv"))
    launch.append(_row(3))
    assert _runs(table) == [3]
    assert [row["run"] for row in reader.new_rows()] == ["3"]


def test_a_reader_reads_each_row_once_and_no_half_row(table):
    reader = Reader(table)
    assert [row["run"] for row in reader.new_rows()] == ["0", "1"]
    append(table, 2)
    with open(table, "a") as half:
        half.write("mine\t3")
    assert [row["run"] for row in reader.new_rows()] == ["2"]
    append(table, 4)
    assert [row["run"] for row in reader.new_rows()] == ["4"]
    with open(table, "a") as damaged:
        damaged.write("mine\tx\n")
    with pytest.raises(ConfigError, match="line 6: "):
        reader.new_rows()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("a\tb\n1\t2\n", "has other columns than this version writes: move it"),
        ("{head}{rows}{rows}", "line 4: run 0 of campaign mine occurs a second time"),
    ],
)
def test_a_damaged_table_is_one_line_that_names_the_place(table, damage, message):
    head, *rows = table.read_text().splitlines(keepends=True)
    table.write_text(damage.format(head=head, rows="".join(rows)))
    with pytest.raises(ConfigError, match=message):
        read(table)


def test_a_row_half_written_on_a_full_disk_is_set_aside_and_written_again(table, monkeypatch, capsys):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (table.stat().st_size + 6, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append(table, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert table.read_bytes().endswith(b"\n")
    with open(table, "ab") as killed:
        killed.write(b"mine\t2")
    append(table, 2, 3)
    assert _runs(table) == [0, 1, 2, 3]
    assert table.with_name("runs.tsv.broken").read_bytes() == b"mine\t2\n"
    assert "runs.tsv was half-written" in capsys.readouterr().err
    monkeypatch.setattr(os, "fsync", FAIL)
    with pytest.raises(OSError, match="full or without locks"):
        append(table, 4)


def test_rows_that_a_full_disk_did_not_take_are_appended_with_the_next(table, monkeypatch):
    launch = Table(table, COLUMNS, durable=True)
    for run, failing in ((2, "lock"), (3, "flush_to_disk")):
        with monkeypatch.context() as patch:
            patch.setattr(tables, failing, FAIL)
            with pytest.raises(OSError, match="full or without locks"):
                launch.append(_row(run))
    assert _runs(table) == [0, 1]
    launch.append()
    launch.append(_row(4))
    assert _runs(table) == [0, 1, 2, 3, 4]


def test_an_append_waits_for_the_lock(table):
    with open(table, "ab") as other, ThreadPoolExecutor(1) as appender:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = appender.submit(append, table, 3)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        other.write("\t".join(str(_row(2)[name]) for name in COLUMNS).encode() + b"\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.result(timeout=5)
    assert _runs(table) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("count", "images", "loss", "reached"),
    [(9399, 10000, 1, False), (9400, 10000, 1, True), (46, 50, 1, False), (47, 50, 1, True), (50, 50, "nan", False)],
)
def test_exactly_94_percent_is_reached_unless_a_run_diverged(count, images, loss, reached):
    row = {"validation_count": count, "validation_images": images, "train_loss": loss, "validation_loss": 1}
    assert reached_goal(row) == reached
