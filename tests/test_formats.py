"""Every format of a log is read back."""

import math

import numpy as np
import pytest
from conftest import REPO
from test_compare import OUR_HEAD, PUBLISHED, our_form, published_form, runs_table

from large_batch_cifar_10_fast.results.logs import read_log
from large_batch_cifar_10_fast.settings.settings import Refusal


def test_the_published_form_is_read_back(tmp_path):
    path = tmp_path / "run_log.txt"
    path.write_text(published_form())
    log = read_log(str(path))
    np.testing.assert_allclose(log.accuracy, PUBLISHED["valid_acc"])
    np.testing.assert_allclose(log.seconds, PUBLISHED["seconds"])
    assert log.rounding == 0.0005
    assert (log.reached, log.lowest, log.median) == ((41, 41), 0.9374, 0.9419)


def test_four_decimals_of_ten_thousand_images_are_exact(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(our_form([0.9399, 0.9400, 0.9401]))
    log = read_log(str(path))
    assert (log.reached, log.rounding) == ((2, 2), 0.0)
    assert log.facts["device"] == "1 x NVIDIA H200"
    assert log.facts["epochs"] == "18"
    path.write_text(our_form([0.9399, 0.9400, 0.9401]).replace(OUR_HEAD, ""))
    assert read_log(str(path)).reached == (1, 2), "without the number of images 0.9400 may be 0.93995"


def test_a_table_of_runs_is_read_by_campaign(tmp_path):
    path = runs_table(tmp_path / "runs.tsv")
    last = read_log(path)
    np.testing.assert_allclose(last.accuracy, [0.9399, 0.94, 0.9401])
    assert (last.reached, last.notes) == ((2, 2), ())
    np.testing.assert_equal(last.goal_seconds, [math.nan, 4.5, 4.7])
    assert read_log(path, "a").accuracy.tolist() == [0.93]
    with pytest.raises(Refusal, match="no campaign c, only a, b"):
        read_log(path, "c")
    unfinished = read_log(runs_table(tmp_path / "runs.tsv", runs="5"))
    assert "3 of the campaign's 5 runs" in unfinished.notes[0]


@pytest.mark.parametrize("header", ["epoch", "epochs"])
def test_dawnbench_tables_of_both_headers_are_read(tmp_path, header):
    path = tmp_path / "entry.tsv"
    path.write_text(f"{header}\thours\ttop1Accuracy\n0\t0.001\t12.5\n1\t0.002\t94.05\n2\t0.003\t94.19\n")
    log = read_log(str(path))
    assert (log.accuracy.tolist(), log.reached) == ([0.9419], (1, 1))
    np.testing.assert_allclose([log.seconds[0], log.goal_seconds[0]], [10.8, 7.2])


def test_every_published_entry_is_read():
    files = sorted((REPO / "published" / "dawnbench").glob("*.tsv"))
    assert len(files) == 10
    assert all(read_log(str(path)).reached == (1, 1) for path in files)
