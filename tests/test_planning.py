"""How many processes there are, on which devices, and where they meet."""

import pytest
import torch

from large_batch_cifar_10_fast import devices, distributed
from large_batch_cifar_10_fast.launch import gpus_of_team, plan_processes, torchrun_arguments, visible_gpus
from large_batch_cifar_10_fast.options import ConfigError, Launch
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe


def _on(machines: int) -> Launch:
    return Launch(nnodes=machines, rdzv_endpoint="ten.example:2911")


def test_no_more_processes_than_gpus():
    with pytest.raises(ConfigError, match="--nproc 4 is more than the 2 GPUs here: use at most 2"):
        plan_processes(Apple2019(), Launch(nproc=4), gpus=2, cores=64)
    with pytest.raises(ConfigError, match="--nproc 2 of 2 teams is more than the 2 GPUs here: use at most 1"):
        plan_processes(Apple2019(), Launch(nproc=2, teams=2), gpus=2, cores=64)


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
    assert plan_processes(Apple2019(workers=workers), _on(machines), gpus, cores) == processes


def test_teams_share_the_gpus_or_cores_and_a_gpu_where_there_are_too_few():
    assert [plan_processes(Apple2019(), Launch(teams=teams), 0, 6) for teams in (1, 2, 3, 6)] == [4, 2, 2, 1]
    assert [plan_processes(Apple2019(), Launch(teams=teams), 8, 64) for teams in (1, 2, 8, 9)] == [8, 4, 1, 1]
    assert plan_processes(MuonRecipe(), Launch(teams=5), 8, 64) == 1


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("3,GPU-7a", ["3", "GPU-7a"]), ("5,6,9", ["5", "6"])]
)
def test_teams_get_the_gpus_by_the_names_they_have(visible, names, monkeypatch):
    """Of three names torch can use two: the third GPU is not there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(2) == names


def test_each_team_has_gpus_of_its_own_and_teams_share_where_there_are_too_few():
    assert [gpus_of_team(team, 2, ["0", "1", "4", "5"]) for team in (0, 1)] == ["0,1", "4,5"]
    assert [gpus_of_team(team, 1, ["0", "1"]) for team in range(4)] == ["0", "1", "0", "1"]


def test_gpus_communicate_by_nccl_each_process_on_its_own(monkeypatch):
    """No GPU is needed: what would touch one is replaced."""
    joined = {}
    monkeypatch.setattr(devices, "count_gpus", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "rendezvous_store", lambda *_: torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda kind, **how: joined.update(kind=kind, **how))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and put back
    variables = {"RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with distributed.init_distributed(8, timeout=7) as joining:
        assert (joining.device, joining.rank, joining.world_size) == (torch.device("cuda:3"), 7, 8)
    assert (joined["kind"], joined["device_id"], joined["timeout"].total_seconds()) == ("nccl", joining.device, 7)


def test_several_machines_meet_where_asked_and_one_machine_in_a_file():
    launch = Launch(nnodes=2, node_rank=1, rdzv_endpoint="ten.example:2911")
    arguments = torchrun_arguments(launch, 4, "scratch")
    assert "--rdzv-endpoint=ten.example:2911" in arguments
    assert "--node-rank=1" in arguments
    alone = torchrun_arguments(Launch(), 4, "scratch")
    assert {"--rdzv-conf=store_type=file", "--rdzv-endpoint=scratch/rendezvous"} <= set(alone)
    assert "--redirects=1:2,2:2,3:2" in alone, "the first process speaks for all"
