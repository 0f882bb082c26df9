"""runs.tsv: whatever happens to it, no row is lost, and none is doubled."""

import errno
import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from large_batch_cifar_10_fast.campaign import COLUMNS, append, read_rows
from large_batch_cifar_10_fast.options import ConfigError

FAIL = Mock(side_effect=OSError(errno.ENOLCK, "full or without locks"))


def _row(run, campaign="mine"):
    return {**dict.fromkeys(COLUMNS, "1"), "campaign": campaign, "run": run, "runs": "99", "share": "0/1", "seed": run}


def _runs(path):
    return [int(row["run"]) for row in read_rows(path)]


@pytest.fixture
def table(tmp_path):
    append(path := tmp_path / "out" / "runs.tsv", [_row(0), _row(1)])
    return path


@pytest.mark.parametrize("command", ["mv {0} {0}.old", "rm {0}", "truncate -s 60 {0}"])
def test_a_table_that_was_renamed_deleted_or_truncated_has_all_rows_again(table, command):
    assert os.system(command.format(table)) == 0
    append(table, [_row(0), _row(1), _row(2)])
    assert _runs(table) == [0, 1, 2]


@pytest.mark.parametrize("damage", ["a\tb\n1\t2\n", "{head}damaged\n{rows}", "{head}{rows}{rows}"])
def test_a_damaged_table_is_left_alone_and_the_rows_go_beside_it(table, damage):
    head, *rows = table.read_text().splitlines(keepends=True)
    table.write_text(content := damage.format(head=head, rows="".join(rows)))
    with pytest.raises(ConfigError, match=r"this campaign's rows are in .*runs.tsv.broken"):
        append(table, [_row(0), _row(1), _row(2)])
    assert table.read_text() == content
    assert table.with_name("runs.tsv.broken").read_bytes().count(b"\n") == 3


def test_on_a_full_disk_a_half_written_row_is_set_aside_and_written_again_when_there_is_room(
    table, monkeypatch, capsys
):
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


def test_concurrent_appenders_neither_lose_nor_double_a_row(tmp_path):
    """A lock belongs to an open file: threads exclude each other as processes do."""
    with ThreadPoolExecutor(4) as appenders:
        list(appenders.map(lambda run: append(tmp_path / "runs.tsv", [_row(run)]), sorted([*range(20)] * 4)))
    assert sorted(_runs(tmp_path / "runs.tsv")) == list(range(20))


def test_a_file_system_without_locks_is_warned_of_once(table, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", FAIL)
    for run in (2, 3):
        append(table, [_row(run)])
    assert _runs(table) == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("cannot be locked (full or without locks)") == 1
