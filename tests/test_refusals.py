"""Before training: what cannot be done is refused in one line, what was not given is chosen, and help is given."""

import itertools
import re
import sys
from dataclasses import fields, replace
from functools import cache
from typing import get_origin, get_type_hints

import pytest
from conftest import ALONE, python, run_here

from large_batch_cifar_10_fast import PROGRAMS, ConfigError, __main__
from large_batch_cifar_10_fast.commands import train
from large_batch_cifar_10_fast.core import precision as precisions
from large_batch_cifar_10_fast.images import load
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.conduct import choose_computation
from large_batch_cifar_10_fast.lab.launch import largest_divisor
from large_batch_cifar_10_fast.lab.options import Options, comments
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of, sets_of

few = cache(lambda: draw_shapes(2100, 20))
REFUSED = {  # a command line, and words of the error
    "trian": "no such command",
    "train --recipe apple2018": "neither one of apple2019",
    "train --demo --epoch=3": "unrecognized arguments: --epoch=3",
    "train --demo --epochs 1": "use more --epochs",
    "train --demo --resume": "there is no campaign",
    "train --demo --campaign a/b": "use letters",
    "train --demo --micro_batches 3": "does not divide the 8 workers",
    "train --demo --precision tf32": "is for GPUs",
    "train --demo --save text": "has no weights",
    "train --recipe page --small": "page has no --small",
    "train --recipe muon --data synthetic --batch_size 3000": "a step has 3000 images, but 2100 train",
    "experiment --demo": "--try",
    "compare absent": "no such file",
    "evaluate absent.pt": "No such file",
    "photos absent photos.npz": "No such file",
}


def start(line: str, monkeypatch) -> int:
    """Return the exit status of a command line. Its processes do not start: this one trains."""
    monkeypatch.setattr(sys, "argv", ["cifar10-fast", *line.split()])
    monkeypatch.setattr(__main__, "SIGNALS", ())
    monkeypatch.setattr(__main__, "prepare", lambda *_: None)
    monkeypatch.setattr(train, "main", lambda words: run_here(*words))
    with pytest.raises(SystemExit) as end:
        __main__.main()
    return end.value.code


@pytest.mark.parametrize("line", REFUSED)
def test_an_invalid_request_is_one_line_and_status_2_and_nothing_is_written(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.write_text("mine")
    monkeypatch.setattr(load, "draw_shapes", few)
    assert start(line, monkeypatch) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"{line.split()[0]}: .*{REFUSED[line]}.*\n", output.err)
    assert list(tmp_path.iterdir()) == [text]
    assert text.read_text() == "mine"


@pytest.mark.parametrize("name", ["apple2019", "muon", "page", "fastai"])
def test_no_option_of_a_program_takes_an_invalid_number(name):
    """Also no entry of a list of numbers."""
    loaded = load_program(name)
    kinds = get_type_hints(Options) | get_type_hints(loaded.Hyp)
    numbers = [option for option, kind in kinds.items() if kind in (int, float) or get_origin(kind) is tuple]
    assert len(numbers) > 8
    for option, value in itertools.product(numbers, ["", "-2", "nan", "1e308", "9" * 5000, "1,,2"]):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            read_command(loaded, ["--recipe", name, "--data", "synthetic", f"--{option}={value}"])


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_help_begins_with_an_example_and_an_option_has_its_comment_and_default(command, monkeypatch, capsys):
    assert start(f"{command} --help", monkeypatch) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.match(rf"usage: cifar10-fast {command} \S", shown)
    if command == "train":
        assert "peak of the learning rate; weight decay grows with it (default 1.5)" in shown


def test_each_option_has_a_comment_on_its_own_line_which_is_its_help():
    programs = map(load_program, {*PROGRAMS.values()})
    for owner in [Options, *(hyp for program in programs for hyp in sets_of(program).values())]:
        assert {field.name for field in fields(owner)} <= comments(owner).keys()


def test_what_is_slow_to_import_comes_after_the_options(tmp_path):
    """A refusal comes in two seconds."""
    imported = "import sys, large_batch_cifar_10_fast.commands.experiment"
    assert (
        python("-c", f"{imported}; print({{'scipy.stats', 'matplotlib'}} & {{*sys.modules}})", cwd=tmp_path).stdout
        == "set()\n"
    )


# ---- What was not given


def test_without_options_it_is_apple2019_as_published():
    apple = load_program(recipe_of([]))
    line = "--lr_scaler 1.5 --lr_scaler_end_fraction 0.1 --epochs 18 --warmup_fraction 5 --ema_ep 2 --batch_size 256"
    hyp = read_command(apple, line.split())[2]
    assert (hyp, hyp.workers, hyp.actual_ghost_batch) == (apple.Hyp(), 8, 16)


@pytest.mark.parametrize("words", ["--demo", "--small", "--recipe=muon --small", "--recipe=muon2024 --small"])
def test_a_small_size_is_options_that_others_override(words):
    arguments = ["--epochs=5", *words.split()]
    _, options, hyp = read_command(load_program(recipe_of(arguments)), arguments)
    assert hyp.epochs == 5
    assert hyp.width <= 16
    assert (options.data == "synthetic") == options.demo


def test_a_setting_that_is_replaced_decides_those_that_were_left_open():
    assert replace(load_program("apple2019").Hyp(), batch_size=512).actual_ghost_batch == 32
    assert replace(load_program("muon").Hyp(), workers=8).images_of_step == 1000


@pytest.mark.parametrize(("workers", "places", "processes"), [(8, 3, 2), (8, 6, 4), (1, 8, 1), (8, 9, 8)])
def test_there_are_as_many_processes_as_divide_the_workers_and_fit(workers, places, processes):
    assert largest_divisor(workers, places) == processes


def chosen(pflop: float = 0.0, **given: bool) -> Options:
    return choose_computation(Options(**given), "fp16", pflop, ALONE)


def test_precision_and_compilation_on_a_cpu_follow_from_the_processor_and_the_work(monkeypatch):
    for facts, precision in {
        "amx_bf16 avx512_bf16 GenuineIntel": "bf16",
        "avx512_bf16 GenuineIntel": "fp32",
        "avx512_bf16 AuthenticAMD": "bf16",
    }.items():
        monkeypatch.setattr(precisions, "text_of_file", lambda name, facts=facts: facts)
        assert chosen().precision == precision
    assert not chosen(0.07).compile
    assert chosen(0.09).compile
    assert not chosen(9, no_compile=True).compile
    assert chosen(compile=True).compile
