"""The programs of minimal/ equal the package to nine digits, train without each trick, print the published lines."""

import re
from functools import cache

import numpy as np
import pytest
import torch
from conftest import REPO, Recorder, prepared, python, train_prepared, write_npz

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.layers import running_statistics
from large_batch_cifar_10_fast.recipes import Apple2019, MuonRecipe

SEED = 11
FIGURES = {  # in place of the programs' own
    "apple2019": {"width": 4, "batch_size": 8, "ghost_groups": 2, "epochs": 3},
    "muon": {"width": 4, "batch_size": 20, "epochs": 4, "whitening_epochs": 2},
}
FIGURES["muon"] |= {"resolution": [12, 16, 28, 32], "keep_fraction": [1.0, 1.0, 0.7, 0.5]}
RECIPES = {
    "apple2019": Apple2019(width=4, batch_size=8, ghost_batch=4, epochs=3, ema_ep=3 / 9),
    "muon": MuonRecipe(width=4, batch_size=20, epochs=4, whitening_epochs=2, pixels="12,16,28,32", kept="1,1,0.7,0.5"),
}
SHAPES = {
    "apple2019": draw_shapes(8 * 27, 24),
    "muon": draw_shapes(63, 20),
}  # three images of a shard remain
LOG = r"""Uploaded data to GPUs \d+\.\d{3}s
# Preprocessed it \d+\.\d{3}s
Compute patch whitening statistics:     \d+\.\d{3}s
(Train acc [01]\.\d{4} loss \d\.\d{3}, validation acc [01]\.\d{4} loss \d\.\d{3} wall time \d+\.\d{3}s
){2}Maximum training time \d+\.\d+ median \d+\.\d+
Lowest accuracy 0\.\d+ median 0\.\d+
0 runs reached 0\.94 out of 2
"""


def edited(name: str, without: str = "") -> str:
    """Return a program with other hyper-parameters, and without a trick as its comment says."""
    text = (REPO / "minimal" / f"{name}.py").read_text()
    for figure, value in FIGURES[name].items():
        text = re.sub(rf"^    {figure}=.*?,(?=  #)", f"    {figure}={value},", text, flags=re.MULTILINE)
    if without:
        [(line, indent, edit)] = re.findall(rf"^(( *).*  # without {without}: (.*)\n)", text, re.MULTILINE)
        text = text.replace(line, "" if edit == "delete this line" else f"{indent}{edit}\n")
    return text


TRICKS = [(name, trick) for name in FIGURES for trick in re.findall(r"  # without ([\w' -]+): ", edited(name))]


@cache
def trained(name: str, without: str = "") -> tuple[torch.nn.Module, np.ndarray]:
    """Return the network and, of each epoch, training accuracy and loss, test accuracy and loss, in float64."""
    exec(edited(name, without), program := {})
    data, _ = program["prepare"](SHAPES[name], torch.float64)
    options = (data, torch.float64) if name == "muon" else (FIGURES[name]["epochs"], data)
    network, epochs = program["train"](SEED, *options, 0.0)
    return network, np.array(epochs)[:, 1:]


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_equals_the_packages_to_nine_digits(name):
    """Muon's at several resolutions, odd and even, with the whitening's bias frozen and easy images left out."""
    (ours, epochs), (model, data), log = trained(name), prepared(RECIPES[name], Images("", *SHAPES[name])), Recorder()
    train_prepared(model, data, SEED, log)
    expected = [[train.accuracy, train.loss, test.accuracy, test.loss] for train, test in log.scores]
    np.testing.assert_allclose(epochs, expected, rtol=1e-9)
    assert not any(weight.requires_grad for weight in ours.whitening.parameters()), "which saves work"
    scales = {id(module.weight) for module in ours.modules() if isinstance(module, torch.nn.BatchNorm2d)}  # not used
    trained_weights = [w for w in ours.parameters() if w is not ours.whitening.weight and id(w) not in scales]
    running = [tensor for name, tensor in ours.named_buffers() if "running" in name]
    theirs = [model.network.whitening.weight, *model.network.parameters(), *running_statistics(model.network)]
    for mine, other in zip([ours.whitening.weight, *trained_weights, *running], theirs, strict=True):
        torch.testing.assert_close(mine.flatten(), other.flatten(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "trick"), TRICKS)
def test_every_trick_makes_a_difference_except_skipped_rows(name, trick):
    assert len(TRICKS) == 6 + 10
    (_, usual), (_, epochs) = trained(name), trained(name, trick)
    assert np.isfinite(epochs).all()
    alike = np.isclose(epochs, usual, rtol=1e-9, atol=0)
    assert alike.all() == (trick == "skipping rows")
    assert alike[:, :2].all() == (trick in ("skipping rows", "six views", "test-time augmentation")), "in training"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "precision"), [("apple2019", 1, "fp64"), ("apple2019", 2, "fp64"), ("muon", 1, "bf16")]
)
def test_a_program_prints_the_published_lines_and_writes_the_curve(name, processes, precision, tmp_path):
    (tmp_path / "program.py").write_text(edited(name))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes] if processes > 1 else []
    options = ["--data", write_npz(tmp_path / "shapes.npz", *SHAPES[name]), "--precision", precision]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    result = python(*launcher, "program.py", *options, "--runs", 2, "--seed", SEED, cwd=tmp_path, **variables)
    output = "".join(line for line in result.stdout.splitlines(True) if not re.search("Gloo|peer ranks|^$", line))
    assert re.fullmatch(LOG, output), output + result.stderr
    header, *rows = (tmp_path / "timing_log.tsv").read_text().splitlines()
    assert header == "epoch\thours\ttop1Accuracy"
    epoch, hours, accuracy = np.array([row.split("\t") for row in rows], float).T
    assert epoch.tolist() == [*range(1, FIGURES[name]["epochs"] + 1)]
    assert (np.diff(hours, prepend=0) > 0).all()
    assert f"validation acc {accuracy[-1] / 100:.4f}" in output
    if precision == "fp64":
        expected = trained(name)[1]
        assert "acc {:.4f} loss {:.3f}, validation acc {:.4f} loss {:.3f} ".format(*expected[-1]) in output
        np.testing.assert_allclose(accuracy, 100 * expected[:, 2], rtol=1e-5)
