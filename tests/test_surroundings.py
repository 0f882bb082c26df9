"""What surrounds a launch: shells, variables, quotas, repositories, closed outputs. Users of such programs met each."""

import os
import socket
import subprocess
import sys

import pytest
from conftest import LAUNCHER, REPO, TINY, environment, launch

from large_batch_cifar_10_fast import devices, distributed
from large_batch_cifar_10_fast import environment as software
from large_batch_cifar_10_fast.campaign import read_rows
from large_batch_cifar_10_fast.options import ConfigError, RunConfig


@pytest.mark.slow
def test_sh_and_variables_of_an_outer_launcher_or_of_openmp_change_nothing(tmp_path):
    left = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "outer", "PYTHONOPTIMIZE": 2}
    left |= {"OMP_PROC_BIND": "true", "PYTHONPATH": REPO / "tests"}
    command = ["sh", LAUNCHER, "--demo", "--nproc", "3"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(**left), capture_output=True, text=True)
    line = "train_cifar_parallel.sh: 8 workers cannot be split over 3 processes: use 1, 2, 4 or 8\n"
    assert (result.returncode, result.stdout, result.stderr, [*tmp_path.iterdir()]) == (2, "", line, [])


@pytest.mark.slow
def test_a_limit_of_file_sizes_at_which_torch_would_hang_is_one_line(tmp_path):
    command = ["bash", "-c", f"ulimit -f 8; exec bash {LAUNCHER} --demo"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    line = "train_cifar_parallel.sh: ulimit -f allows files of 8192 bytes, and torch's rendezvous needs more: raise it"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"{line} to 1 MiB\n")


@pytest.mark.slow
def test_pythonpath_with_another_pythons_numpy_is_one_line(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError")
    result = launch("--version", cwd=tmp_path, PYTHONPATH=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"PYTHONPATH={tmp_path}" in result.stderr


@pytest.mark.slow
def test_a_campaign_whose_log_cannot_be_written_goes_on(tiny_npz, tmp_path):
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.train", "--demo", *TINY, "--data", str(tiny_npz)]
    command += ["--runs", "2", "--out", str(tmp_path)]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, cwd=REPO, env=environment(), stdout=full, stderr=subprocess.PIPE)
    assert (result.returncode, len(read_rows(tmp_path / "runs.tsv"))) == (0, 2)
    assert result.stderr.decode().count("STDOUT cannot be written (No space left on device)") == 1


@pytest.mark.parametrize(
    ("cpu_max", "v1", "cores"),
    [("max 100000", "", 4), ("250000 100000", "", 2), ("", "50000\n100000", 1), ("", "-1\n100000", 4), ("", "", 4)],
)
def test_cores_are_counted_by_affinity_and_by_the_quota_of_the_container(cpu_max, v1, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4), raising=False)
    monkeypatch.setattr(devices, "output_of", lambda *command: cpu_max if command[-1].endswith("cpu.max") else v1)
    assert devices.count_cores() == cores


def test_the_commit_is_not_that_of_a_repository_around_this_folder(tmp_path, monkeypatch):
    commit = "git -c user.name=a -c user.email=a commit -q --allow-empty -ma"
    subprocess.run(f"git init -q && {commit}", shell=True, cwd=tmp_path, check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setattr(software, "REPO", tmp_path / "unpacked")
    assert software.commit.__wrapped__() == "unknown"
    monkeypatch.setattr(software, "REPO", tmp_path)
    assert software.commit.__wrapped__() != "unknown"


def test_one_process_says_which_variables_make_it_wait_for_others(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set, but not RANK, MASTER_ADDR, MASTER_PORT: unset it"):
        next(distributed.init_distributed().gen)
    for name, value in {"RANK": "1", "MASTER_ADDR": "far.example", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    distributed.check_variables(2)
    assert "RANK=1, MASTER_ADDR=far.example" in capsys.readouterr().err


def test_a_host_name_that_is_a_loopback_address_is_an_error_on_several_machines(monkeypatch):
    addresses = {socket.gethostname(): "127.0.1.1", "near.example": "127.0.0.1", "far.example": "10.1.1.1"}
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    distributed.check_host_name("near.example")
    with pytest.raises(ConfigError, match=r"set GLOO_SOCKET_IFNAME to the interface that leads to far\.example"):
        distributed.check_host_name("far.example")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    distributed.check_host_name("far.example")


def test_a_tilde_that_the_shell_left_alone_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = RunConfig(data="~/d.npz", out="~/out", save="~/w.pt")
    assert (config.data, config.out, config.save) == ("/home/me/d.npz", "/home/me/out", "/home/me/w.pt")
