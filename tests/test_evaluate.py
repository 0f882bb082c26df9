"""evaluate: saved weights say what they said when their run ended, and what they say by other views."""

import re
import sys

import pandas as pd
import pytest
import torch
from conftest import TINY, train_here

from large_batch_cifar_10_fast import evaluate
from large_batch_cifar_10_fast.metrics import TWO_VIEWS

SMALL = {
    "apple2019": ["--recipe", "apple2019", *TINY, "--eval_stats", "average"],
    "muon": ["--recipe", "muon", "--width", 4, "--batch_size", 24, "--epochs", 1, "--pixels", 16, "--no_warmup"],
}


@pytest.fixture(scope="module", params=SMALL)
def saved(request, tiny_npz, tmp_path_factory):
    """Weights, the options they were trained with, and their run's row."""
    folder, options = tmp_path_factory.mktemp("saved"), [*SMALL[request.param], "--data", tiny_npz, "--no_compile"]
    train_here(*options, "--save", folder / "w.pt", "--out", folder)
    return folder / "w.pt", options, pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


@pytest.fixture
def said(monkeypatch, capsys):
    """What the command prints, as its last line's fields."""

    def say(*arguments):
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
        evaluate.main()
        line = capsys.readouterr().out.splitlines()[-1]
        return re.match(r"validation acc (?P<accuracy>\S+) loss (?P<loss>\S+) of ", line).groupdict()

    return say


def test_saved_weights_say_what_their_run_said_last_and_something_else_by_other_views(saved, said):
    weights, options, row = saved
    expected = {"accuracy": f"{row['validation_accuracy']:.4f}", "loss": f"{row['validation_loss']:.5f}"}
    assert said(weights, *options) == expected
    other = ["--views", "one"] if row["recipe"] == "muon" else ["--eval_stats", "first"]
    assert said(weights, *options, *other)["loss"] != expected["loss"]


def test_what_does_not_fit_is_refused_in_one_line(saved, said, tmp_path, error_line):
    weights, options, _ = saved
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK" + weights.read_bytes()[:500])
    (tmp_path / "changed.pt").write_bytes(weights.read_bytes().replace(b"ctorch", b"cos\nys"))
    for name in ("absent.pt", "text.pt", "cut.pt", "changed.pt", "list.pt"):
        assert f"{tmp_path / name} does not fit (" in error_line(said, tmp_path / name, *options)
    assert "give the recipe and options it was trained with" in error_line(said, weights, *options, "--width", 8)


def test_views_of_half_precision_are_averaged_in_float32():
    def network(batch):
        return (1 + batch[:, 0, 0, :1] / 128).to(torch.bfloat16)

    image = torch.tensor([0.0, 1]).view(1, 1, 2, 1)
    assert TWO_VIEWS(network, image).item() == 1 + 1 / 256, "which bfloat16 would round to 1"
