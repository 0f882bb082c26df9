"""The table of a running campaign: whatever happens to it, no row is lost, and none is doubled."""

import os
import shutil

import pytest
from disturbances import no_file_beyond

from large_batch_cifar_10_fast.results.journal import Journal
from large_batch_cifar_10_fast.results.tables import COLUMNS, read_rows
from large_batch_cifar_10_fast.settings.settings import Refusal


def test_a_row_is_whole_only_with_all_fields_and_its_newline(tmp_path):
    path = tmp_path / "runs.tsv"
    journal = Journal(path)
    journal.mend()
    for run in (0, 1):
        journal.append(_row(run))
    journal.close()
    whole = path.read_bytes()
    assert [row["run"] for row in read_rows(path)] == ["0", "1"]
    for cut in (whole[:-1], whole[:-5], whole[:-5] + b"\n"):
        path.write_bytes(cut)
        assert [row["run"] for row in read_rows(path)] == ["0"]
    path.write_bytes(whole.replace(b"\t1\n", b"\n", 1))
    with pytest.raises(Refusal, match="line 2"):
        read_rows(path)


def _row(run):
    return {**dict.fromkeys(COLUMNS, "1"), "campaign": "mine", "run": run, "runs": "9", "share": "0/1", "seed": run}


def _begun(folder):
    """The journal of a campaign that has made a run, and its table."""
    path = folder / "runs.tsv"
    journal = Journal(path)
    journal.mend()
    journal.append(_row(0))
    return journal, path


def _rename_another_over(path):
    other = path.with_name("edited")
    head, first, *_ = path.read_bytes().splitlines(keepends=True)
    other.write_bytes(head + first)
    os.replace(other, path)


def _delete_the_folder(path):
    shutil.rmtree(path.parent)


def _truncate(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("change", [_rename_another_over, _delete_the_folder, _truncate])
def test_no_row_is_lost_when_somebody_changes_the_table_of_a_running_campaign(tmp_path, change):
    path = tmp_path / "out" / "runs.tsv"
    path.parent.mkdir()
    journal = Journal(path)
    journal.mend()
    assert journal.append(_row(0))
    assert journal.append(_row(1))
    change(path)
    assert not journal.append(_row(2))
    assert journal.append(_row(3)), "from then on it is the new one"
    assert [row["run"] for row in read_rows(path)] == ["0", "1", "2", "3"]
    with pytest.raises(Refusal, match="another campaign is writing"):
        Journal(path)


def test_where_a_campaigns_table_was_replaced_by_something_else_its_rows_are_put_beside_it(tmp_path):
    journal, path = _begun(tmp_path)
    path.unlink()
    path.write_text("a\tb\n1\t2\n")
    with pytest.raises(Refusal, match=r"has other columns .* this campaign's rows are in .*runs.tsv.broken"):
        journal.append(_row(1))
    assert path.read_text() == "a\tb\n1\t2\n"
    assert (tmp_path / "runs.tsv.broken").read_bytes().count(b"\n") == 2


def test_where_another_campaign_took_the_tables_place_the_rows_are_put_beside_it(tmp_path):
    journal, path = _begun(tmp_path)
    path.unlink()
    other = Journal(path)
    other.mend()
    with pytest.raises(Refusal, match=r"another campaign is writing .* this campaign's rows are in .*runs.tsv.broken"):
        journal.append(_row(1))
    with pytest.raises(Refusal, match="another campaign is writing"):
        journal.append(_row(2))
    assert read_rows(path) == []
    other.close()
    assert (tmp_path / "runs.tsv.broken").read_bytes().count(b"\n") == 3, "each once"


def test_a_half_written_row_is_told_of(tmp_path):
    path = tmp_path / "runs.tsv"
    for half_written in (False, True):
        journal = Journal(path)
        assert journal.mend() == half_written
        journal.append(_row(0))
        journal.close()
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))  # which an editor may leave out
    assert read_rows(path) == []


def test_a_half_written_header_is_made_again(tmp_path):
    path = tmp_path / "runs.tsv"
    path.write_text("campaign\tstar")
    journal = Journal(path)
    journal.mend()
    journal.append(_row(0))
    journal.close()
    assert len(read_rows(path)) == 1


def test_rows_of_before_a_resume_are_put_back_too(tmp_path):
    path = tmp_path / "runs.tsv"
    for run in (0, 1):
        journal = Journal(path, finished=read_rows(path) if path.exists() else [])
        journal.mend()
        journal.append(_row(run))
        journal.close()
    journal = Journal(path, finished=read_rows(path))
    path.unlink()
    assert not journal.append(_row(2))
    assert [row["run"] for row in read_rows(path)] == ["0", "1", "2"]


def test_what_a_full_disk_cut_off_is_mended_when_there_is_room(tmp_path):
    """Of other teams' runs, say: their processes end of it, and the journal's goes on."""
    path = tmp_path / "runs.tsv"
    journal = Journal(path)
    journal.mend()
    assert journal.append(_row(0))
    with no_file_beyond(path.stat().st_size + 20):
        for run in (1, 2):
            with pytest.raises(OSError, match="File too large"):
                journal.append(_row(run))
    assert not journal.append(_row(3))
    assert [row["run"] for row in read_rows(path)] == ["0", "1", "2", "3"]
    with pytest.raises(Refusal, match="another campaign is writing"):
        Journal(path)


def test_who_finds_the_table_spoilt_keeps_the_row_beside_it(tmp_path):
    journal, path = _begun(tmp_path)
    row = path.read_bytes().splitlines(keepends=True)[1]
    with open(path, "ab") as other:
        other.write(b"spoilt\n" + row)
    with pytest.raises(Refusal, match=r"line 3: 1 fields"):
        journal.append(_row(1))
    assert b"\t1\t" in (tmp_path / "runs.tsv.broken").read_bytes()
