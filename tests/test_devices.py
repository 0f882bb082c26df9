"""Which GPUs are used, in which precision, by which interpreter; and the error where one cannot be used."""

import os
import re
import shutil
import sys

import pytest
import torch
from conftest import GPUS, LAUNCHER, REPO, launch, run_program, write_program

from large_batch_cifar_10_fast import PACKAGE, ConfigError, apple2019, muon
from large_batch_cifar_10_fast.core import devices
from large_batch_cifar_10_fast.core.precision import choose_precision


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a nvidia-smi first in PATH that lists a V100; unset CUDA_VISIBLE_DEVICES."""
    write_program(tmp_path / "nvidia-smi", 'echo "GPU 0: Tesla V100"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.skipif(GPUS > 0, reason="torch can use the GPUs here")
def test_gpus_that_torch_cannot_use_are_an_error_unless_hidden_or_the_cpu_is_chosen(nvidia_smi, monkeypatch):
    message = "cannot use the GPUs here"
    with pytest.raises(ConfigError, match=message):
        devices.count_gpus()
    assert devices.count_gpus("cpu") == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.count_gpus() == 0
    with pytest.raises(ConfigError, match=message):
        devices.count_gpus("cuda")


def test_a_program_computes_in_its_half_precision_if_the_gpu_has_it(monkeypatch):
    gpu = torch.device("cuda:0")
    for capability, asked, preferred, precision in (
        ((8, 0), "", muon.Hyp.gpu_precision, "bf16"),
        ((8, 0), "", apple2019.Hyp.gpu_precision, "fp16"),
        ((8, 0), "tf32", "bf16", "tf32"),
        ((7, 5), "", "bf16", "fp16"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu, found=capability: found)
        assert choose_precision(asked, preferred, gpu) == precision
    with pytest.raises(ConfigError, match="--precision tf32 needs"):
        choose_precision("tf32", "bf16", gpu)


def test_each_process_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert devices.take_device().index == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes need 2 GPUs, this machine has 1"):
        devices.take_device()


def test_cores_are_counted_by_the_quota_of_a_container(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    for quota, cores in {"50000 100000": 1, "max 100000": 8, "300000 100000": 3, "": 8}.items():
        monkeypatch.setattr(devices, "text_of_file", {"/sys/fs/cgroup/cpu.max": quota}.get)
        assert devices.count_cores() == cores


# ---- Interpreters


def choose(folder, functions="", **variables) -> str:
    """Return the interpreter that choose_python.sh chooses, after some functions are replaced, and the PYTHONPATH."""
    script = f'. "{REPO}/choose_python.sh"; top={REPO}; {functions} choose_python; echo "$python ${{PYTHONPATH-unset}}"'
    return run_program("bash", "-c", script, cwd=folder, **variables).stdout.strip()


@pytest.mark.parametrize(
    ("torch", "needed", "fits"),
    [
        ("2.10.0a0+git.nv25.12", "torch==2.10.0", True),
        ("2.9.1", "torch==2.9.1", False),
        ("2.12.1", "torch (==2.10.0)", False),
    ],
)
def test_a_pythonpath_is_used_if_pyproject_allows_its_packages_and_torchvision_its_torch(torch, needed, fits, tmp_path):
    for name, number in (("torch", torch), ("torchvision", "0.25.0")):
        (info := tmp_path / f"{name}-{number}.dist-info").mkdir()
        info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {number}\nRequires-Dist: {needed}\n")
    kept = tmp_path if fits else "unset"
    assert choose(tmp_path, PYTHONPATH=tmp_path) == f"{sys.executable} {kept}"


def test_a_python3_whose_torch_cannot_use_the_gpus_gives_way_to_a_venv_unless_python_names_it(nvidia_smi, tmp_path):
    cannot = f'case "$*" in *count_gpus*) exit 1 ;; esac; exec {sys.executable} "$@"'
    python3 = write_program(tmp_path / "python3", cannot)
    make = 'is_made_of() { false; }; make_venv() { echo "$2"; exit; };'
    assert choose(tmp_path, make, PYTHON="").startswith("python3 lacks a torch that can use the GPUs")
    assert choose(tmp_path, make, PYTHON=python3).startswith(f"{python3} ")


def test_without_packages_help_installs_nothing_and_an_installation_that_fails_is_not_complete(tmp_path):
    for name in (LAUNCHER.name, "cifar10-fast", "choose_python.sh", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / PACKAGE.name).symlink_to(PACKAGE)
    (tmp_path / "requirements.txt").write_text("absent-thing==1")
    interpreter = write_program(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    where = {"cwd": tmp_path, "script": tmp_path / LAUNCHER.name, "PYTHON": interpreter, "PIP_NO_INDEX": 1}
    for option, answer in (("--help", "Example: "), ("--version", PACKAGE.name)):
        result = launch("--runs", 2, option, **where)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(answer)
    result = run_program(interpreter, "-m", PACKAGE.name, "compare", "published", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("compare: No module named .*: bash train_.*\n", result.stderr)
    assert not (tmp_path / ".venv").exists()
    result = launch("--runs", 2, **where)
    assert (result.returncode, result.stdout) == (2, "")
    assert "failed; start again to continue" in result.stderr
    assert not (tmp_path / ".venv" / "complete").exists()
