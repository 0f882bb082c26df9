"""What is chosen unless it was given: processes, devices, precision, compilation; and what surroundings decide."""

import os
import socket
import subprocess

import pytest
from conftest import ALONE

from large_batch_cifar_10_fast import checks, devices, distributed
from large_batch_cifar_10_fast import environment as software
from large_batch_cifar_10_fast.devices import take_device
from large_batch_cifar_10_fast.launch import plan_processes
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

TWO_MACHINES = {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "ten.example:2911"}


@pytest.mark.parametrize(
    ("gpus", "cores", "workers", "options", "processes"),
    [
        (8, 64, 8, {}, 8),
        (3, 64, 8, {}, 2),
        (0, 6, 8, {}, 4),
        (0, 2, 5, {}, 1),
        (8, 64, 8, {"nproc": 2}, 2),
        (8, 64, 8, TWO_MACHINES, 4),
        (0, 6, 8, {"teams": 2}, 2),
        (8, 64, 8, {"teams": 2}, 4),
        (8, 64, 1, {"teams": 5}, 1),
    ],
)
def test_there_are_as_many_processes_as_divide_the_workers_and_fit(gpus, cores, workers, options, processes):
    assert plan_processes(Apple2019(workers=workers), Launch(**options), gpus, cores) == processes


@pytest.mark.parametrize(("nproc", "teams", "most"), [(4, 1, 2), (2, 2, 1)])
def test_more_processes_than_gpus_are_refused(nproc, teams, most):
    with pytest.raises(ConfigError, match=f"--nproc {nproc}.* is more than the 2 GPUs here: use at most {most}"):
        plan_processes(Apple2019(), Launch(nproc=nproc, teams=teams), gpus=2, cores=64)


@pytest.mark.parametrize(("gpus", "processes", "taken"), [(4, 2, [0, 1, 2, 3]), (2, 1, [0, 1]), (1, 1, [0, 0])])
def test_each_team_has_its_own_gpus_and_teams_share_where_there_are_too_few(gpus, processes, taken, monkeypatch):
    monkeypatch.setattr("large_batch_cifar_10_fast.devices.count_gpus", lambda device: gpus)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    def gpu(team: int, rank: int) -> int:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return take_device(team=team).index

    assert [gpu(team, rank) for team in (0, 1) for rank in range(processes)] == taken


@pytest.mark.parametrize(
    ("cores", "seconds", "bf16_is_faster", "options", "precision", "compiles", "hours"),
    [
        (1, 700, True, {"runs": 36}, "bf16", True, 3.5),
        (8, 700, True, {"runs": 36}, "bf16", True, 0.4),
        (8, 700, True, {"runs": 36, "precision": "fp32"}, "fp32", True, 0.9),
        (8, 700, False, {"runs": 36}, "fp32", True, 0.9),
        (8, 500, True, {"runs": 36}, "fp32", True, 0.6),
        (1, 700, False, {"no_compile": True}, "fp32", False, 0.2),
        (1, 500, False, {}, "fp32", False, None),
        (1, 500, False, {"compile": True}, "fp32", True, None),
        (1, 250, False, {"runs": 3, "share": "2/3"}, "fp32", True, 0.1),
    ],
)
def test_bf16_is_for_long_runs_and_the_compiler_for_long_campaigns_all_shares_alike(
    cores, seconds, bf16_is_faster, options, precision, compiles, hours, monkeypatch, capsys
):
    """The seed decides a run, so neither cores nor runs may change the precision. A run takes `seconds` on one core."""
    monkeypatch.setattr(checks, "run_flop", lambda recipe, images: seconds * checks.CORE)
    monkeypatch.setattr(checks, "count_cores", lambda: cores)
    monkeypatch.setattr(checks, "gains_by_bf16", lambda: bf16_is_faster)
    config = checks.resolve_defaults(RunConfig(**options), Apple2019(), ALONE, 50_000)
    assert (config.precision, config.compile, config.no_compile) == (precision, compiles, not compiles)
    told = capsys.readouterr().err
    assert f"this takes about {hours} hours" in told if hours else not told


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
