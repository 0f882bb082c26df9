"""What is chosen unless it was given: processes, their devices, precision, and whether to compile."""

import pytest
from conftest import ALONE

from large_batch_cifar_10_fast import checks
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
