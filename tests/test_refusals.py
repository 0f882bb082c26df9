"""Before training: what cannot be done is refused with status 2, in one line; what was not given is chosen."""

import itertools
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from typing import get_origin, get_type_hints

import pytest
import torch
from conftest import REPO, TINY, python, run_here, run_program
from large_batch_cifar_10_fast.lab.launch import launch as launch_here
from large_batch_cifar_10_fast.lab.launch import plan_processes, read_command

from large_batch_cifar_10_fast import PACKAGE, ConfigError
from large_batch_cifar_10_fast.core import devices
from large_batch_cifar_10_fast.lab import log, program, source
from large_batch_cifar_10_fast.lab.options import Options, check_save

CASES = {  # the words of a command line and the error; no word is written to --out before it
    "--demo --batch_size 2048": "16384 images a step, more than the",
    "--recipe muon --data synthetic --batch_size 100 --kept 1,0.01": "epoch 5 keeps 0.01 of 8192 images, less than",
    "--batch_size 40": "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    "--demo --ghost_batch 12": "--ghost_batch 12 does not divide --batch_size 32",
    "--demo --lr_scaler=--": "-- is no value of an option",
    "--demo --lr_scaler 0": "--lr_scaler 0.0 must lie in 1e-09 to 100000",
    "--demo --epochs 1": "in 1 epochs the rate peaks at 0.2 and is constant in the last 1: use more --epochs, or give",
    "--demo --momentum 1": "recipe apple2019 has no option --momentum; --help",
    "--demo --epoch=3": "recipe apple2019 has no option --epoch=3; did you mean --epochs?",
    "--demo --teams 2 --runs 2": "--nproc and --teams start processes: use train_cifar_parallel.sh",
    "--recipe apple2018": "--recipe apple2018 cannot be used (LookupError: neither one of apple2019, muon, muon2024,",
    "--demo --recipe muon": "--demo is apple2019, small, not muon",
    "--demo --compile --no_compile": "--compile and --no_compile were both given",
    "--demo --micro_batches 3": "--micro_batches 3 does not divide the 8 workers",
    "--data http://host/x": "--data http:/host/x does not exist: name FILE.npz, cifar-10-python.tar.gz or",
    "--demo --save /tmp": "--save /tmp cannot be written (it would replace another file)",
    "--demo --save /dev/null/w.pt": "--save /dev/null/w.pt cannot be written (/dev/null is not a folder",
    f"--demo --out {'x' * 300}": "cannot be written (",
    f"--demo --resume --out {'x' * 300}": "runs.tsv cannot be read (File name too long): choose another --out",
    "--demo --resume": "--resume: there is no campaign in .",
    "--demo --campaign a/b": "--campaign 'a/b': use letters",
    "--demo --data a\nb": "--data 'a\\nb' cannot stand in a table",
    "--demo --precision tf32": "--precision tf32 is for GPUs",
    "--recipe basenet --epochs 41": "--epochs 41 must lie in 1 to 40",
    "--recipe fastai --entry one_gpu --epochs 31": "--epochs 31 must lie in 1 to 30",
    "--recipe page --width 8": "--width 8 must lie in 16 to 100000",
    "--recipe muon --kept 1,half": "--kept 1,half is no list of numbers, like 1,1,0.7",
    "--recipe muon --kept 1,0": "--kept 1,0: shares must lie above 0, and at most be 1",
    "--recipe muon --pixels 24x2": "--pixels 24x2 is no list of whole numbers, like 24,24,28,32",
    "--recipe muon --pixels 24,40": "--pixels 24,40: sizes must lie in 9 to 32",
    "--recipe muon --whitening_epochs 10": "--whitening_epochs 10 must lie in -1 to 9",
    "--recipe muon --workers 3": "--workers 3 does not divide 2000 images: choose --batch_size",
    "--recipe muon --batch_size 1": "is too small for its norms: use a larger --batch_size",
}


@pytest.mark.parametrize("words", CASES)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        run_here(*words.split(" "))
    assert CASES[words] in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", program.PROGRAMS)
@pytest.mark.parametrize("value", ["", "-", "-2", "x", "nan", "inf", "-inf", "1e308", "9" * 5000, "²", "a\nb", "1,,2"])
def test_no_option_of_a_program_takes_an_invalid_number(name, value):
    """Also no entry of a list of numbers."""
    loaded = program.load_program(name)
    hyp = program.hyp_class(name)
    kinds = get_type_hints(Options) | get_type_hints(hyp)
    for option, kind in kinds.items():
        if kind in (int, float) or get_origin(kind) is tuple:
            with pytest.raises(ConfigError, match=r"^[^\n]+$"):
                program.read_command(loaded, ["--recipe", name, "--data", "synthetic", f"--{option}={value}"])


def test_each_hyper_parameter_of_a_program_has_its_help_and_its_published_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        program.read_command(program.load_program("apple2019"), ["--help"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--lr_scaler FLOAT peak of the learning rate; weight decay grows with it (default 1.5)" in shown
    assert "--eval_stats {first,average} ghost groups whose statistics evaluation uses (default first)" in shown
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    apple = program.load_program("apple2019")
    _, options, hyp = program.read_command(apple, [*line.split(), "--runs", "50"])
    assert (options.runs, hyp, hyp.workers, hyp.ghost_batch) == (50, apple.Hyp(), 8, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "name"),
    [
        (["-m", "large_batch_cifar_10_fast.apple2019"], "python -m large_batch_cifar_10_fast.apple2019"),
        ([PACKAGE / "apple2019.py"], "python -m large_batch_cifar_10_fast.apple2019"),
    ],
)
def test_a_program_alone_refuses_likewise(how, name, tmp_path):
    result = python(*how, "--demo", "--epochs", "-1", cwd=tmp_path)
    line = f"{name}: --epochs -1 must lie in 1 to 100000\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.slow
def test_a_reader_that_ends_early_ends_a_program_without_a_word(tmp_path):
    command = f"{sys.executable} -m large_batch_cifar_10_fast.compare published published"
    result = run_program("bash", "-c", f"set -o pipefail; {command} | true", cwd=tmp_path, PYTHONPATH=REPO)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.slow
def test_a_campaign_survives_kills():
    result = python("tests/attack.py", "--kills", 2, "--seed", 1, "--pairs", 1, cwd=REPO)
    assert result.returncode == 0, result.stderr
    assert re.match(r"2 kills in \d campaigns, 2 pairs, .*\nbeside each other: all promises were kept\n", result.stdout)


@pytest.mark.parametrize(
    ("words", "recipe"),
    [("", "apple2019"), ("--demo", "apple2019"), ("--recipe page", "page"), ("--recipe=muon --runs 2", "muon")],
)
def test_without_a_recipe_it_is_apple2019_also_without_any_words(words, recipe):
    assert program.recipe_of(words.split(), "apple2019") == recipe
    command, options, _ = read_command(words.split())
    assert command[2:] == ["large_batch_cifar_10_fast.train", *words.split()]
    assert options.runs == (2 if "2" in words else 1)
    with pytest.raises(ConfigError, match="--recipe  cannot be used"):
        read_command(["--recipe"])


def test_demo_is_a_preset_that_can_be_overridden():
    apple = program.load_program("apple2019")
    _, options, hyp = program.read_command(apple, ["--epochs", "3", "--demo", "--workers", "4"])
    assert (options.data, options.demo) == ("synthetic", True)
    assert (hyp.epochs, hyp.workers, hyp.width, hyp.batch_size, hyp.ghost_batch) == (3, 4, 8, 32, 16)


def test_version_and_help_answer_without_training(capsys):
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit, match="0"):
            program.read_command(program.load_program("page"), [option])
    shown = capsys.readouterr().out
    assert (shown.split()[0], "the recipe page:" in shown) == ("large_batch_cifar_10_fast", True)
    assert all(f"--{entry.name}" in shown for entry in (*fields(Options), *fields(program.hyp_class("page"))))


def test_weights_may_take_the_place_of_weights_but_not_of_images(tmp_path, tiny_npz):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    check_save(str(tmp_path / "w.pt"))
    with pytest.raises(ConfigError, match="would replace another file"):
        check_save(str(tiny_npz))


@pytest.mark.parametrize(
    ("gpus", "cores", "workers", "nproc", "teams", "processes"),
    [
        *((3, 64, 8, 0, 1, 2), (0, 6, 8, 0, 1, 4), (0, 2, 5, 0, 1, 1), (8, 64, 8, 2, 1, 2), (0, 6, 8, 0, 2, 2)),
        *((8, 64, 8, 0, 2, 4), (8, 64, 1, 0, 5, 1)),
    ],
)
def test_there_are_as_many_processes_as_divide_the_workers_and_fit(gpus, cores, workers, nproc, teams, processes):
    assert plan_processes(nproc, teams, workers, gpus, cores) == processes


@pytest.mark.parametrize(("nproc", "teams", "most"), [(4, 1, 2), (2, 2, 1)])
def test_more_processes_than_gpus_and_more_teams_than_runs_are_refused(nproc, teams, most):
    message = f"--nproc {nproc} is more than the 2 GPUs of {teams} teams: use at most {most}"
    with pytest.raises(ConfigError, match=message):
        plan_processes(nproc, teams, 8, gpus=2, cores=64)
    with pytest.raises(ConfigError, match=r"--teams 3 is more than the runs to make \(2\): use fewer"):
        launch_here(["--demo", "--teams", "3", "--runs", "2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "precision", "slow"), [(3e6, "fp32", False), (600.1, "fp32", True), (3e6, "bf16", False)]
)
def test_a_long_campaign_on_a_cpu_says_how_long_it_takes_and_whether_the_machine_is_slow(
    seconds, precision, slow, tiny_npz, tmp_path, capsys, monkeypatch
):
    cores = torch.get_num_threads()
    words = [*TINY, "--no_compile", "--precision", precision, "--data", tiny_npz]
    monkeypatch.setattr(program, "flop_of", lambda *_: cores * seconds * program.CORE)
    monkeypatch.setattr(log, "LONG_EPOCH", 0)
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=1600).__next__)
    run_here(*words, "--runs", 2, "--out", tmp_path)
    errors = capsys.readouterr().err
    each = seconds / {"fp32": 1, "bf16": 4}[precision]
    hours = f"takes about {2 * each / 3600:.1f} hours; --recipe muon takes minutes, --demo shows"
    assert (hours in errors, errors.count("steps take over five times as long")) == (True, slow)


@pytest.mark.parametrize(("cpu_max", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("", 4)])
def test_cores_are_counted_by_affinity_and_by_the_quota_of_the_container(cpu_max, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4), raising=False)
    monkeypatch.setattr(devices, "output_of", lambda *command: cpu_max)
    assert devices.count_cores() == cores


def test_the_commit_is_not_that_of_a_repository_around_this_folder(tmp_path, monkeypatch):
    commit = "git -c user.name=a -c user.email=a commit -q --allow-empty -ma"
    subprocess.run(f"git init -q && {commit}", shell=True, cwd=tmp_path, check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "unpacked" / "package")
    assert source.commit.__wrapped__() == "unknown"
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "package")
    assert source.commit.__wrapped__() != "unknown"


def test_a_tilde_that_the_shell_left_alone_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    options = Options(data="~/d.npz", out="~/out", save="~/w.pt")
    assert (options.data, options.out, options.save) == ("/home/me/d.npz", "/home/me/out", "/home/me/w.pt")
