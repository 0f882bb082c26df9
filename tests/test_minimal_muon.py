"""minimal/muon.py equals the package to nine digits, prints the published lines, and trains without each trick."""

import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from conftest import REPO, Recorder, prepared, train_prepared, write_npz

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.layers import running_statistics
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe

TEXT = (REPO / "minimal" / "muon.py").read_text()
TRICKS = re.findall(r"  # without ([\w' ]+): ", TEXT)
SIZES = {"epochs": 4, "batch_size": 20, "width": 4, "whitening_epochs": 2}
STAGES = {"resolution": [12, 16, 28, 32], "keep_fraction": [1.0, 1.0, 0.7, 0.5]}
SHAPES, SEED = draw_shapes(63, 20), 11  # three images are left out of an epoch
LOG = r"""Uploaded data to GPUs \d+\.\d{3}s
# Preprocessed it \d+\.\d{3}s
Compute patch whitening statistics:     \d+\.\d{3}s
(Train acc [01]\.\d{4} loss \d\.\d{3}, validation acc [01]\.\d{4} loss \d\.\d{3} wall time \d+\.\d{3}s
){2}Maximum training time \d+\.\d+ median \d+\.\d+
Lowest accuracy 0\.\d+ median 0\.\d+
0 runs reached 0\.94 out of 2
"""


def edited(without: str | None, **figures: object) -> str:
    """Return the file's text with other hyper-parameters, and without a trick as its comment says."""
    text = TEXT
    for name, figure in figures.items():
        text = re.sub(rf"^    {name}=.*?,(?=  #)", f"    {name}={figure},", text, flags=re.MULTILINE)
    if without:
        [(line, indent, edit)] = re.findall(rf"^(( *).*  # without {without}: (.*)\n)", text, re.MULTILINE)
        text = text.replace(line, "" if edit == "delete this line" else f"{indent}{edit}\n")
    return text


@cache
def train_with_the_file(without: str | None = None) -> tuple[torch.nn.Module, np.ndarray]:
    """Return the network and, of each epoch, training accuracy and loss, test accuracy and loss, in float64."""
    exec(edited(without, **SIZES, **STAGES), names := {})
    data, _ = names["prepare"](SHAPES, torch.float64)
    network, epochs = names["train"](SEED, data, torch.float64, 0.0)
    return network, np.array(epochs)[:, 1:]


def train_with_the_package() -> tuple[torch.nn.Module, list[list[float]]]:
    pixels, kept = (",".join(map(str, figures)) for figures in STAGES.values())
    model, data = prepared(MuonRecipe(**SIZES, pixels=pixels, kept=kept), Images("shapes", *SHAPES))
    log, epochs = Recorder(), []
    log.epoch = lambda clock, train, test: epochs.append([train.accuracy, train.loss, test.accuracy, test.loss])
    log.run = lambda *_: None
    train_prepared(model, data, SEED, log)
    return model.network, epochs


def test_a_run_equals_the_packages_to_nine_digits():
    """At several resolutions, with odd and even sides, with the whitening's bias frozen and easy images left out."""
    (ours, epochs), (theirs, expected) = train_with_the_file(), train_with_the_package()
    np.testing.assert_allclose(epochs, expected, rtol=1e-9)
    assert not ours.whitening.bias.requires_grad, "its rate is 0, too: this is the work saved"
    weights = [weight for name, weight in ours.named_parameters() if not re.search(r"norm\d\.weight", name)]
    running = [tensor for name, tensor in ours.named_buffers() if "running" in name]
    expected_weights = [theirs.whitening.weight, *theirs.parameters(), *running_statistics(theirs)]
    for mine, other in zip([*weights, *running], expected_weights, strict=True):
        torch.testing.assert_close(mine.flatten(), other.flatten(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("trick", TRICKS)
def test_every_trick_makes_a_difference_except_skipped_rows(trick):
    usual, epochs = train_with_the_file()[1], train_with_the_file(trick)[1]
    assert np.allclose(epochs, usual, rtol=1e-9, atol=0) == (trick == "skipping rows")


def test_the_script_prints_the_published_lines_and_writes_the_curve(tmp_path):
    (tmp_path / "muon.py").write_text(edited(None, **SIZES | {"epochs": 1}))
    data = write_npz(tmp_path / "shapes.npz", *SHAPES)
    command = [sys.executable, "muon.py", "--data", data, "--runs", "2", "--precision", "bf16"]
    log = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.fullmatch(LOG, log)
    [head, epoch] = (tmp_path / "timing_log.tsv").read_text().splitlines()
    assert head == "epoch\thours\ttop1Accuracy"
    accuracy = 100 * float(re.findall(r"validation acc (\S+)", log)[0])
    assert re.fullmatch(rf"1\t\d\S+\t{accuracy:.6g}", epoch)
