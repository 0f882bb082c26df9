"""How many processes there are, on which devices, and where they meet."""

import pytest

from large_batch_cifar_10_fast.launch import gpus_of_team, plan_processes, visible_gpus
from large_batch_cifar_10_fast.options import ConfigError, Launch
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


@pytest.mark.parametrize(("visible", "names"), [("", ["0", "1"]), ("3,GPU-7a", ["3", "GPU-7a"]), ("5,6,9", ["5", "6"])])
def test_gpus_have_the_names_of_cuda_visible_devices(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(2) == names, "as many as torch can use"


def test_each_team_has_its_own_gpus_and_teams_share_where_there_are_too_few():
    assert [gpus_of_team(team, 2, ["0", "1", "4", "5"]) for team in (0, 1)] == ["0,1", "4,5"]
    assert [gpus_of_team(team, 1, ["0", "1"]) for team in range(4)] == ["0", "1", "0", "1"]
