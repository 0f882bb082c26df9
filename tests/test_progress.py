"""What is shown of a campaign on its way, and what a log that goes on says of the runs before."""

import io

import pandas as pd
import pytest
from conftest import train_here
from tqdm import tqdm

from large_batch_cifar_10_fast import log as run_log
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.recipe import work, work_of_epoch

MUON = ["--recipe", "muon", "--width", "2", "--batch_size", "100", "--epochs", "2", "--pixels", "9,32"]
MUON += ["--kept", "1,0.5"]
MUON += ["--precision", "fp32", "--no_compile", "--no_warmup", "--views", "one"]


class Shown(tqdm):
    """As on a terminal; notes what was done after each epoch."""

    def __init__(self, **options):
        super().__init__(**(options | {"disable": False, "file": io.StringIO()}))
        self.begun, SHOWN[:] = [], [self]

    def set_description(self, text, refresh):
        self.begun.append((text, self.n))


SHOWN: list[Shown] = []


def test_progress_goes_by_work_so_that_the_time_left_is_right(tiny_npz, tmp_path, monkeypatch):
    """The second epoch has half the steps, and several times the work."""
    monkeypatch.setattr(run_log, "tqdm", Shown)
    _, recipe = read_request(MUON)
    first, second = (work_of_epoch(recipe, 643, epoch) for epoch in (1, 2))
    assert first + second == work(recipe, 643)
    assert second > 3 * first
    train_here(*MUON, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    (bar,) = SHOWN
    assert bar.total == 2 * (first + second)
    begun = [n for _, n in bar.begun]
    assert begun == pytest.approx([0, first, first + second, 2 * first + second])
    assert bar.total - 100 < bar.n <= bar.total
    assert bar.format_dict["rate"] is None, "of the last steps: then the mean of all counts"
    table = (tmp_path / "runs.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "runs.tsv").write_text("".join(table[:-1]))
    train_here("--resume", "--out", tmp_path)
    assert SHOWN[0].begun[0][1] == first + second, "made before"
    assert SHOWN[0].n == pytest.approx(bar.total)


def test_a_log_that_goes_on_has_both_clocks_too(tiny_npz, tmp_path, capsys):
    train_here(*MUON, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    table = (tmp_path / "runs.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "runs.tsv").write_text("".join(table[:-1]))
    before = capsys.readouterr().out.splitlines()
    train_here("--resume", "--out", tmp_path)
    after = capsys.readouterr().out.splitlines()
    first = before.index(next(line for line in before if line.startswith("Train acc")))
    assert before[first + 1].startswith("# wall time of the first run: ")
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert f"(with it {row['seconds'] + row['last_validation']:.3f}s)" in before[first + 2]
    assert after[first : first + 3] == before[first : first + 3]
