"""runs.tsv: whatever happens to it, no row is lost, and none is doubled."""

import errno
import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import table as tables
from large_batch_cifar_10_fast.core.table import COLUMNS, ConflictError, Table, reached_goal, read

FAIL = Mock(side_effect=OSError(errno.ENOLCK, "full or without locks"))


def _row(run, campaign="mine"):
    return {**dict.fromkeys(COLUMNS, "1"), "campaign": campaign, "run": run, "seed": run}


def append(path, rows):
    """Append in a launch of its own."""
    Table(path, COLUMNS, 2).append(rows)


def _runs(path):
    return [int(row["run"]) for row in read(path)]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "out" / "runs.tsv"
    append(path, [_row(0), _row(1)])
    return path


@pytest.mark.parametrize("command", ["mv {0} {0}.old", "rm {0}", "truncate -s 60 {0}"])
def test_a_table_that_was_renamed_deleted_or_truncated_has_all_rows_of_the_launch_again(tmp_path, command):
    launch = Table(tmp_path / "runs.tsv", COLUMNS, 2)
    launch.append([_row(0), _row(1)])
    assert os.system(command.format(launch.path)) == 0
    launch.append([_row(2)])
    assert sorted(_runs(launch.path)) == [0, 1, 2]


def test_a_run_that_another_launch_has_written_is_an_error_and_its_row_stands_aside(tmp_path):
    """Of two launches of one campaign with other options, none loses a run without a word."""
    one = Table(tmp_path / "runs.tsv", COLUMNS, 2)
    two = Table(tmp_path / "runs.tsv", COLUMNS, 2)
    one.append([])
    two.append([])
    one.append([_row(0)])
    two.append([_row(1)])
    one.append([_row(1)])  # the same content: written twice
    before = one.path.read_text()
    with pytest.raises(ConflictError, match=r"has another row of mine 0, by another launch: .*runs.tsv.conflict; "):
        two.append([{**_row(0), "options": "other"}])
    assert one.path.read_text() == before
    (row,) = read(tmp_path / "runs.tsv.conflict")
    assert (row["run"], row["options"]) == ("0", "other")


def test_an_append_reads_only_what_is_new(table, monkeypatch):
    """Whatever the length of the table: 20,000 runs and their epochs cost seconds, not hours."""
    seen = []
    launch = Table(table, COLUMNS, 2, seen.append)
    launch.append([])
    assert [row["run"] for row in seen] == ["0", "1"]
    append(table, [_row(2)])
    launch.append([_row(3)])
    launch.append([_row(4)])
    assert [row["run"] for row in seen] == ["0", "1", "2"]
    lines = tables.complete_lines
    parsed = []
    monkeypatch.setattr(tables, "complete_lines", lambda content: parsed.append(len(content)) or lines(content))
    for run in range(100):
        launch.append([_row(10 + run)])
    written = table.stat().st_size
    assert sum(parsed) < written, "each row once, when it is written"
    parsed.clear()
    epochs = Table(table, COLUMNS, 0)
    epochs.append([_row(500)])
    assert not parsed, "rows without keys need no others"
    assert len(_runs(table)) == 106


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("a\tb\n1\t2\n", "has other columns than this version writes: move it"),
        ("{head}damaged\n{rows}", "line 2: "),
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
            append(table, [_row(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (_runs(table), table.read_bytes()[-6:]) == ([0, 1], b"mine\t2")
    append(table, [_row(2), _row(3)])
    assert _runs(table) == [0, 1, 2, 3]
    assert table.with_name("runs.tsv.broken").read_bytes() == b"mine\t2\n"
    assert "runs.tsv was half-written" in capsys.readouterr().err
    monkeypatch.setattr(os, "fsync", FAIL)
    with pytest.raises(OSError, match="full or without locks"):
        append(table, [_row(4)])


def test_an_append_waits_for_the_lock_so_that_no_row_is_lost_or_doubled(table):
    """While another process holds the lock, it may append the same row."""
    with open(table, "ab") as other, ThreadPoolExecutor(1) as appender:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = appender.submit(append, table, [_row(2), _row(3)])
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        other.write("\t".join(str(_row(2)[name]) for name in COLUMNS).encode() + b"\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.result(timeout=5)
    assert _runs(table) == [0, 1, 2, 3]


def test_a_file_system_without_locks_is_warned_of_once(table, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", FAIL)
    for run in (2, 3):
        append(table, [_row(run)])
    assert _runs(table) == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("cannot be locked (full or without locks)") == 1


@pytest.mark.parametrize(
    ("count", "images", "loss", "reached"),
    [
        (9399, 10000, 0.9, False),
        (9400, 10000, 0.9, True),
        (46, 50, 0.9, False),
        (47, 50, 0.9, True),
        (9500, 10000, "nan", False),
    ],
)
def test_exactly_94_percent_of_the_images_is_reached_unless_a_run_diverged(count, images, loss, reached):
    row = {"validation_count": count, "validation_images": images, "train_loss": loss, "validation_loss": 0.9}
    assert reached_goal(row) == reached
