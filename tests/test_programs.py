"""Programs: a run equals the run alone, ideas in copies, what is timed, what of compiled code is checked."""

import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO, TINY, run_here, train_together, write_npz

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api
from large_batch_cifar_10_fast.core import data, layers
from large_batch_cifar_10_fast.core import machine as machines
from large_batch_cifar_10_fast.core.compiled import compile_checked, results_of_pass
from large_batch_cifar_10_fast.core.model import Model
from large_batch_cifar_10_fast.core.optim import NesterovSGD
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.load import make_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

MUON = ["--recipe=muon", "--epochs=4", "--width=4", "--pixels=12,12,16,16", "--kept=1,0.7,1,0.7"]
SMALL = {  # every program, small enough for a test of 155 images
    "apple2019": ["--demo", *TINY[:-1], "--workers=4", "--micro_batches=2", "--eval_stats=average"],
    "muon": [*MUON, "--batch_size=24"],
    "muon with four workers": [*MUON, "--batch_size=8", "--workers=4", "--micro_batches=2", "--views=two"],
    "page": ["--recipe=page", "--width=16", "--batch_size=24", "--epochs=1"],
    "basenet": ["--recipe=basenet", "--width=16", "--batch_size=24", "--epochs=1"],
    "fastai": ["--recipe=fastai", "--entry=one_gpu", "--width=3", "--batch_size=24", "--epochs=1"],
}


@pytest.fixture(scope="session")
def few_npz(tmp_path_factory):
    """155 training images: of steps of 24, eleven are left."""
    return write_npz(tmp_path_factory.mktemp("images") / "few.npz", *draw_shapes(155, 20))


def set_up(name, precision, **how):
    """Return run(seed) of a small program on these images, as in a notebook, and its machine."""
    program = load_program(recipe_of(SMALL[name]))
    _, options, hyp = read_command(program, SMALL[name])
    machine = api.Machine(ALONE, precision, micro_batches=options.micro_batches, **how)
    return program.train(hyp, make_images("few.npz", draw_shapes(155, 20)), machine), machine


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "w.pt", weights_only=True)["weights"]


def rows_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "runs.tsv", sep="\t")


def same(weights, others) -> bool:
    assert weights.keys() == others.keys()
    return all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize("name", SMALL)
def test_a_later_run_in_a_notebook_equals_a_run_of_the_command_line(name, few_npz, tmp_path, monkeypatch):
    """Each run begins anew: weights, statistics, resolution, frozen weights, hard examples, the order of flips."""
    run, _ = set_up(name, "fp32", warm_up=False)
    with monkeypatch.context() as patch:
        patch.setattr(machines, "predict_all", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # a cell that is interrupted
            next(run(seed=6))
    assert all(epoch.train.images for epoch in run(seed=5))
    *_, last = run(seed=6)
    how = ["--data", few_npz, "--out", tmp_path, "--save", tmp_path / "w.pt", "--no_compile", "--seed", 6]
    run_here("--precision", "fp32", *SMALL[name], *how)
    assert same(last.network.state_dict(), weights_of(tmp_path))
    row = rows_of(tmp_path).iloc[0]
    assert (last.train.loss, last.validation.correct) == (row["train_loss"], row["validation_count"])
    score = api.evaluate(tmp_path / "w.pt", few_npz)
    assert (score.correct, score.loss) == (row["validation_count"], pytest.approx(row["validation_loss"], rel=1e-6))


@pytest.mark.parametrize(
    "kind",
    [
        "--optimizer AdamW --norm batch --dropout 0.5",
        "--optimizer NAdam --norm no --dropout 0.3",  # whose state does not begin with zeros
        "--optimizer Adagrad",  # whose state is there before its first step
    ],
)
def test_a_run_of_a_campaign_equals_the_run_alone(kind, tiny_npz, tmp_path):
    """Nothing leaks from run to run: of weights, norms, optimizers, rates, or what a network draws itself."""
    found = []
    for words in (["--seed", 6], ["--seed", 5, "--runs", 2]):
        (folder := tmp_path / str(len(found))).mkdir()
        options = ["--recipe", REPO / "tests" / "tiny.py", *kind.split(), *words, "--data", tiny_npz, "--save", "w.pt"]
        result = train_together(2, *options, cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
        found.append((weights_of(folder), rows_of(folder).iloc[-1]))
    (weights, row), (others, other) = found
    assert same(weights, others)
    results = ["seed", "train_accuracy", "train_loss", "validation_count", "validation_loss"]
    assert row[results].equals(other[results])


def test_processes_draw_numbers_of_their_own_in_a_network():
    model = Model(lambda: (torch.nn.Identity(), []))
    draws = []
    for rank in (0, 1, 0):
        model.restart(1, Team(rank, 2, CPU))
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[2] != draws[1]


# Ideas: each is a copy of a program with some lines changed.


def copy_of(name: str, path: Path, *edits: tuple[str, str]) -> Path:
    text = (PACKAGE / f"{name}.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def weights_by_seed(path: Path, *seeds: int) -> list[dict[str, torch.Tensor]]:
    """Return the last weights of runs of one launch of a program in a file."""
    name = path.stem.split("-")[0]
    program = load_program(str(path))
    _, options, hyp = read_command(program, ["--recipe", str(path), *SMALL[name][1:]])
    machine = api.Machine(ALONE, "fp32", warm_up=False, micro_batches=options.micro_batches)
    run = program.train(hyp, make_images("few.npz", draw_shapes(155, 20)), machine)
    return [{key: value.clone() for key, value in [*run(seed)][-1].network.state_dict().items()} for seed in seeds]


WHITEN = "        network.whitening.weight.copy_(filters)\n"
FIXED = "        self.whitening.weight.requires_grad_(False)  # set once, from the images\n"


@pytest.mark.parametrize(("name", "deleted"), [("muon", [WHITEN]), ("apple2019", [WHITEN, FIXED])])
def test_filters_that_a_program_does_not_set_are_decided_by_the_seed_of_a_run(name, deleted, tmp_path):
    """They are trained in the copy of apple2019, and random in that of muon."""
    path = copy_of(name, tmp_path / f"{name}-ordinary.py", *((text, "") for text in deleted))
    fifth, sixth = weights_by_seed(path, 5, 6)
    assert not torch.equal(fifth["whitening.weight"], sixth["whitening.weight"])
    assert same(sixth, *weights_by_seed(path, 6))


@pytest.mark.parametrize(
    ("made", "name"), [("nn.Parameter(torch.ones(()))", "extra"), ("nn.Linear(2, 2)", "extra.weight")]
)
def test_a_parameter_that_no_optimizer_has_is_an_error(made, name, tmp_path):
    line = "        self.members = "
    path = copy_of("muon", tmp_path / "muon-extra.py", (line, f"        self.extra = {made}\n{line}"))
    with pytest.raises(ConfigError, match=f"^no optimizer has the parameter {name}: add it"):
        weights_by_seed(path, 5)


def test_a_head_that_begins_with_zeros_is_compiled_and_trains(tmp_path, monkeypatch, capsys):
    line = "        self.whitening = "
    path = copy_of("apple2019", tmp_path / "zero.py", (line, f"        nn.init.zeros_(self.head[2].weight)\n{line}"))
    program = load_program(str(path))
    _, _, hyp = read_command(program, ["--recipe", str(path), *SMALL["apple2019"][1:], "--micro_batches=1"])
    machine = api.Machine(ALONE, "fp32", compile=True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    run = program.train(hyp, make_images("few.npz", draw_shapes(155, 20)), machine)
    assert machine.is_compiled
    assert "Warning" not in capsys.readouterr().err
    assert next(run(0)).network.head[2].weight.any()


def test_an_average_of_weights_takes_three_edits_and_is_what_is_validated_and_saved(few_npz, tmp_path):
    begin = "        machine.restart(model, seed)\n"
    step = "                    machine.step(batch, stage)\n"
    score = "machine.evaluate(network, losses, views)"
    move = "torch._foreach_lerp_([*average.state_dict().values()], [*network.state_dict().values()], 0.1)"
    edits = [
        (begin, f"{begin}        from copy import deepcopy\n        average = deepcopy(network)\n"),
        (step, f"{step}                    {move}\n"),
        (score, score.replace("network", "average")),
        ("validation, network)", "validation, average)"),  # the next line
    ]
    path = copy_of("muon", tmp_path / "ema.py", *edits)
    how = ["--data", few_npz, "--out", tmp_path, "--save", tmp_path / "w.pt", "--no_compile", "--precision", "fp32"]
    run_here("--recipe", str(path), *SMALL["muon"][1:], *how)
    averaged = weights_of(tmp_path)
    score = api.evaluate(tmp_path / "w.pt", few_npz, program=path)
    assert score.loss == pytest.approx(rows_of(tmp_path)["validation_loss"][0], rel=1e-6)
    run_here("--recipe", "muon", *SMALL["muon"][1:], *how, "--campaign", "plain")
    plain = weights_of(tmp_path)
    assert not torch.equal(averaged["members.0.linear.weight"], plain["members.0.linear.weight"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no Hyp and no Network and no losses_of and no train"),
        ("raise SystemExit", "SystemExit"),
        ("from large_batch_cifar_10_fast.muon import Hyp, Network, losses_of, train", "it imports `train`"),
    ],
)
def test_a_file_that_is_no_program_is_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"^--recipe [^\n]*mine.py cannot be used \([^\n]*{message}[^\n]*$"):
        load_program(str(tmp_path / "mine.py"))


def test_a_copy_has_a_name_of_its_own_in_tables_and_in_python(tmp_path):
    """So that weights and tables of a copy are never taken for ours, and it replaces no library."""
    for name, recipe in (("muon", "muon"), ("mine", "muon2024")):
        program = load_program(str(copy_of("muon", tmp_path / f"{name}.py")))
        with pytest.raises(ConfigError, match=f"{name}.py has a recipe .*{recipe}"):
            read_command(program, ["--recipe", recipe])
    load_program(str(copy_of("apple2019", tmp_path / "random.py")))
    assert hasattr(sys.modules["random"], "randrange")


def test_upload_preprocessing_whitening_and_training_count_and_validation_does_not(few_npz, tmp_path, monkeypatch):
    """Work takes seconds of its own kind on a device, for which the clock waits; validations say 90%, 95%, 93%, 96%."""
    now = [0.0]
    queued = []
    scores = iter([90, 0, 95, 0, 93, 0, 96, 0] * 2)  # of validation and of training in turn

    def taking(seconds, work):
        def slower(*arguments, **named):
            queued.append(seconds)
            return work(*arguments, **named)

        return slower

    def synchronize(team):
        now[0] += sum(queued)
        queued.clear()

    for owner, name, seconds in (
        (load_program("apple2019"), "move", 500),
        (data, "copy_to_device", 0.5),
        (data, "normalize", 0.25),
        (layers, "whitening_filters", 0.125),
        (NesterovSGD, "step", 1),
    ):
        monkeypatch.setattr(owner, name, taking(seconds, getattr(owner, name)))
    read_score = taking(1000, lambda sums, team: Score(next(scores), 100, 1.0))
    for module in (load_program("apple2019"), machines):
        monkeypatch.setattr(module, "read_score", read_score)
    monkeypatch.setattr(Team, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * now[0])
    run_here("--demo", *TINY, "--workers", 4, "--epochs", 4, "--runs", 2, "--data", few_npz, "--out", tmp_path)
    steps = 155 // 4 // 16
    parts = {"upload": 0.5, "preprocessing": 0.5, "whitening": 0.125, "training": 4 * steps}
    parts |= {"seconds": 1.125 + 4 * steps, "last_validation": 1000, "validation_accuracy": 0.96}
    parts |= {"cpu_seconds": 2 * parts["seconds"]}
    parts |= {"goal_epoch": 2, "goal_seconds": 1.125 + 2 * steps}  # the first epoch at 94%, not the last
    assert rows_of(tmp_path)[[*parts]].to_dict("records") == [parts, parts]


def test_a_run_whose_loss_is_not_finite_stops_and_its_time_does_not_count(few_npz, tmp_path, capsys):
    run_here("--demo", *TINY, "--workers", 4, "--lr_scaler", 1e5, "--data", few_npz, "--out", tmp_path, "--epochs", 4)
    output = capsys.readouterr()
    assert "stopped after epoch 1: its loss is not finite" in output.err
    assert "Maximum training time nan median nan" in output.out


# Compiled code, and a stand-in for the compiler


Pass = namedtuple("Pass", ["loss", "sums"])
BROKEN = {  # what is wrong with a pass, and how
    "": lambda loss, sums: (loss, sums),
    "gradient of weight is 100% off": lambda loss, sums: (0 * loss, sums),  # as torch 2.11's
    "no gradient of weight": lambda loss, sums: (loss.detach().requires_grad_(), sums),
    "loss is 5% off": lambda loss, sums: (loss + 0.05 * loss.detach(), sums),
    "sums 1 is 100% off": lambda loss, sums: (loss, [sums[0], 0 * sums[1]]),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_every_result_of_a_compiled_pass_is_checked(wrong, monkeypatch, capsys):
    """A pass with the fault stands in for the compiled one."""
    network = torch.nn.Linear(4, 3)

    def forward(x, y):
        return Pass(F.cross_entropy(network(x), y, reduction="sum"), [x.mean(), x.var()])

    def compiled(*inputs):
        return Pass(*BROKEN[wrong](*forward(*inputs)))

    monkeypatch.setattr(torch, "compile", lambda eager, **_: compiled)
    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    examples = [(images, torch.arange(8) % 3)]
    found = compile_checked("training", forward, partial(results_of_pass, network), examples, "fp32", ALONE)
    assert (found is forward) == bool(wrong)
    assert network.weight.grad is None
    assert wrong in capsys.readouterr().err
