"""Which GPUs are used, in which precision, by which interpreter; and the error where one cannot be used."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import GPUS, LAUNCHER, REPO, environment, launch, python, run_program, write_program

from large_batch_cifar_10_fast import ConfigError, version
from large_batch_cifar_10_fast.core import devices, fast
from large_batch_cifar_10_fast.lab import program


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a nvidia-smi first in PATH that lists a V100; unset CUDA_VISIBLE_DEVICES."""
    (folder := tmp_path / "smi").mkdir()
    write_program(folder / "nvidia-smi", 'echo "GPU 0: Tesla V100"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return folder


@pytest.mark.skipif(GPUS > 0, reason="torch can use the GPUs here")
def test_gpus_that_torch_cannot_use_are_an_error_unless_hidden_or_the_cpu_is_chosen(nvidia_smi, monkeypatch):
    message = f"torch {re.escape(torch.__version__)} .* cannot use the GPUs here .*: --device cpu trains on the CPU$"
    with pytest.raises(ConfigError, match=message):
        devices.count_gpus()
    assert devices.count_gpus("cpu") == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.count_gpus() == 0
    with pytest.raises(ConfigError, match="cannot use the GPUs here"):
        devices.count_gpus("cuda")


def test_kernels_run_on_their_own_major_version_and_ptx_on_all_later_ones():
    built = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    assert all(devices.has_kernels(gpu, built) for gpu in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1)])
    assert not any(devices.has_kernels(gpu, built) for gpu in [(6, 0), (7, 0), (11, 0), (13, 0)])
    assert devices.has_kernels((13, 0), [*built, "compute_120"])
    assert not devices.has_kernels((11, 0), [*built, "compute_120"])


@pytest.mark.parametrize(
    ("recipe", "capability", "asked", "precision"),
    [
        ("muon", (9, 0), "", "bf16"),
        ("muon2024", (7, 5), "", "fp16"),
        ("apple2019", (9, 0), "", "fp16"),
        ("page", (8, 0), "tf32", "tf32"),
        ("fastai", (7, 5), "fp32", "fp32"),
    ],
)
def test_a_program_computes_in_its_half_precision_if_the_gpu_has_it(recipe, capability, asked, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    preferred = program.sets_of(program.load_program(recipe))[recipe].gpu_precision
    assert fast.precision_on_gpu(asked, preferred, torch.device("cuda:0")) == precision
    if capability < (8, 0):
        with pytest.raises(ConfigError, match=r"--precision tf32 needs .* 8.0 or later: use fp32"):
            fast.precision_on_gpu("tf32", preferred, torch.device("cuda:0"))


def test_processes_of_a_team_share_a_gpu_only_where_nccl_can(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert devices.take_device().index == 0, "two teams of one process"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    with pytest.raises(ConfigError, match="2 processes need 2 GPUs, this machine has 1: start 1"):
        devices.take_device()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert devices.take_device().type == "cuda"


def test_predictions_are_in_ieee_float32_on_a_gpu_whatever_a_notebook_allows(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with devices.ieee_float32():
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "300000 100000"}, 3),
        ({}, 8),
    ],
)
def test_cores_are_counted_by_the_quota_of_a_container(files, cores, monkeypatch):
    monkeypatch.setattr(devices, "text_of_file", lambda name: files.get(name.removeprefix("/sys/fs/cgroup/"), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    assert devices.count_cores() == cores


@pytest.mark.slow
def test_importing_the_package_changes_no_environment_and_training_replaces_an_unusable_folder(tmp_path, tiny_npz):
    code = "import os; before = {**os.environ}\nfrom large_batch_cifar_10_fast import api, muon\n"
    code += "print({name for name in before if os.environ.get(name) != before[name]})"
    code += f"\nrows = api.train('muon', width=4, batch_size=100, epochs=1, no_compile=True, data={str(tiny_npz)!r})\n"
    code += "print(len(rows), 'run')"
    result = python("-c", code, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR="/dev/null/folder")
    assert result.stdout.startswith("set()\n")
    assert result.stdout.endswith("1 run\n"), result.stderr
    assert "Warning: TORCHINDUCTOR_CACHE_DIR cannot be created" in result.stderr


# ---- Interpreters


def bash(script, **variables):
    command = ["bash", "-c", f'. "{REPO}/choose_python.sh"; {script}']
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("torch", "needed", "scipy", "lacking"),
    [
        ("2.10.0a0+git.nv25.12", "torch==2.10.0", "1.15", "nothing"),
        ("2.9.1", "torch==2.9.1", "1.15.0", "torch>=2.10"),
        ("2.12.1", "torch (==2.10.0)", "1.15.0", "torch (==2.10.0)"),
        ("2.10.0", "torch==2.10.0", "2", "absent-thing"),
    ],
)
def test_an_interpreter_needs_pyprojects_versions_and_torchvisions_torch(torch, needed, scipy, lacking, tmp_path):
    for name, number in (("torch", torch), ("torchvision", "0.25.0"), ("scipy", scipy)):
        (info := tmp_path / f"{name}-{number}.dist-info").mkdir()
        info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {number}\nRequires-Dist: {needed}\n")
    script = f'top={REPO}; what_is_lacking "$PYTHON"' + " absent-thing" * (lacking == "absent-thing")
    assert bash(script, PYTHONPATH=tmp_path) == f"{lacking}\n"


def test_a_pythonpath_that_breaks_the_interpreter_is_not_used(tmp_path):
    (tmp_path / "re.py").write_text("raise ImportError")
    script = f'top={REPO}; choose_python; echo "$python ${{PYTHONPATH-unset}}"'
    assert bash(script, PYTHONPATH=tmp_path) == f"{sys.executable} unset\n"
    assert bash(script, PYTHONPATH=tmp_path.parent) == f"{sys.executable} {tmp_path.parent}\n"


def test_a_python3_whose_torch_cannot_use_the_gpus_gives_way_to_the_venv_unless_python_names_it(nvidia_smi, tmp_path):
    cannot = f'case "$*" in *count_gpus*) exit 1 ;; esac; exec {sys.executable} "$@"'
    python3 = write_program(nvidia_smi / "python3", cannot)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".venv" / "complete").touch()
    (tmp_path / "pyproject.toml").symlink_to(REPO / "pyproject.toml")
    script = f'top={tmp_path}; choose_python; echo "$python"'
    assert bash(script, PYTHON="") == f"{tmp_path}/.venv/bin/python\n"
    assert bash(script, PYTHON=python3) == f"{python3}\n"


@pytest.fixture
def bare(tmp_path):
    """Return a checkout with an empty requirements.txt. In it, `python` is an interpreter without packages."""
    for name in (LAUNCHER.name, "choose_python.sh", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / "large_batch_cifar_10_fast").symlink_to(REPO / "large_batch_cifar_10_fast")
    (tmp_path / "requirements.txt").touch()
    write_program(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "answer"),
    [("--help", "Example: "), ("--recipe muon --help", "Example: "), ("--runs 2 --version", version())],
)
def test_help_and_version_need_no_packages_and_install_nothing(words, answer, bare):
    result = launch(*words.split(), cwd=bare, script=bare / LAUNCHER.name, PYTHON=bare / "python")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(answer)
    assert not (bare / ".venv").exists()


def test_a_command_without_its_packages_is_one_line_and_the_version_needs_none(bare):
    command = [bare / "python", "-m", "large_batch_cifar_10_fast"]
    result = run_program(*command, "compare", "published", cwd=bare)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("compare: No module named '\\w+': bash train_.*\n", result.stderr)
    assert run_program(*command, "--version", cwd=bare).stdout == f"{version()}\n"


def test_an_installation_says_how_much_it_downloads_and_what_helps_without_a_network(bare):
    (bare / ".venv" / "bin").mkdir(parents=True)
    (bare / ".venv" / "bin" / "python").symlink_to(sys.executable)  # whose pip takes less time than to make a venv
    (bare / "requirements.txt").write_text("absent-thing==1")
    how = {"PYTHON": bare / "python", "PIP_NO_INDEX": 1}
    result = launch("--runs", "2", cwd=bare, script=bare / LAUNCHER.name, **how)
    lines = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert re.match("About 4 GB are downloaded, and take 7.4 GiB .* to an interpreter that has the packages$", lines[1])
    assert re.search(
        "start again to continue. Without a network, set PIP_INDEX_URL to a mirror, or PYTHON to", lines[-1]
    )
