"""Before training: what cannot be done is refused in one line, what was not given is chosen, and help is given."""

import itertools
import re
import subprocess
from dataclasses import fields, replace
from functools import cache
from typing import get_origin, get_type_hints

import pytest
from conftest import ALONE, run_here

import large_batch_cifar_10_fast as package
from large_batch_cifar_10_fast import ConfigError, __main__
from large_batch_cifar_10_fast.core import devices
from large_batch_cifar_10_fast.core.hyp import settings_of
from large_batch_cifar_10_fast.images import load
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import program
from large_batch_cifar_10_fast.lab.options import Options
from large_batch_cifar_10_fast.lab.program import load_program, read_command
from large_batch_cifar_10_fast.lab.train import plan_processes, start_launch

few = cache(lambda: draw_shapes(2100, 20))
CASES = {  # the words of a command line and the error; no word is written to --out before it
    "--recipe muon --data synthetic --batch_size 100 --kept 1,0.01": "fewer than the 100 images of a step",
    "--batch_size 40": "--batch_size 40 is no multiple of 16: choose one, or a --ghost_batch",
    "--demo --lr_scaler 0": "--lr_scaler 0.0 must lie in 1e-09 to 100000",
    "--demo --epochs 1": "the rate peaks at epoch 0.2, in its constant end: use more --epochs, or",
    "--demo --epoch=3": "unrecognized arguments: --epoch=3; --help lists the options",
    "--demo --teams 2 --runs 2": "--nproc and --teams start processes: use train_cifar_parallel.sh",
    "--recipe apple2018": "--recipe apple2018 is neither one of apple2019, muon, muon95,",
    "--demo --micro_batches 3": "--micro_batches 3 does not divide the 8 workers",
    "--demo --save /etc/hosts": "--save /etc/hosts exists and has no weights: choose another name",
    "--demo --save /proc/w.pt": "No such file or directory",
    "--demo --small": "--small and --demo were both given: choose one",
    "--demo --resume": "--resume: there is no campaign in /",
    "--demo --campaign a/b": "--campaign 'a/b': use letters",
    "--demo --precision tf32": "--precision tf32 is for GPUs",
    "--recipe muon --workers 3": "--workers 3 does not divide 1000: choose --batch_size",
    "--recipe muon --batch_size 1": "a batch of one image is too small for norms: use a larger --batch_size",
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
    kinds = get_type_hints(Options) | get_type_hints(loaded.Hyp)
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
    hyp = program.load_program("apple2019").Hyp
    assert all(f"--{entry.name}" in shown for entry in (*fields(Options), *fields(hyp)))
    assert "--lr_scaler LR_SCALER peak of the learning rate; weight decay grows with it (default 1.5)" in shown
    assert "or FILE.npz, which `photos` makes of a folder" in shown


# ---- What was not given


def test_without_a_recipe_it_is_apple2019_as_published_and_demo_can_be_overridden():
    assert program.recipe_of(["--demo"], "apple2019") == "apple2019"
    assert program.recipe_of(["--recipe=page", "--recipe", "muon"], "apple2019") == "muon"
    apple = program.load_program("apple2019")
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    _, options, hyp = program.read_command(apple, [*line.split(), "--runs", "50"])
    assert (options.runs, hyp, hyp.workers, hyp.actual_ghost_batch) == (50, apple.Hyp(), 8, 16)
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


@pytest.mark.parametrize("recipe", ["apple2019", "muon", "muon95", "muon2024"])
def test_the_small_size_of_a_recipe_is_options_that_others_override(recipe):
    program = load_program(recipe)
    hyp = read_command(program, ["--recipe", recipe, "--small", "--epochs", "5"])[2]
    assert hyp.epochs == 5
    assert hyp.width <= 16
    if recipe == "apple2019":  # at as high a rate for each image of a step as published
        assert hyp.lr_scaler / hyp.batch_size / hyp.workers == pytest.approx(1.5 / 2048, rel=0.02)
    with pytest.raises(ConfigError, match=r"--small: the recipe page has no such size"):
        read_command(load_program("page"), ["--small"])


@pytest.mark.parametrize("recipe", [*program.PROGRAMS])
def test_a_setting_that_is_replaced_decides_those_that_were_left_open(recipe):
    hyp = program.sets_of(program.load_program(recipe))[recipe]()
    assert settings_of(replace(hyp, width=32)) == settings_of(hyp) | {"width": 32}
    if recipe.startswith("muon"):
        assert replace(hyp, workers=8).images_of_step == hyp.images_of_step
        assert replace(hyp, epochs=18).actual_whitening_epochs == round(18 * hyp.whitening_share)
    if recipe == "apple2019":
        assert replace(hyp, batch_size=512).actual_ghost_batch == 32
    if recipe == "fastai":
        other = replace(hyp, entry="one_gpu")
        assert (other.actual_epochs, other.actual_batch_size, other.workers) == (30, 512, 1)


def test_precision_and_compilation_on_a_cpu_follow_from_the_processor_and_the_work(monkeypatch):
    for facts, precision in {
        "flags: amx_bf16 avx512_bf16\nvendor_id: GenuineIntel": "bf16",
        "flags: avx512_bf16\nvendor_id: GenuineIntel": "fp32",
        "flags: avx512_bf16\nvendor_id: AuthenticAMD": "bf16",
        "flags: avx2\nvendor_id: AuthenticAMD": "fp32",
    }.items():
        monkeypatch.setattr(devices, "text_of_file", lambda name, facts=facts: facts)
        assert program.choose_computation(Options(), "fp16", 0.0, ALONE).precision == precision
    for given, pflop, compiles in (({}, 0.07, False), ({}, 0.09, True), ({"no_compile": True}, 9, False)):
        assert program.choose_computation(Options(**given), "fp16", pflop, ALONE).compile == compiles
    assert program.choose_computation(Options(compile=True), "fp16", 0, ALONE).compile
