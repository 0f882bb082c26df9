"""The progress bar."""

import io
import sys

import pytest
from conftest import TINY, train_here


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(tiny_npz, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: is_terminal
    train_here("--demo", *TINY, "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert ("run 1 epoch 2, 0 of 0 runs over 94%: " in stderr.getvalue()) == is_terminal
    assert is_terminal or not stderr.getvalue()
