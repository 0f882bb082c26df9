"""The 2019 method in one file: equal to the package in float64, whatever the processes, and without each trick."""

import importlib.util
import re

import numpy as np
import pytest
import torch
from conftest import REPO, Recorder, prepared, python, train_prepared, write_npz

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

WIDTH, BATCH, GROUPS, EPOCHS, SEED = 4, 8, 2, 3, 5
SOURCE = (REPO / "minimal" / "apple2019.py").read_text()
for name, value in {"width": WIDTH, "batch_size": BATCH, "ghost_groups": GROUPS, "epochs": EPOCHS}.items():
    SOURCE = re.sub(rf"^    {name}=\d+", f"    {name}={value}", SOURCE, count=1, flags=re.MULTILINE)
EDITS = re.findall(r"\n *(\S.*?  # without ([\w -]+): (.+))", SOURCE)
TRICKS = {trick: (line, "" if new == "delete this line" else new) for line, trick, new in EDITS}
SHAPES = draw_shapes(8 * 27, 24)  # three steps an epoch; three images of each shard remain


def trained(text: str, path) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Train with the program. Return its state, and each epoch's training accuracy and loss, test accuracy and loss."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(program := importlib.util.module_from_spec(spec))
    data, seconds = program.prepare(SHAPES, torch.float64)
    network, epochs = program.train(SEED, EPOCHS, data, sum(seconds))
    return network.state_dict(), [epoch[1:] for epoch in epochs]


class EveryEpoch(Recorder):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def epoch(self, clock, train, validation):
        super().epoch(clock, train, validation)
        self.epochs.append([train.accuracy, train.loss, validation.accuracy, validation.loss])


def trained_by_package() -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Train the same with the package, through `train_once`."""
    recipe = Apple2019(width=WIDTH, batch_size=BATCH, ghost_batch=BATCH // GROUPS, epochs=EPOCHS, ema_ep=EPOCHS / 9)
    (model, data), log = prepared(recipe, Images("shapes", *SHAPES)), EveryEpoch()
    train_prepared(model, data, SEED, log)
    return model.network.state_dict(), log.epochs


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(SOURCE, tmp_path_factory.mktemp("alone") / "program.py")


def test_a_run_is_the_packages_to_nine_digits(alone):
    (state, epochs), (expected, expected_epochs) = alone, trained_by_package()
    np.testing.assert_allclose(epochs, expected_epochs, rtol=1e-9)
    unused = [n for n in state if n.endswith("num_batches_tracked") or (n.endswith("weight") and state[n].ndim == 1)]
    tensors = {name: tensor for name, tensor in state.items() if name not in unused}
    assert len(tensors) == len(expected) == 10 + 8 * 3, "weights; biases and running statistics of the norms"
    for (name, tensor), theirs in zip(tensors.items(), expected.values(), strict=True):
        torch.testing.assert_close(
            tensor, theirs.view_as(tensor), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_every_trick_can_be_switched_off():
    tricks = {"whitening", "ghost batch norm", "balanced crops", "label smoothing", "test-time augmentation"}
    assert set(TRICKS) == tricks | {"constant rate at the end"}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_switched_off_trick_changes_the_result(trick, alone, tmp_path):
    line, new = TRICKS[trick]
    state, epochs = trained(SOURCE.replace(line, new), tmp_path / "program.py")
    assert np.isfinite(epochs).all()
    same = [torch.equal(state[name], tensor) for name, tensor in alone[0].items() if name.endswith("0.weight")]
    assert all(same) == (trick == "test-time augmentation"), "which alone leaves the weights as they are"
    assert epochs[-1][3] != alone[1][-1][3]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_program_prints_the_published_lines_and_trains_the_same_on_any_processes(processes, alone, tmp_path):
    call = "epochs = train(args.seed + run, hyp.epochs, data, sum(seconds))[1]"
    saving = f"network, {call.removesuffix('[1]')}; torch.save(network.state_dict(), args.out / f'{{run}}.{{RANK}}')"
    assert SOURCE.count(call) == 1
    (tmp_path / "program.py").write_text(SOURCE.replace(call, saving))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes] if processes > 1 else []
    options = ["--data", write_npz(tmp_path / "shapes.npz", *SHAPES), "--out", tmp_path, "--precision", "fp64"]
    options += ["--runs", 2, "--seed", SEED]
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    result = python(*launcher, tmp_path / "program.py", *options, cwd=tmp_path, **loopback)
    assert result.returncode == 0, result.stderr
    number, run = r"\d+\.\d{3}", r"Train acc {0}\d loss {0}, validation acc {0}\d loss {0} wall time {0}s\n"
    lines = rf"Uploaded data to GPUs {number}s\n# Preprocessed it {number}s\n"
    lines += rf"Compute patch whitening statistics:     {number}s\n{2 * run.format(number)}"
    lines += r"Maximum training time \d\.\d+ median \d\.\d+\nLowest accuracy 0\.\d+ median 0\.\d+\n"
    output = "".join(line for line in result.stdout.splitlines(True) if not re.search("Gloo|peer ranks|^$", line))
    assert re.fullmatch(lines + r"0 runs reached 0\.94 out of 2\n", output), output
    assert f"validation acc {alone[1][-1][2]:.4f} loss {alone[1][-1][3]:.3f}" in output
    header, *rows = (tmp_path / "timing_log.tsv").read_text().splitlines()
    assert header == "epoch\thours\ttop1Accuracy"
    epoch, hours, accuracy = np.array([line.split("\t") for line in rows], float).T
    assert epoch.tolist() == [1, 2, 3]
    assert (np.diff(hours, prepend=0) > 0).all()
    np.testing.assert_allclose(accuracy, [100 * epoch[2] for epoch in alone[1]], rtol=1e-5)
    for rank in range(processes):
        for name, tensor in torch.load(tmp_path / f"0.{rank}", weights_only=True).items():
            torch.testing.assert_close(tensor, alone[0][name], rtol=1e-9, atol=1e-11)
