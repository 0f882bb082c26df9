"""Which GPUs are used, in which precision, by which interpreter; and the line that says why one is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, TINY, environment, launch
from torch.utils._python_dispatch import TorchDispatchMode

from large_batch_cifar_10_fast import checks as advice
from large_batch_cifar_10_fast import devices
from large_batch_cifar_10_fast.devices import matrix_rate
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.optim import NesterovSGD
from large_batch_cifar_10_fast.options import ConfigError
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.fastai import FastAI
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.train import make_model

CPU = DistContext(0, 1, torch.device("cpu"), 8)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Path:
    """A folder, first in PATH, whose nvidia-smi lists a V100 with a driver for CUDA 12; CUDA_VISIBLE_DEVICES unset."""
    folder = tmp_path / "smi"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *list-gpus*) echo "GPU 0: Tesla V100";; *) echo 535.183.06;; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return folder


@pytest.mark.skipif(GPUS > 0, reason="torch can use the GPUs here")
@pytest.mark.slow
def test_gpus_that_torch_cannot_use_end_a_launch_unless_the_cpu_is_asked_for(nvidia_smi, tiny_npz, tmp_path):
    small = ["--demo", *TINY, "--data", tiny_npz, "--no_compile"]
    result = launch(*small, cwd=tmp_path, nproc=1)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    for text in (f"torch {torch.__version__} ", "driver 535.183.06", "--device cpu trains on the CPU"):
        assert text in result.stderr
    on_cpu = launch(*small, "--device", "cpu", cwd=tmp_path, nproc=1)
    assert (on_cpu.returncode, on_cpu.stderr) == (0, "")
    hidden = launch(*small, cwd=tmp_path, nproc=1, CUDA_VISIBLE_DEVICES="")
    assert (hidden.returncode, hidden.stderr) == (0, "")


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_absent_is_an_error():
    with pytest.raises(ConfigError, match="--device cuda: there is no GPU here"):
        devices.count_gpus("cuda")


@pytest.mark.parametrize(
    ("cuda", "driver", "visible", "todo"),
    [
        (None, "535.183.06", None, "install torch 2.10.0 and torchvision 0.25.0 from PyPI"),
        ("13.0", "535.183.06", None, "install a driver from 580 on, or torch 2.10.0 and torchvision 0.25.0 from PyPI"),
        ("13.0", "470.57.02", None, "install a driver from 580 on"),
        ("12.8", "470.57.02", None, "install a driver from 525 on"),
        ("12.8", "535.183.06", "9", "correct CUDA_VISIBLE_DEVICES=9"),
        ("12.8", "580.65.06", None, "check that nvidia-smi works"),
        ("12.8", "unknown", None, "check that nvidia-smi works"),
    ],
)
def test_what_is_to_be_done_depends_on_driver_and_build(cuda, driver, visible, todo, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    line = devices.unusable(cuda, driver, "reason")
    assert f"driver {driver} (reason)" in line
    assert todo in line
    assert ("PyPI" in line) == ("PyPI" in todo)


def test_kernels_run_on_their_own_major_version_and_ptx_on_all_later_ones():
    built = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    runs = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert all(devices.has_kernels(capability, built) for capability in runs)
    assert not any(devices.has_kernels(capability, built) for capability in [(6, 0), (7, 0), (11, 0), (13, 0)])
    assert devices.has_kernels((13, 0), [*built, "compute_120"])
    assert not devices.has_kernels((11, 0), [*built, "compute_120"])


@pytest.mark.parametrize(
    ("capability", "fitting"), [((7, 0), "2.10.0 and .* PyPI"), ((6, 0), "2.10.0 .*/cu126"), ((13, 0), "a newer torch")]
)
def test_a_gpu_without_kernels_is_named_with_the_torch_that_has_them(capability, fitting, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_120"])
    devices.check_kernels("T4", (7, 5))
    with pytest.raises(
        ConfigError, match=f"Some GPU has .* {capability[0]}.0, but torch .* sm_75 .*: install .*{fitting}"
    ):
        devices.check_kernels("Some GPU", capability)


def test_the_torch_that_messages_name_is_the_one_that_is_installed():
    pins = dict(line.split("==") for line in (REPO / "requirements.txt").read_text().split())
    assert f"torch {pins['torch']} and torchvision {pins['torchvision']}" == devices.TESTED


def _on_gpu(capability: tuple[int, int], monkeypatch, others: str | None = None) -> DistContext:
    """A process on a GPU of this compute capability; another says of bf16 what is given."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(DistContext, "all_gather_words", lambda ctx, subject, word: [word, others or word])
    return DistContext(0, 1, torch.device("cuda:0"), 8)


def test_a_gpu_computes_in_the_half_precision_of_the_recipe_or_the_one_it_has(monkeypatch):
    def default(recipe, capability, others=None):
        ctx = _on_gpu(capability, monkeypatch, others)
        return advice.precision_on(ctx, "", recipe, 50_000)

    assert [default(recipe, (9, 0)) for recipe in (Apple2019(), FastAI(), MuonRecipe())] == ["fp16", "fp16", "bf16"]
    assert [default(MuonRecipe(), capability) for capability in ((7, 0), (7, 5), (8, 0))] == ["fp16", "fp16", "bf16"]
    assert default(MuonRecipe(), (8, 0), others="False") == "fp16", "another process has a V100"


@pytest.mark.parametrize(("precision", "instead"), [("bf16", "fp16"), ("tf32", "fp32")])
def test_a_precision_that_a_gpu_lacks_is_refused(precision, instead, monkeypatch):
    assert advice.precision_on(_on_gpu((8, 0), monkeypatch), precision, Apple2019(), 50_000) == precision
    with pytest.raises(ConfigError, match=f"--precision {precision} needs .* 8.0 .*7.5: use --precision {instead}"):
        advice.precision_on(_on_gpu((7, 5), monkeypatch), precision, Apple2019(), 50_000)


def test_tf32_is_for_gpus():
    with pytest.raises(ConfigError, match="use --precision fp32"):
        advice.precision_on(CPU, "tf32", Apple2019(), 50_000)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True)])
def test_float32_is_ieee_unless_tf32_is_named(precision, allowed, monkeypatch):
    """What it does to a convolution only a GPU can show (test_gpu.py)."""
    flags = [(torch.backends.cudnn, "allow_tf32"), (torch.backends.cuda.matmul, "allow_tf32")]
    before = [getattr(*flag) for flag in flags]
    try:
        for use in (
            lambda: make_model(Apple2019(width=8), CPU, precision),
            lambda: matrix_rate(precision, CPU.device),
        ):
            for owner, name in flags:
                setattr(owner, name, not allowed)
            use()
            assert [getattr(*flag) for flag in flags] == [allowed, allowed]
    finally:
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


def test_nesterov_updates_each_type_of_weight_in_one_go():
    """A list of several types is updated tensor by tensor."""
    weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float16, torch.float32) * 3]
    for number, weight in enumerate(weights, 1):
        weight.grad = torch.full_like(weight, number)
    optimizer = NesterovSGD([{"params": weights, "lr": 0.125}], momentum=0.5)

    class Lists(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.types = []

        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            if "foreach" in str(function):
                self.types.append({tensor.dtype for part in arguments if isinstance(part, list) for tensor in part})
            return function(*arguments, **(kwargs or {}))

    with Lists() as lists:
        optimizer.step()
    assert all(len(types) == 1 for types in lists.types)
    assert len(lists.types) == 12, "six operations for each type"
    for number, weight in enumerate(weights, 1):
        assert weight.tolist() == [1 - 0.125 * number * 1.5] * 2


def _distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    info.joinpath("METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]))


def _bash(script: str, **variables: object) -> str:
    command = ["bash", "-c", f'. "{REPO}/choose_python.sh"; {script}']
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("version", "needs", "fits"),
    [
        ("2.9.1", "torch (==2.9.1)", False),
        ("2.10.0+cu128", "torch (==2.10.0)", True),
        ("2.11.0", "torch==2.11.0", True),
        ("2.12.1", "torch (==2.10.0)", False),
        ("2.14.2", "torch (>=2.14.0)", True),
        ("2.13.0", "torch (>=2.14.0)", False),
    ],
)
def test_an_interpreter_is_taken_with_torch_from_2_10_on_and_the_torchvision_that_fits_it(
    version, needs, fits, tmp_path
):
    _distribution(tmp_path, "torch", version)
    _distribution(tmp_path, "torchvision", "0.25.0", "numpy", needs)
    script = 'needed="torch torchvision numpy"; has_what_is_needed "$PYTHON" && echo yes'
    assert _bash(script, PYTHONPATH=tmp_path) == "yes\n" * fits


@pytest.mark.skipif(GPUS > 0, reason="torch can use the GPUs here")
@pytest.mark.slow
def test_a_python3_whose_torch_cannot_use_the_gpus_is_passed_over(nvidia_smi, tmp_path):
    """A complete .venv stands beside the scripts; PYTHON, where it is set, is taken all the same."""
    python3 = nvidia_smi / "python3"
    python3.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python3.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for place in (tmp_path / "requirements.txt", tmp_path / ".venv" / "complete"):
        place.write_text("")
    (tmp_path / "large_batch_cifar_10_fast").symlink_to(REPO / "large_batch_cifar_10_fast")
    script = f'top={tmp_path}; needed="torch torchvision"; choose_python; echo "$python"'
    assert _bash(script, PYTHON="") == f"{tmp_path}/.venv/bin/python\n"
    assert _bash(script, PYTHON="", CUDA_VISIBLE_DEVICES="") == "python3\n"
    assert _bash(script, PYTHON=python3) == f"{python3}\n"
