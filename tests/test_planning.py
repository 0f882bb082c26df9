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


@pytest.fixture
def defaults(monkeypatch):
    """Return a function of a machine and options: cores, seconds of a run on one of them, whether bf16 is faster."""

    def resolve(cores: int, seconds: float, bf16: bool, **options: object) -> RunConfig:
        monkeypatch.setattr(checks, "run_flop", lambda recipe, images: seconds * checks.CORE)
        monkeypatch.setattr(checks, "count_cores", lambda: cores)
        monkeypatch.setattr(checks, "gains_by_bf16", lambda: bf16)
        return checks.resolve_defaults(RunConfig(**options), Apple2019(), ALONE, 50_000)

    return resolve


@pytest.mark.parametrize(
    ("seconds", "options", "compiles"),
    [
        *((700, {}, True), (500, {}, False), (250, {"runs": 3, "share": "2/3"}, True)),
        *((1, {"compile": True}, True), (700, {"no_compile": True}, False)),
    ],
)
def test_a_campaign_of_ten_minutes_or_more_compiles_all_shares_alike(defaults, seconds, options, compiles):
    config = defaults(1, seconds, False, **options)
    assert (config.compile, config.no_compile) == (compiles, not compiles)


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize(
    ("seconds", "bf16", "given", "precision", "hours"),
    [
        (700, True, "", "bf16", 3.5),
        (700, True, "fp32", "fp32", 7),
        (700, False, "", "fp32", 7),
        (500, True, "", "fp32", 5),
    ],
)
def test_bf16_is_for_long_runs_on_any_number_of_cores(defaults, capsys, cores, seconds, bf16, given, precision, hours):
    """The seed decides a run, so neither cores nor runs may change the precision."""
    assert defaults(cores, seconds, bf16, runs=36, precision=given).precision == precision
    assert f"this takes about {hours / cores:.1f} hours" in capsys.readouterr().err
