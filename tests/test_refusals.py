"""Before training: what cannot be done is refused in one line, what was not given is chosen, and help is given."""

import errno
import itertools
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from typing import get_origin, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from conftest import REPO, TINY, run_here, run_program

import large_batch_cifar_10_fast as package
from large_batch_cifar_10_fast import ConfigError, __main__, muon
from large_batch_cifar_10_fast.images import load
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import program
from large_batch_cifar_10_fast.lab.options import Options, parse_options
from large_batch_cifar_10_fast.lab.program import load_program, read_command
from large_batch_cifar_10_fast.lab.train import plan_processes, start_launch

few = cache(lambda: draw_shapes(2100, 20))
CASES = {  # the words of a command line and the error; no word is written to --out before it
    "--recipe muon --data synthetic --batch_size 100 --kept 1,0.01": "epoch 5 keeps 0.01 of 2100 images, less than",
    "--batch_size 40": "--batch_size 40 is not divisible into 16 ghost groups: use 32",
    "--demo --lr_scaler 0": "--lr_scaler 0.0 must lie in 1e-09 to 100000",
    "--demo --epochs 1": "the rate peaks at epoch 0.2 of 1, but is constant in the last 1: use more --epochs, or give",
    "--demo --epoch=3": "recipe apple2019 has no option --epoch=3; did you mean --epochs?",
    "--demo --teams 2 --runs 2": "--nproc and --teams start processes: use train_cifar_parallel.sh",
    "--recipe apple2018": "--recipe apple2018 cannot be used (LookupError: neither one of apple2019, muon, muon95,",
    "--demo --micro_batches 3": "--micro_batches 3 does not divide the 8 workers",
    "--demo --save /tmp": "--save /tmp cannot be written (it would replace another file)",
    "--demo --resume": "--resume: there is no campaign in .",
    "--demo --campaign a/b": "--campaign 'a/b': use letters",
    "--demo --precision tf32": "--precision tf32 is for GPUs",
    "--recipe muon --workers 3": "--workers 3 does not divide 1000 images: choose --batch_size",
    "--recipe muon --batch_size 1": "is too small for its norms: use a larger --batch_size",
}


@pytest.mark.parametrize("words", CASES)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "draw_shapes", few)
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        run_here(*words.split(" "))
    assert CASES[words] in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["apple2019", "muon", "page", "fastai"])
def test_no_option_of_a_program_takes_an_invalid_number(name):
    """Also no entry of a list of numbers."""
    loaded = program.load_program(name)
    kinds = get_type_hints(Options) | get_type_hints(program.hyp_class(name))
    numbers = [option for option, kind in kinds.items() if kind in (int, float) or get_origin(kind) is tuple]
    assert len(numbers) > 10
    for option, value in itertools.product(numbers, ["", "-2", "nan", "1e308", "9" * 5000, "1,,2"]):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            program.read_command(loaded, ["--recipe", name, "--data", "synthetic", f"--{option}={value}"])


# ---- Help


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_help_begins_with_an_example_of_its_command(command, capsys, monkeypatch):
    monkeypatch.setattr(__main__, "prepare_environment", lambda: None)
    with pytest.raises(SystemExit, match="0"):
        __main__.run(command, ["--help"])
    shown = capsys.readouterr().out
    assert re.match(rf"usage:\s+cifar10-fast {command} .*\w", shown)
    assert command != "train" or all(recipe in shown for recipe in program.PROGRAMS)


def test_help_of_a_recipe_has_its_options_with_comments_and_defaults_and_version_is_one_line(capsys):
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit, match="0"):
            program.read_command(program.load_program("apple2019"), [option])
    version, _, shown = capsys.readouterr().out.partition("\n")
    assert re.match(r"large_batch_cifar_10_fast \d", version)
    shown = re.sub(r"\s+", " ", shown)
    assert all(f"--{entry.name}" in shown for entry in (*fields(Options), *fields(program.hyp_class("apple2019"))))
    assert "--lr_scaler FLOAT peak of the learning rate; weight decay grows with it (default 1.5)" in shown
    assert "or FILE.npz, which `photos` makes of a folder" in shown


# ---- What was not given


def test_without_a_recipe_it_is_apple2019_as_published_and_demo_can_be_overridden():
    assert program.recipe_of(["--demo"], "apple2019") == "apple2019"
    assert program.recipe_of(["--recipe=page", "--recipe", "muon"], "apple2019") == "muon"
    apple = program.load_program("apple2019")
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    _, options, hyp = program.read_command(apple, [*line.split(), "--runs", "50"])
    assert (options.runs, hyp, hyp.workers, hyp.ghost_batch) == (50, apple.Hyp(), 8, 16)
    _, options, hyp = program.read_command(apple, ["--epochs", "3", "--demo", "--workers", "4"])
    assert (options.data, options.demo, hyp.epochs, hyp.workers, hyp.width) == ("synthetic", True, 3, 4, 8)


def test_there_are_as_many_processes_as_divide_the_workers_and_fit():
    for gpus, cores, workers, nproc, teams, processes in (
        (3, 64, 8, 0, 1, 2),
        (0, 6, 8, 0, 1, 4),
        (8, 64, 8, 2, 1, 2),
        (8, 64, 8, 0, 2, 4),
    ):
        assert plan_processes(nproc, teams, workers, gpus, cores) == processes
    with pytest.raises(ConfigError, match="--nproc 2 --teams 2 needs 4 GPUs, this machine has 2: use --nproc 1"):
        plan_processes(2, 2, 8, gpus=2, cores=64)
    with pytest.raises(ConfigError, match=r"--teams 3 is more than the runs to make \(2\): use fewer"):
        start_launch(["--demo", "--teams", "3", "--runs", "2"])


def test_a_temporary_folder_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    message = r"^files in .* cannot be locked \(No locks available\): set TMPDIR to another folder$"
    with pytest.raises(ConfigError, match=message):
        start_launch(["--demo", "--nproc", "2", "--data", "synthetic", "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_long_campaign_on_a_slow_machine_says_so_and_how_long_it_takes(tiny_npz, tmp_path, capsys, monkeypatch):
    cores = torch.get_num_threads()
    monkeypatch.setattr(program, "flop_of", lambda *_: cores * 601 * program.CORE)
    run_here(*TINY, "--no_compile", "--precision", "fp32", "--data", tiny_npz, "--runs", 2, "--out", tmp_path)
    errors = capsys.readouterr().err
    assert "takes about 0.3 hours; --recipe muon takes minutes, --demo shows" in errors


def test_the_commit_is_not_that_of_a_repository_around_this_folder(tmp_path, monkeypatch):
    commit = "git -c user.name=a -c user.email=a commit -q --allow-empty -ma"
    subprocess.run(f"git init -q && {commit}", shell=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(package, "PACKAGE", tmp_path / "unpacked" / "package")
    assert package.commit.__wrapped__() == "unknown"
    monkeypatch.setattr(package, "PACKAGE", tmp_path / "package")
    assert package.commit.__wrapped__() != "unknown"


def test_a_tilde_that_the_shell_left_alone_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    options = Options(data="~/d.npz", out="~/out", save="~/w.pt")
    assert (options.data, options.out, options.save) == ("/home/me/d.npz", "/home/me/out", "/home/me/w.pt")


def test_a_folder_that_was_deleted_is_one_line(tmp_path):
    script = f"cd {tmp_path}; rmdir {tmp_path}; {sys.executable} -m large_batch_cifar_10_fast compare published"
    result = run_program("bash", "-c", script, cwd=tmp_path, PYTHONPATH=REPO)
    assert result.returncode == 2
    assert result.stderr == "compare: the folder that you are in was deleted: go to another\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--lr=0.1", "its rates are --filter_rate, --bias_rate, --head_rate"),
        ("--learning_rate", "its rates are --filter_rate, --bias_rate, --head_rate"),
        ("--filtre_rate", r"did you mean --filter_rate\?"),
        ("--rnus", r"did you mean --runs\?"),
        ("--x", "--help lists the options"),
    ],
)
def test_an_unknown_option_is_answered_with_what_may_be_meant(word, hint):
    with pytest.raises(ConfigError, match=f"recipe muon has no option {word}; {hint}$"):
        parse_options([word], "muon", muon.Hyp, {})


@pytest.mark.parametrize("recipe", ["apple2019", "muon", "muon95", "muon2024"])
def test_the_small_size_of_a_recipe_is_options_that_others_override(recipe):
    program = load_program(recipe)
    hyp = read_command(program, ["--recipe", recipe, "--small", "--epochs", "5"])[2]
    assert hyp.epochs == 5
    assert hyp.width <= 16
    if recipe == "apple2019":  # at as high a rate for each image of a step as published
        assert hyp.lr_scaler / hyp.batch_size / hyp.workers == pytest.approx(1.5 / 2048, rel=0.02)
    with pytest.raises(ConfigError, match=r"--small: the recipe page has no small size"):
        read_command(load_program("page"), ["--small"])
