"""What must not mislead: texts that are compared, names of launches, storage, tables that others saved."""

import errno
import os
import re

import pandas as pd
import pytest
from conftest import TINY, run_here

from large_batch_cifar_10_fast import ConfigError, files
from large_batch_cifar_10_fast.lab.options import as_pairs
from large_batch_cifar_10_fast.lab.results import read_log
from large_batch_cifar_10_fast.lab.table import differences, new_name

pytestmark = pytest.mark.slow


def test_options_are_compared_whole():
    hyp = {"name": "a b", "rates": (1.0, 1.0, 1.0)}
    one = {"options": as_pairs(hyp)}
    for other in ({"name": "a  b"}, {"name": "a%20b"}, {"rates": (1.0, 0.001, 1.0)}):
        assert differences(one, {"options": as_pairs(hyp | other)}, ["options"])
    found = differences(one, {"options": as_pairs(hyp | {"name": "a c"})}, ["options"])
    assert found == "name (a%20b, not a%20c)"
    assert differences({"options": "x=(1.0, 1.0)"}, {"options": "x=(1.0, 0.1)"}, ["options"]), "of earlier versions"


def test_launches_in_containers_have_names_of_their_own(monkeypatch, tmp_path):
    """There each is process 1, and they may start in the same second."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert len({new_name() for _ in range(100)}) == 100
    with files.write_atomically(tmp_path / "a") as one, files.write_atomically(tmp_path / "a") as two:
        one.write_text("one")
        two.write_text("two")
    assert (tmp_path / "a").read_text() == "one"


def test_a_file_system_without_fsync_is_warned_of_once_and_a_full_one_is_an_error(tmp_path, monkeypatch, capsys):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    for text in ("one", "two"):
        with files.write_atomically(tmp_path / "a") as unfinished:
            unfinished.write_text(text)
    assert (tmp_path / "a").read_text() == "two"
    warning = capsys.readouterr().err
    assert re.fullmatch(
        r"Warning: .*a is written, but a power .* \(Invalid argument\): use another file system\n", warning
    )
    number = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"), files.write_atomically(tmp_path / "a") as unfinished:
        unfinished.touch()


def test_a_table_that_pandas_has_saved_is_continued(tiny_npz, tmp_path):
    small = ["--demo", *TINY, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night", "--runs"]
    run_here(*small, 1)
    path = tmp_path / "runs.tsv"
    rows = pd.read_csv(path, sep="\t", keep_default_na=False).astype({"run": float, "seed": float})
    rows.to_csv(path, sep="\t", index=False)
    assert "night\t0.0\t0.0\t" in path.read_text()
    run_here(*small, 2)
    assert len(read_log(str(path)).runs) == 2
    path.write_text(path.read_text().replace("night\t0.0\t", "night\t0.5\t"))
    with pytest.raises(ConfigError, match=r"line 2: '0.5' is not a run or seed; correct it"):
        run_here(*small, 2)
