"""The progress bar: where it is shown, and what it counts."""

import io
import sys

import pytest
from conftest import TINY, train_here
from tqdm import tqdm

from large_batch_cifar_10_fast import log
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.recipe import work, work_of_epoch

MUON = ["--recipe", "muon", "--width", "2", "--batch_size", "100", "--epochs", "2", "--pixels", "9,32"]
MUON += ["--kept", "1,0.5", "--precision", "fp32", "--no_compile", "--no_warmup", "--views", "one"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(tiny_npz, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: is_terminal
    train_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert ("run 1 epoch 2, 0 of 0 runs over 94%: " in stderr.getvalue()) == is_terminal
    assert is_terminal or not stderr.getvalue()


def test_progress_counts_work_so_that_the_time_left_is_right(tiny_npz, tmp_path, monkeypatch):
    """The second epoch has half the steps, and several times the work."""
    positions = []

    class Shown(tqdm):
        def __init__(self, **options):
            super().__init__(**(options | {"disable": False, "file": io.StringIO()}))

        def set_description(self, text, refresh):
            positions.append(self.n / self.total)

    monkeypatch.setattr(log, "tqdm", Shown)
    _, recipe = read_request(MUON)
    first = work_of_epoch(recipe, 643, 1) / work(recipe, 643)
    assert first < 0.25
    train_here(*MUON, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    assert positions == pytest.approx([0, first / 2, 1 / 2, 1 / 2 + first / 2])
    table = tmp_path / "runs.tsv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    train_here("--resume", "--out", tmp_path)
    assert positions[4:] == positions[2:4], "a resumed campaign begins where it was interrupted"
