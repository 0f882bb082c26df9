"""Everything that cannot be trained is refused with status 2, in one line, with nothing written."""

from dataclasses import fields

import pytest
import torch
from conftest import free_port, launch, python, write_npz

from large_batch_cifar_10_fast.checks import check_out
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO as PRESET
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

CASES = {  # the words of a command line and the error; no word is written to --out before it
    "--demo --nproc 3": "8 workers cannot be split over 3 processes: use 1, 2, 4 or 8",
    "--demo --nproc two": "argument --nproc: invalid int value",
    "--demo --batch_size 2048": "16384 images a step, more than the",
    "--recipe muon --data synthetic --batch_size 100 --kept 1,0.01": "epoch 5 keeps 0.01 of 8192 images, less than",
    "--batch_size 40": "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    "--demo --ghost_batch 12": "--ghost_batch 12 does not divide --batch_size 32",
    "--ghost_batch=-1": "--ghost_batch -1 must be a number of 0 to 100000",
    "--demo --lr_scaler=--": "-- is no value of an option",
    "--recipe=--": "-- is no value of an option",
    "--recipe muon --nproc 2": "1 workers cannot be split over 2 processes: use 1",
    "--demo --runs -2": "--runs -2 must be greater than 0",
    "--demo --lr_scaler 0": "--lr_scaler 0.0 must be greater than 0",
    "--demo --epochs 1 --ema_ep 2": "--ema_ep 2.0 leaves no time",
    "--demo --momentum 1": "recipe apple2019 has no option --momentum; --help",
    "--recipe apple2018": "--recipe: invalid choice: 'apple2018'",
    "--demo --micro_batches 3 --nproc 2": "--micro_batches 3 does not divide the 4 workers",
    "--demo --data absent.npz": "absent.npz cannot be read as a .npz file",
    "--demo --data http://host/x": "--data http://host/x is an address, not",
    "--demo --save /tmp": "would replace a table or another file",
    "--demo --save ./runs.tsv": "would replace a table or another file",
    f"--demo --out {'x' * 300}": "--out or --save cannot be written: ",
    "--demo --data a\nb": "--data 'a\\nb' cannot stand in a table",
    "--demo --nnodes 2 --node_rank 2": "--node_rank 2 must lie in 0 to 1",
    "--demo --teams 99999": "--teams 99999 is more than the runs to make (1)",
    "--demo --nnodes 2 --restarts 1": "--teams and --restarts are for one machine",
    "--demo --nnodes 2": "--rdzv_endpoint  must be host:port",
    "--recipe basenet --epochs 41": "--epochs 41 must lie in 1 to 40: the schedule has no more",
    "--recipe fastai --entry one_gpu --epochs 31": "--epochs 31 must lie in 1 to 30",
    "--recipe page --width 8": "--width 8 must lie in 16 to 100000: a strided convolution",
    "--recipe muon --kept 1,half": "--kept 1,half is no list of numbers, like 1,1,0.7",
    "--recipe muon --kept 1,0": "--kept 1,0: shares must lie above 0, and at most be 1",
    "--recipe muon --pixels 24x2": "--pixels 24x2 is no list of whole numbers, like 24,24,28,32",
    "--recipe muon --pixels 24,40": "--pixels 24,40: sizes must lie in 9 to 32",
    "--recipe muon --whitening_epochs 10": "--whitening_epochs 10 must lie in 0 to 9: a run has 9 epochs",
    "--recipe muon --workers 3": "--workers 3 does not divide 2000 images: choose --batch_size",
    "--recipe muon --batch_size 1": "is too small for its norms: use a larger --batch_size",
}


@pytest.mark.parametrize("words", CASES)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_launch(words.split(" "))
    assert CASES[words] in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["x" * 300, "table"])
def test_a_campaign_that_cannot_be_read_is_not_gone_on_with(out, tmp_path, monkeypatch):
    (tmp_path / "table" / "runs.tsv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs.tsv cannot be read \(.*\): give another --out"):
        check_launch(["--resume", "--out", out])


@pytest.mark.slow
def test_a_machine_that_never_comes_is_waited_for_no_longer_than_asked(tmp_path):
    alone = {"nnodes": 2, "node_rank": 0, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "timeout": 1}
    result = launch("--demo", cwd=tmp_path, **alone)
    line = "train_cifar_parallel.sh: the 2 machines, each with a --node_rank of its own, found no rendezvous; "
    line += "no run was finished (details: last_failure.txt)\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.slow
def test_train_alone_refuses_likewise(tmp_path):
    result = python("-m", "large_batch_cifar_10_fast.train", "--demo", "--epochs", "-1", cwd=tmp_path)
    line = "train: --epochs -1 must be greater than 0, and at most 100000\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.slow
def test_a_fault_that_only_shows_in_reading_is_told_once_by_all_processes(tmp_path):
    path = write_npz(tmp_path / "bits.npz", *draw_shapes(300, 20))
    content = bytearray(path.read_bytes())
    content[100_000] ^= 1
    path.write_bytes(content)
    result = launch("--demo", "--data", path, "--batch_size", "16", cwd=tmp_path, nproc=2)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "cannot be read as a .npz file" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bits.npz"]


def test_demo_is_a_preset_that_can_be_overridden():
    config, recipe = read_request(["--epochs", "3", "--demo", "--workers", "4"])
    assert (config.data, config.demo) == ("synthetic", True)
    assert recipe == Apple2019(**PRESET | {"epochs": 3, "workers": 4})
    assert read_request([]) == (RunConfig(), Apple2019())


def test_the_published_command_line_still_works():
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    config, recipe = read_request([*line.split(), "--runs", "50"])
    assert (config, recipe, recipe.workers, recipe.eval_stats) == (RunConfig(runs=50), Apple2019(), 8, "first")


def test_help_answers_without_training(capsys):
    with pytest.raises(SystemExit) as end:
        check_launch(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for entry in (*fields(RunConfig), *fields(Launch), *fields(Apple2019)):
        assert f"--{entry.name}" in shown
    assert "the recipe apple2019:" in shown


def test_weights_may_take_the_place_of_weights_but_not_of_images(tmp_path, tiny_npz):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    check_out(tmp_path, str(tmp_path / "w.pt"))
    with pytest.raises(ConfigError, match="would replace a table or another file"):
        check_out(tmp_path, str(tiny_npz))
