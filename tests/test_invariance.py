"""The heart of the design: the result does not depend on how many processes compute the workers."""

import pandas as pd
import pytest
import torch
from conftest import TINY, launch

# (processes, passes): every split of eight workers, and passes alone and together with processes
SPLITS = [(2, 1), (4, 1), (8, 1), (1, 4), (2, 2)]


def _train(npz, folder, processes, passes):
    result = launch(
        "--demo", *TINY, "--data", npz, "--precision", "fp64", "--passes", passes, "--save", folder / "weights.pt",
        cwd=folder, NPROC=processes,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "weights.pt", weights_only=True), pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


@pytest.fixture(scope="module")
def alone(tiny_npz, tmp_path_factory):
    return _train(tiny_npz, tmp_path_factory.mktemp("alone"), 1, 1)


@pytest.mark.parametrize(("processes", "passes"), SPLITS)
def test_parameters_statistics_and_counts_do_not_depend_on_processes(tiny_npz, tmp_path, alone, processes, passes):
    weights, row = _train(tiny_npz, tmp_path, processes, passes)
    expected, expected_row = alone
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (weights[name] - tensor).norm() / tensor.norm()
        assert error < 1e-9, f"{name} differs by {error:.1e}"
    assert row["processes"] == processes
    assert row["validation_count"] == expected_row["validation_count"]
    assert row["train_accuracy"] == expected_row["train_accuracy"]
    assert row["validation_loss"] == pytest.approx(expected_row["validation_loss"], rel=1e-9)


def test_weights_have_moved_and_statistics_were_followed(alone):
    weights, _ = alone
    assert all(tensor.abs().max() > 0 for name, tensor in weights.items() if "bias" in name or "running_mean" in name)
