"""A quick share of the attack: what a user can hand over wrongly is answered in one line, or done."""

import random

import attack
import pytest
from conftest import REPO
from disturbances import fill_disks

from large_batch_cifar_10_fast.data.cifar10 import load_images
from large_batch_cifar_10_fast.read_logs import read_log

GOOD = {"refused in one line", "accepted"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_no_bad_request_gets_more_than_one_line(tiny_npz, tmp_path):
    answers = {what: attack.answer(attempt) for what, attempt in attack.bad_requests(tiny_npz, tmp_path)}
    assert len(answers) > 2000
    assert {what: answer for what, answer in answers.items() if answer not in GOOD} == {}
    assert sum(answer != "accepted" for answer in answers.values()) > 0.9 * len(answers)
    assert not list(tmp_path.iterdir()), "nothing is written by a request that is only looked at"


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_loses_no_run(tiny_npz, tmp_path):
    """At the header's, the first run's curve, a row, the weights and the last row."""
    found = fill_disks(tiny_npz, tmp_path / "full", 5, random.Random(0))
    assert found["by"] == {"OSError": 5}
    assert not any(found[what] for what in found if what not in ("by", "full disks")), found


@pytest.mark.parametrize("file", ["images", "runs.tsv", "timing_log.tsv", "run_log.txt"])
def test_damaged_files_are_read_or_refused_in_one_line(tiny_npz, tmp_path, file):
    path = tmp_path / (file if file != "images" else "tiny.npz")
    path.write_bytes((REPO / "logs" / "demo" / file if file != "images" else tiny_npz).read_bytes())
    answers = attack.damages(load_images if file == "images" else read_log, path, 60, random.Random(file))
    assert set(answers) <= GOOD, answers
    assert answers["refused in one line"]


@pytest.mark.slow
def test_a_damaged_table_is_gone_on_with_or_refused_in_one_line(tiny_npz, tmp_path):
    table = attack.unfinished_table(tiny_npz, tmp_path / "unfinished")
    answers = attack.damages(attack.go_on_with, table, 60, random.Random(0))
    assert set(answers) == GOOD, answers
