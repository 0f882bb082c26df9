"""How many processes there are, on which devices, and where they meet."""

import pytest
import torch

from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.request.planning import plan_processes, torchrun_arguments
from large_batch_cifar_10_fast.settings.settings import Refusal
from large_batch_cifar_10_fast.training import meeting, process


def test_no_more_processes_than_gpus():
    with pytest.raises(Refusal, match="NPROC=4 is more than fit this machine's 2 GPUs"):
        plan_processes(Apple2019(), {"NPROC": "4"}, gpus=2, cores=64)


@pytest.mark.parametrize(
    ("gpus", "cores", "workers", "machines", "processes"),
    [
        (8, 64, 8, 1, 8),
        (3, 64, 8, 1, 2),
        (1, 64, 8, 1, 1),
        (0, 6, 8, 1, 4),
        (0, 2, 8, 1, 2),
        (0, 2, 5, 1, 1),
        (0, 9, 12, 1, 6),
        (8, 64, 8, 2, 4),
        (4, 64, 16, 2, 4),
    ],
)
def test_as_many_processes_as_divide_the_workers_and_fit(gpus, cores, workers, machines, processes):
    assert plan_processes(Apple2019(workers=workers), {"NNODES": str(machines)}, gpus, cores) == processes


def test_teams_take_as_many_processes_as_fit_their_workers():
    plan = {teams: plan_processes(Apple2019(), {"TEAMS": str(teams)}, 0, 6) for teams in (1, 2, 3, 6)}
    assert plan == {1: 4, 2: 4, 3: 6, 6: 6}
    assert plan_processes(MuonRecipe(), {"TEAMS": "5"}, 8, 64) == 5
    for teams, sharing in (("5", "1"), ("9", "2")):
        with pytest.raises(Refusal, match=f"NPROC={teams} is more than fit this machine's 4 GPUs: use at most"):
            plan_processes(MuonRecipe(), {"TEAMS": teams, "TEAMS_PER_GPU": sharing}, 4, 64)
    for wrong, gpus in (({"NPROC": "4"}, 2), ({}, 0), ({"TEAMS": "1", "NPROC": "2"}, 1)):
        with pytest.raises(Refusal, match="TEAMS_PER_GPU=2 is for teams of one process each"):
            plan_processes(Apple2019(), {"TEAMS": "2", "TEAMS_PER_GPU": "2", **wrong}, gpus, 64)
    assert plan_processes(MuonRecipe(), {"TEAMS": "4", "TEAMS_PER_GPU": "2"}, 2, 64) == 4
    assert plan_processes(Apple2019(), {"TEAMS": "2", "TEAMS_PER_GPU": "2"}, 2, 64) == 2, "one process a team"
    arguments = torchrun_arguments({"TEAMS": "2"}, 4, "scratch")
    assert "--redirects=1:2,2:2,3:2" in arguments, "the first speaks for all"


def test_teams_on_several_machines_are_of_as_many_processes_each():
    def plan(recipe, teams, machines, gpus, **more):
        return plan_processes(recipe, {"TEAMS": str(teams), "NNODES": str(machines), **more}, gpus, 64)

    assert [plan(Apple2019(), teams, 2, 8) for teams in (1, 2, 4, 16)] == [4, 8, 8, 8]
    assert plan(Apple2019(), 1, 2, 3) == 2, "a team of both machines"
    assert plan(MuonRecipe(), 4, 2, 1, TEAMS_PER_GPU="2") == 2
    with pytest.raises(Refusal, match="TEAMS=3 cannot be made of NPROC=1 processes on 2 machines"):
        plan(MuonRecipe(), 3, 2, 8, NPROC="1")


@pytest.mark.parametrize(("teams_per_gpu", "backend"), [("1", "nccl"), ("2", "gloo")])
def test_teams_that_share_gpus_take_turns_and_join_where_nccl_would_refuse(teams_per_gpu, backend, monkeypatch):
    """No GPU is needed: what would touch one is replaced."""
    joined = {}
    monkeypatch.setattr(process, "count_gpus", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(meeting, "meet", lambda *_: torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda kind, **how: joined.update(kind=kind, **how))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and put back
    variables = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "TEAMS_PER_GPU": teams_per_gpu}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with meeting.join_world(1, teams=4) as joining:
        assert (joining.device, joining.team, joining.world_size) == (torch.device("cuda:1"), 3, 1)
    assert joined["kind"] == backend
    assert joined["device_id"] == (joining.device if backend == "nccl" else None)


def test_several_machines_meet_where_asked_and_one_machine_in_a_file():
    arguments = torchrun_arguments({"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "ten.example:2911"}, 4, "scratch")
    assert "--rdzv-endpoint=ten.example:2911" in arguments
    assert "--node-rank=1" in arguments
    alone = torchrun_arguments({}, 4, "scratch")
    assert {"--rdzv-conf=store_type=file", "--rdzv-endpoint=scratch/rendezvous"} <= set(alone)
