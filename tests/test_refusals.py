"""Everything that cannot be trained is refused with status 2, in one line, with nothing written. And the attack."""

from dataclasses import fields

import pytest
import torch
from attack import BAD_NUMBERS
from conftest import REPO, free_port, launch, python, write_npz

from large_batch_cifar_10_fast.checks import check_out
from large_batch_cifar_10_fast.command_line import RECIPES, read_request
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig
from large_batch_cifar_10_fast.recipes.apple2019 import DEMO as PRESET
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

CASES = {  # the words of a command line and the error; no word is written to --out before it
    "--demo --batch_size 2048": "16384 images a step, more than the",
    "--recipe muon --data synthetic --batch_size 100 --kept 1,0.01": "epoch 5 keeps 0.01 of 8192 images, less than",
    "--batch_size 40": "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    "--demo --ghost_batch 12": "--ghost_batch 12 does not divide --batch_size 32",
    "--demo --lr_scaler=--": "-- is no value of an option",
    "--demo --lr_scaler 0": "--lr_scaler 0.0 must be greater than 0",
    "--demo --epochs 1 --ema_ep 2": "--ema_ep 2.0 leaves no time",
    "--demo --momentum 1": "recipe apple2019 has no option --momentum; --help",
    "--recipe apple2018": "--recipe: invalid choice: 'apple2018'",
    "--demo --micro_batches 3 --nproc 2": "--micro_batches 3 does not divide the 4 workers",
    "--demo --data http://host/x": "--data http://host/x is an address, not",
    "--demo --save /tmp": "would replace a table or another file",
    "--demo --save ./runs.tsv": "would replace a table or another file",
    f"--demo --out {'x' * 300}": "--out or --save cannot be written: ",
    f"--resume --out {'x' * 300}": "runs.tsv cannot be read (File name too long): give another --out",
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
def test_a_fault_that_only_shows_in_reading_and_only_in_one_process_is_one_line(tmp_path):
    (other := tmp_path / "other").mkdir()
    content = bytearray(write_npz(tmp_path / "bits.npz", *draw_shapes(300, 20)).read_bytes())
    content[100_000] ^= 1
    (other / "bits.npz").write_bytes(content)
    stray = "import os\nif os.environ.get('RANK') == '1':\n    os.chdir('other')"
    (other / "sitecustomize.py").write_text(stray)
    command = ["--demo", "--data", "bits.npz", "--batch_size", "16"]
    result = launch(*command, cwd=tmp_path, nproc=2, PYTHONPATH=other)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "cannot be read as a .npz file" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bits.npz", "other"]


@pytest.mark.slow
def test_a_campaign_survives_kills_and_invalid_options_end_in_one_line():
    result = python("tests/attack.py", "--kills", 2, "--options", 2, "--seed", 1, cwd=REPO)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 kills in ")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_no_option_takes_an_invalid_number(recipe, value):
    options = [entry for owner in (RECIPES[recipe], RunConfig, Launch) for entry in fields(owner)]
    for name in (entry.name for entry in options if entry.type in (int, float)):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            check_launch(["--recipe", recipe, "--data", "synthetic", f"--{name}={value}"])


def test_demo_is_a_preset_that_can_be_overridden_and_the_published_command_line_still_works():
    config, recipe = read_request(["--epochs", "3", "--demo", "--workers", "4"])
    assert (config.data, config.demo, recipe) == ("synthetic", True, Apple2019(**PRESET | {"epochs": 3, "workers": 4}))
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    config, recipe = read_request([*line.split(), "--runs", "50"])
    assert (config, recipe, recipe.workers, recipe.eval_stats) == (RunConfig(runs=50), Apple2019(), 8, "first")


def test_help_answers_without_training(capsys):
    with pytest.raises(SystemExit, match="0"):
        check_launch(["--help"])
    shown = capsys.readouterr().out
    assert "the recipe apple2019:" in shown
    assert all(f"--{entry.name}" in shown for entry in (*fields(RunConfig), *fields(Launch), *fields(Apple2019)))


def test_weights_may_take_the_place_of_weights_but_not_of_images(tmp_path, tiny_npz):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    check_out(tmp_path, str(tmp_path / "w.pt"))
    with pytest.raises(ConfigError, match="would replace a table or another file"):
        check_out(tmp_path, str(tiny_npz))
