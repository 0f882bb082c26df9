"""Compiling changes nothing but the speed, and failing at it does no harm; the bench tells its figures."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import REPO, TINY, environment
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from large_batch_cifar_10_fast.compiling import compiled
from large_batch_cifar_10_fast.distributed import Team
from large_batch_cifar_10_fast.images import random_images
from large_batch_cifar_10_fast.network import Network, smoothed_cross_entropy
from large_batch_cifar_10_fast.optimizer import NesterovSGD
from large_batch_cifar_10_fast.plain import plain_network, plain_update
from large_batch_cifar_10_fast.run_log import Clock
from large_batch_cifar_10_fast.settings import Settings
from large_batch_cifar_10_fast.train import Model, decide, new_tally, prepare, take_step

ALONE = Team(0, 1, torch.device("cpu"), range(2), 2)
SMALL = Settings(workers=2, batch_size=16, width=4, precision="fp64", compile=True)


def _network() -> Network:
    filters = torch.randn(27, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return Network(filters, 4, seed=1).cast("fp64", torch.device("cpu"))


def _step(network: Network, forward) -> dict[str, torch.Tensor]:
    """Gradients and running statistics after one batch of two workers."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(32, 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.arange(32) % 10
    network.follow(16)
    smoothed_cross_entropy(forward(images.to(memory_format=torch.channels_last)), labels).sum().backward()
    return {**{n: p.grad for n, p in network.named_parameters()}, **dict(network.named_buffers())}


def test_the_compiled_network_has_the_same_gradients_and_statistics(recwarn):
    network = _network()
    fused = compiled(network, SMALL, ALONE)
    assert fused is not network, "no compiler here?"
    network.restart(_network().filters, seed=1)
    ours, expected = _step(network, fused), _step(eager := _network(), eager)
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_the_plain_path_of_the_bench_is_the_same_mathematics():
    settings = Settings(workers=2, batch_size=16, width=4, precision="fp64")
    plain, ours = plain_network(settings, ALONE), _network()
    plain.restart(ours.filters, seed=1)
    got, expected = _step(plain, plain), _step(ours, ours)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)
        parameter.grad = expected[name]
    NesterovSGD(ours, settings, 5).step()
    plain_update(NesterovSGD(plain, settings, 5))
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_graph_that_loses_gradients_is_not_used(monkeypatch, capsys):
    """As torch 2.11 did, without a word, for a norm whose last operation was a cast that changed nothing."""

    class Forgetful(torch.nn.Module):
        def __init__(self, network, **_):
            super().__init__()
            self.network = network

        def forward(self, images):
            x = self.network.prep(torch.nn.functional.conv2d(images, self.network.filters, padding=1)).detach()
            return self.network.head(self.network.layer3(self.network.layer2(self.network.layer1(x)))) / 16 + 0 * sum(
                weight.sum() for weight in self.network.prep.parameters()
            )

    monkeypatch.setattr(torch, "compile", Forgetful)
    network = _network()
    assert compiled(network, SMALL, ALONE) is network
    assert "Warning: not compiled (the compiled gradient of prep.0.weight is 100% off)" in capsys.readouterr().err
    assert all(weight.grad is None for weight in network.parameters())


def test_a_compilation_that_was_broken_off_names_the_file_to_delete(monkeypatch, capsys):
    def refuse(images):
        raise ImportError("/tmp/cache/main.so: file too short")  # seen after a kill in the middle of linking

    monkeypatch.setattr(torch, "compile", lambda network, **_: refuse)
    network = _network()
    assert compiled(network, SMALL, ALONE) is network
    assert "(/tmp/cache/main.so: file too short) (a compilation was broken off: delete this file)" in (
        capsys.readouterr().err
    )


def test_on_a_pretended_gpu_an_epoch_neither_waits_nor_mixes_devices(monkeypatch):
    """FakeTensorMode knows shapes and devices alone: what needs a value, or tensors of two devices, raises.

    Backward would need a driver; zeros stand for its gradients.
    """
    gpu = torch.device("cuda", 0)

    class Generator:
        device = gpu

        def __init__(self, device):
            assert device == gpu

        def manual_seed(self, seed):
            pass

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "randperm", lambda n, generator, device: torch.arange(n, device=device))
    settings, team = replace(SMALL, precision="fp32", passes=2), Team(0, 1, gpu, range(2), 2)
    with FakeTensorMode(allow_non_fake_inputs=False):
        network = Network(torch.zeros(27, 3, 3, 3), 4, seed=0)
        for module in network.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(weight.to(gpu)))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(gpu))
        weights = list(network.parameters())
        monkeypatch.setattr(
            torch.Tensor,
            "backward",
            lambda _: [setattr(weight, "grad", torch.zeros_like(weight)) for weight in weights],
        )
        model = Model(network, network, settings, team)
        task = prepare(random_images(96, 10), settings, team, Clock(lambda: None))
        optimizer, tally, steps = NesterovSGD(network, settings, 3), new_tally(team), 0
        for batches in task.train.epoch(seed=0, epoch=1):
            take_step(model, optimizer, batches, tally)
            steps += 1
        with pytest.raises(DataDependentOutputException):
            tally.tolist()
    assert steps == 3
    assert {tensor.device for tensor in (*weights, tally, *task.test)} == {gpu}


def test_without_a_compiler_training_goes_on_with_one_warning(tiny_npz, tmp_path):
    command = [
        sys.executable, "-m", "large_batch_cifar_10_fast.train", "--demo", *TINY, "--epochs", "1", "--compile",
        "--data", str(tiny_npz),
    ]  # fmt: skip
    variables = environment(PYTHONPATH=REPO, CXX="/absent/compiler", TORCHINDUCTOR_CACHE_DIR=tmp_path / "cache")
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("Warning: not compiled (")
    assert result.stderr.count("\n") == 1
    assert "out of 1" in result.stdout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), True),  # hours on a CPU
        (Settings(no_compile=True), False),
        (Settings(width=8, epochs=3, ema_ep=1.0), False),  # over before a compiler is done
        (Settings(width=8, epochs=3, ema_ep=1.0, compile=True), True),
    ],
)
def test_long_runs_are_compiled_unless_told_otherwise(settings, expected):
    decided = decide(settings, Team(1, 2, torch.device("cpu"), range(4, 8), 8), 50_000)
    assert (decided.compile, decided.no_compile) == (expected, not expected)
    assert decided.precision == "fp32"


def test_the_bench_tells_all_parts_and_the_ratio():
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.bench", "--json", "--repeats", "2", "--width", "4",
               "--batch_size", "16", "--no_compile"]  # fmt: skip
    result = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["step"]["ratio"] > 0
    assert told["step"]["least"] <= told["step"]["seconds"] <= told["step"]["most"]
    for part in ("upload", "preprocessing", "whitening", "augmentation of an epoch", "forward", "backward", "averaging",
                 "update", "validation", "compilation", "start-up"):  # fmt: skip
        assert told[part]["seconds"] >= 0, part
    assert {"step", "forward", "backward", "update"} <= told["plain"].keys()
    assert told["images per second"] == pytest.approx(16 / told["step"]["seconds"])
    assert 0 < told["share of the matrix product's rate"] < 1.5
