"""What must not mislead: texts that are compared, names of launches, storage, tables that others saved."""

import errno
import os
import re

import pytest

from large_batch_cifar_10_fast import files
from large_batch_cifar_10_fast.lab.options import as_pairs
from large_batch_cifar_10_fast.lab.table import differences

pytestmark = pytest.mark.slow


def test_options_are_compared_whole():
    hyp = {"name": "a b", "rates": (1.0, 1.0, 1.0)}
    one = {"options": as_pairs(hyp)}
    for other in ({"name": "a  b"}, {"name": "a%20b"}, {"rates": (1.0, 0.001, 1.0)}):
        assert differences(one, {"options": as_pairs(hyp | other)}, ["options"])
    found = differences(one, {"options": as_pairs(hyp | {"name": "a c"})}, ["options"])
    assert found == "name (a%20b, not a%20c)"
    assert differences({"options": "x=(1.0, 1.0)"}, {"options": "x=(1.0, 0.1)"}, ["options"]), "of earlier versions"


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
