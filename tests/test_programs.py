"""The programs: equal to the package that they replace, a run of a campaign equal to the run alone, ideas in copies."""

import functools
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from conftest import CPU, REPO, TINY, launch, python, run_here, train_together
from functorch.compile import make_boxed_compiler
from torch._functorch.aot_autograd import aot_module_simplified

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api
from large_batch_cifar_10_fast.core import data, fast, layers
from large_batch_cifar_10_fast.core.optim import NesterovSGD
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.lab import compare, log, results, source
from large_batch_cifar_10_fast.lab import program as core_program
from large_batch_cifar_10_fast.lab.log import Log
from large_batch_cifar_10_fast.lab.program import load_program, read_command

pytestmark = pytest.mark.slow

OWN = REPO / "tests" / "tiny.py"
RESULTS = ["run", "seed", "train_accuracy", "train_loss", "validation_count", "validation_loss"]
MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 20, "--epochs", 3, "--pixels", "24,32", "--kept", "1,0.5"]
SMALL = {
    "muon": MUON,
    "muon with workers": [*MUON, "--workers", 4, "--micro_batches", 2, "--views", "two"],
    "muon2024": ["--recipe", "muon2024", "--width", 4, "--batch_size", 50, "--epochs", 2, "--views", "one"],
    "apple2019": ["--demo", *TINY[:-1]],
    "apple2019 with averaged statistics": ["--demo", *TINY[:-1], "--eval_stats", "average", "--micro_batches", 4],
    "apple2019 in bf16": ["--demo", *TINY[:-1], "--precision", "bf16"],
    "page": ["--recipe", "page", "--width", 16, "--batch_size", 100, "--epochs", 1],
    "basenet": ["--recipe", "basenet", "--width", 16, "--batch_size", 200, "--epochs", 1],
    "fastai": ["--recipe", "fastai", "--width", 3, "--batch_size", 30, "--epochs", 1],
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "w.pt", weights_only=True)["weights"]


@pytest.mark.parametrize("name", SMALL)
def test_the_last_run_of_a_campaign_equals_a_single_run_with_its_seed_after_a_warm_up(name, tiny_npz, tmp_path):
    """Each run begins anew: weights, statistics, resolution, frozen weights, hard examples and the order of flips."""
    found = {}
    for kind, words in (("alone", ["--seed", 6]), ("second", ["--seed", 5, "--runs", 2, "--no_warmup"])):
        folder = tmp_path / kind
        options = ["--data", tiny_npz, "--out", folder, "--save", folder / "w.pt", "--no_compile"]
        run_here("--precision", "fp32", *SMALL[name], *words, *options)
        found[kind] = weights_of(folder), pd.read_csv(folder / "runs.tsv", sep="\t").iloc[-1]
    weights, row = found["second"]
    expected, expected_row = found["alone"]
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert row[RESULTS[1:]].tolist() == expected_row[RESULTS[1:]].tolist()


KINDS = {
    "AdamW": ["--optimizer", "AdamW", "--norm", "no"],
    "batch norm": ["--norm", "batch"],
    "dropout": ["--dropout", "0.5", "--norm", "no"],
    "an optimizer whose state does not begin with zeros": ["--optimizer", "NAdam", "--dropout", "0.3"],
    "an optimizer whose state is there before its first step": ["--optimizer", "Adagrad"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_of_a_campaign_equals_the_run_alone(kind, processes, tiny_npz, tmp_path):
    """Nothing leaks from run to run: of weights, norms, optimizers, rates, or what a network draws itself."""
    found = {}
    for name, words in (("alone", ["--seed", 6]), ("second", ["--seed", 5, "--runs", 2])):
        (folder := tmp_path / name).mkdir()
        options = ["--recipe", OWN, *KINDS[kind], *words, "--data", tiny_npz, "--precision", "fp32"]
        result = train_together(processes, *options, "--save", "w.pt", cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
        found[name] = weights_of(folder), pd.read_csv(folder / "runs.tsv", sep="\t").iloc[-1]
    weights, row = found["second"]
    expected, expected_row = found["alone"]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert row[RESULTS[2:]].tolist() == expected_row[RESULTS[2:]].tolist()


@pytest.mark.parametrize("name", ["muon", "apple2019"])
def test_a_notebook_trains_without_a_campaign_to_the_same_bits(name, tiny_npz, tmp_path, monkeypatch):
    """And prints each epoch; the second run is that of its seed, too."""
    monkeypatch.chdir(tmp_path)
    recipe = core_program.load_program(name)
    _, _, hyp = read_command(recipe, [*map(str, SMALL[name])])
    with pytest.raises(ConfigError, match="precision 'half' is none of fp16, bf16, tf32, fp32, fp64"):
        recipe.train(hyp, api.load_images(str(tiny_npz)), api.Machine(precision="half"))
    run = recipe.train(hyp, api.load_images(str(tiny_npz)), api.Machine())
    monkeypatch.setattr(data, "predict_all", Mock(side_effect=[KeyboardInterrupt]))
    interrupted = run(seed=3)
    with pytest.raises(KeyboardInterrupt):  # a cell of a notebook that is interrupted
        next(interrupted)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert len(list(run(seed=4))) == hyp.epochs
    for epoch in run(seed=3):
        assert re.match(r"Epoch\(number=\d, seconds=[\d.]+, train=Score\(correct=\d+, images=\d+, loss=", str(epoch))
    assert not list(tmp_path.iterdir())
    run_here(*SMALL[name], "--data", tiny_npz, "--precision", "fp32", "--no_compile", "--seed", 3, "--save", "w.pt")
    found = epoch.network.state_dict()
    expected = weights_of(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    row = pd.read_csv("runs.tsv", sep="\t").iloc[0]
    assert (epoch.number, epoch.validation.correct) == (hyp.epochs, row["validation_count"])
    assert epoch.train.loss == row["train_loss"]


def test_a_restart_keeps_memory_and_what_is_named():
    def fresh():
        network = torch.nn.Linear(2, 2)
        return network, [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)]

    network, optimizers = fresh()
    model = fast.Model(network, optimizers, fresh, keep=["bias"])
    places = [weight.data_ptr() for weight in network.parameters()]
    kept = network.bias.clone()
    model.restart(1, Team(0, 1, CPU))
    assert [weight.data_ptr() for weight in network.parameters()] == places
    torch.manual_seed(1)
    assert torch.equal(network.weight, torch.nn.Linear(2, 2).weight)
    assert torch.equal(network.bias, kept)
    draws = []
    for rank in (0, 1, 0):  # processes draw their own numbers
        model.restart(1, Team(rank, 2, CPU))
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[2] != draws[1]


# Ideas: each is a copy of a program with some lines changed.
SILU = [("nn.GELU()", "nn.SiLU()"), ("F.gelu(", "F.silu(")]
AVERAGE = [  # of the weights, over the steps of the last two epochs
    (
        "        for epoch in range(1, hyp.epochs + 1):\n",
        "        averaged = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)\n"
        "        for epoch in range(1, hyp.epochs + 1):\n",
    ),
    (
        "                    step(batch)\n",
        "                    step(batch)\n"
        "                    if epoch > hyp.epochs - 2:\n"
        "                        averaged.update_parameters(network)\n"
        "            if epoch == hyp.epochs:\n"
        "                network.load_state_dict(averaged.module.state_dict())\n",
    ),
]


def copy_with(name: str, edits: list[tuple[str, str]], path: Path) -> Path:
    text = (PACKAGE / f"{name}.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_another_activation_is_a_copied_program(tiny_npz, tmp_path):
    (tmp_path / "beside.py").write_text("from torch.nn import SiLU")
    edits = [*SILU, ("nn.SiLU()", "SiLU()"), ("import torch\n", "from beside import SiLU\nimport torch\n")]
    mine = copy_with("muon", edits, tmp_path / "my_muon.py")
    options = ["--width", 4, "--batch_size", 100, "--epochs", 1, "--data", tiny_npz, "--no_compile", "--campaign"]
    result = launch("--recipe", "my_muon.py", *options, "silu", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    run_here("--recipe", "muon", *options, "gelu", "--precision", "bf16", "--out", tmp_path)
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows["recipe"].tolist() == ["my_muon", "muon"]
    assert rows["validation_loss"][0] != rows["validation_loss"][1]
    assert (tmp_path / f"source-{rows['code'][0]}.py").read_text() == mine.read_text()


def test_an_average_of_the_weights_is_a_copied_program(tiny_npz, tmp_path):
    """The saved weights are the mean of those after each step of the last two epochs, here of all."""
    keep = [
        AVERAGE[1][0],
        AVERAGE[1][0] + "                    torch.save(network.state_dict(), f'{epoch}_{number}.pt')\n",
    ]
    options = ["--demo", *TINY, "--data", tiny_npz, "--save", "w.pt"]
    for name, edits in (("averaged", AVERAGE), ("plain", [keep])):
        (folder := tmp_path / name).mkdir()
        path = copy_with("apple2019", edits, folder / "mine.py")
        result = launch("--recipe", path, *options, "--nproc", 1, cwd=folder, OMP_NUM_THREADS=1)
        assert (result.returncode, result.stderr) == (0, "")
    steps = [torch.load(path, weights_only=True) for path in (tmp_path / "plain").glob("*_*.pt")]
    assert len(steps) == 2 * (643 // 8 // 16)
    averaged = weights_of(tmp_path / "averaged")
    for name in ("prep.0.weight", "head.2.weight", "layer2.2.bias", "layer2.2.running_mean"):
        mean = torch.stack([step[name] for step in steps]).mean(0)
        torch.testing.assert_close(averaged[name], mean, rtol=1e-4, atol=1e-6)


def test_compare_shows_the_lines_in_which_programs_differ(tiny_npz, tmp_path, capsys):
    programs = {"a": [], "b": SILU, "c": [("\n\n", f"\n{'# more' + chr(10)}\n")]}
    for name, edits in programs.items():
        path = copy_with("muon", edits, tmp_path / f"{name}.py")
        options = ["--width", 4, "--batch_size", 100, "--epochs", 1, "--data", tiny_npz, "--no_compile", "--precision"]
        run_here("--recipe", path, *options, "fp32", "--campaign", name, "--runs", 2, "--out", tmp_path)
    capsys.readouterr()
    compare.main([f"{tmp_path}/runs.tsv:b", f"{tmp_path}/runs.tsv:a"])
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if re.match(r"  [-+] ", line)]
    assert "  -         nn.GELU()," in shown
    assert "  +         nn.SiLU()," in shown
    assert len(lines) == 6
    compare.main([f"{tmp_path}/runs.tsv:c", f"{tmp_path}/runs.tsv:a"])
    shown = capsys.readouterr().out
    more = (PACKAGE / "muon.py").read_text().count("\n\n") - 40
    assert shown.count("  + # more\n") == 40
    assert f"  ... and {more} more lines\n" in shown


@pytest.mark.parametrize("name", ["apple2019", "muon", "page", "fastai"])
def test_the_digest_covers_every_module_of_ours_that_a_program_imports_but_the_lab(name, tmp_path):
    code = f"import sys, large_batch_cifar_10_fast.{name}\n"
    code += "print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('large_batch_cifar_10_fast')])"
    imported = {Path(file) for file in python("-c", code, cwd=tmp_path).stdout.split()}
    covered = {PACKAGE.parent / file for file in source.texts_of(load_program(name))}
    assert len(covered) > 10
    assert {file.stem for file in imported - covered} == {"__init__", "loading", *source.LAB}
    assert {file.stem for file in covered - imported} <= {"pictures", "shapes"}, "which only some data need"


def test_several_machines_use_no_graph(monkeypatch):
    """NCCL has no timeout inside a graph: a lost process would leave the others waiting."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(fast, "CudaGraphs", list)
    team = Team(0, 2, torch.device("cuda", 0), 2)
    found = []
    for on_a_machine in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_a_machine))
        found.append(fast.graph(print, [], print, team))
    assert found == [print, []]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.py has no Hyp and no Network and no train: copy one of our programs"),
        ("x = (", "mine.py cannot be used (SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import absent_thing", "mine.py cannot be used (ModuleNotFoundError: No module named 'absent_thing'"),
        (
            "from large_batch_cifar_10_fast.muon import Hyp, Network, train",
            "mine.py takes `train` from another program, whose Network and loss that uses: copy it here",
        ),
    ],
)
def test_a_file_that_is_no_program_is_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_program(str(tmp_path / "mine.py"))


def test_a_copy_has_a_name_of_its_own_in_tables_and_in_python(tmp_path):
    """So that weights and tables of a copy are never taken for ours, and it replaces no library."""
    for name, recipe, message in (
        ("muon", "muon", "has a recipe muon, as we have: give it another name"),
        ("mine", "muon2024", "has a recipe muon2024, as we have"),
        ("my muon", "my muon", "has a recipe 'my muon': use letters, digits"),
    ):
        program = load_program(str(copy_with("muon", [], tmp_path / f"{name}.py")))
        with pytest.raises(ConfigError, match=f"{name}.py {message}"):
            read_command(program, ["--recipe", recipe])
    result = python(copy_with("apple2019", [], tmp_path / "page.py"), "--demo", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "page.py has a recipe page, as we have" in result.stderr
    load_program(str(copy_with("apple2019", [], tmp_path / "random.py")))
    assert hasattr(sys.modules["random"], "randrange")


def test_a_network_that_reads_values_trains_and_its_work_is_unknown(tiny_npz, tmp_path, capsys):
    edits = [("        x = self.groups(", "        assert images.abs().sum().item() > 0\n        x = self.groups(")]
    edits += [("def flop(", "def flop_of_a_run(")]
    path = copy_with("muon", edits, tmp_path / "my-muon.py")
    how = ["--data", tiny_npz, "--no_compile", "--precision", "fp32", "--out", tmp_path]
    run_here("--recipe", path, *MUON[2:], *how)
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^# speed of run 0: \d+ images/s$", shown)
    (tmp_path / "run_log.txt").write_text(shown)
    assert results.read_log(str(tmp_path / "run_log.txt")).conditions["recipe"] == "my-muon"


@functools.cache
def program(name: str):
    return load_program(name)


def test_sets_of_hyper_parameters_are_recipes_of_a_program():
    name, options, hyp = read_command(program("muon2024"), ["--recipe", "muon2024", "--epochs", "4"])
    assert (name, options.runs, hyp.epochs, hyp.pixels, hyp.whitening_epochs) == ("muon2024", 1, 4, (32,), 2)
    with pytest.raises(ConfigError, match=r"--recipe page is not of muon.py, which has muon, muon2024"):
        read_command(program("muon"), ["--recipe", "page"])


def test_upload_preprocessing_whitening_and_training_count_and_validation_does_not(
    tiny_npz, tmp_path, monkeypatch, capsys
):
    """Work takes seconds of its own kind on a device, for which the clock waits; validations say 90%, 95%, 93%, 96%."""
    now, queued = [0.0], []
    scores = iter([90, 0, 95, 0, 93, 0, 96, 0] * 2)  # of validation and of training in turn

    def taking(seconds, work):
        def slower(*arguments, **named):
            queued.append(seconds)
            return work(*arguments, **named)

        return slower

    def synchronize(team):
        now[0] += sum(queued)
        queued.clear()

    def read_score(sums, team):
        score = next(scores)
        queued.append(1000 if score else 0)
        return Score(score, 100, 1.0)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * now[0])
    monkeypatch.setattr(Team, "synchronize", synchronize)
    monkeypatch.setattr(fast, "place", taking(500, fast.place))
    monkeypatch.setattr(data, "copy_to_device", taking(0.125, data.copy_to_device))
    monkeypatch.setattr(data, "normalize", taking(0.25, data.normalize))
    monkeypatch.setattr(layers, "whitening_filters", taking(0.125, layers.whitening_filters))
    monkeypatch.setattr(NesterovSGD, "step", taking(1, NesterovSGD.step))
    monkeypatch.setattr(program("apple2019"), "read_score", read_score)
    monkeypatch.setattr(log, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(core_program, "flop_of", lambda *_: 1e10)
    run_here("--demo", *TINY, "--epochs", 4, "--runs", 2, "--data", tiny_npz, "--out", tmp_path)
    steps = 643 // 8 // 16
    parts = {"upload": 0.5, "preprocessing": 0.5, "whitening": 0.125, "training": 4 * steps}
    parts |= {"seconds": 1.125 + 4 * steps, "last_validation": 1000, "validation_accuracy": 0.96}
    parts |= {"cpu_seconds": 2 * parts["seconds"]}
    parts |= {"goal_epoch": 2, "goal_seconds": 1.125 + 2 * steps}  # the first epoch at 94%, not the last
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows[[*parts]].to_dict("records") == [parts, parts]
    rates = f"{1e-2 / (4 * steps):.3g} TFLOP/s, {10 / (4 * steps):.0%} of the matrix rate"
    assert capsys.readouterr().out.count(f"# speed of run 0: 20 images/s, {rates}") == 1
    hours = pd.read_csv(tmp_path / "timing_log.tsv", sep="\t")["hours"] * 3600
    assert hours.tolist() == pytest.approx([1.125 + epoch * steps for epoch in (1, 2, 3, 4)])


def test_a_profile_is_a_trace_and_a_table_of_kernels_instead_of_runs(tiny_npz, tmp_path, capsys):
    small = ["--demo", *TINY, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night"]
    run_here(*small)
    before = (tmp_path / "runs.tsv").read_text()
    capsys.readouterr()
    run_here(*small, "--profile", 3)  # also of a campaign whose runs are finished
    shown = capsys.readouterr().out
    assert "runs reached" not in shown
    assert shown.endswith(f"# 3 steps: the trace is in {tmp_path}/trace.json\n")
    (calls,) = re.findall(r"aten::convolution_backward .* (\d+) +$", shown, re.MULTILINE)
    convolutions = 8  # of weights that are trained
    assert int(calls) == 3 * convolutions
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "aten::convolution_backward" for event in events) == 3 * convolutions
    assert (tmp_path / "runs.tsv").read_text() == before
    run_here(*small, "--profile", 1, "--out", tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["trace.json"]
    with pytest.raises(ConfigError, match="--profile is for one team"):
        run_here(*small, "--profile", 1, "--teams", 2, "--runs", 2)


def test_a_run_whose_loss_is_not_finite_stops_and_its_time_does_not_count(tiny_npz, tmp_path, capsys):
    run_here("--demo", *TINY, "--lr_scaler", 1e5, "--data", tiny_npz, "--out", tmp_path, "--epochs", 4, "--runs", 2)
    output = capsys.readouterr()
    assert "Warning: run 0 (seed 0) stopped after epoch 1 of 4: its loss is not finite" in output.err
    assert "Maximum training time nan median nan" in output.out


@pytest.mark.parametrize("name", ["muon2024", "apple2019"])
def test_weights_that_a_program_saved_evaluate_as_at_the_end_of_their_run(name, tiny_npz, tmp_path):
    how = ["--data", tiny_npz, "--out", tmp_path, "--save", tmp_path / "w.pt", "--no_compile", "--precision", "fp32"]
    run_here(*SMALL[name], *how)
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[-1]
    score = api.evaluate(tmp_path / "w.pt", tiny_npz)
    assert score.correct == row["validation_count"]
    assert score.loss == pytest.approx(row["validation_loss"], rel=1e-6)


# Compiled code, and a stand-in for the compiler


def test_compiled_programs_train_as_uncompiled_ones_and_compile_nothing_in_a_run(tiny_npz, tmp_path, monkeypatch):
    """Graphs are made and guarded as usual, and run uncompiled: C++ takes seconds a kernel."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    watch = Log.watch

    def without_compiling(log, steps):
        with torch._dynamo.config.patch(error_on_recompile=True):
            yield from watch(log, steps)

    monkeypatch.setattr(Log, "watch", without_compiling)
    for recipe in ("muon", "apple2019", "page"):
        for how in ("--compile", "--no_compile"):
            options = [*SMALL[recipe], "--data", tiny_npz, "--precision", "fp64", "--out", tmp_path, how, "--runs", 2]
            run_here(*options, "--campaign", recipe + how)
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows["compile"].tolist() == 3 * [True, True, False, False]
    for start in (0, 4, 8):
        compiled, plain = rows["validation_loss"][start : start + 2], rows["validation_loss"][start + 2 : start + 4]
        assert compiled.tolist() == pytest.approx(plain.tolist(), rel=1e-9)


def counting(outputs: list[int]):
    """Return a backend of torch.compile that runs graphs uncompiled, and counts the gradients of backward passes."""

    def count(graph, inputs):
        (returned,) = list(graph.graph.nodes)[-1].args
        outputs.append(sum(output is not None for output in returned))
        return graph

    def backend(graph, inputs):
        boxed = make_boxed_compiler(lambda graph, inputs: graph)
        return aot_module_simplified(graph, inputs, fw_compiler=boxed, bw_compiler=make_boxed_compiler(count))

    return backend


def test_a_frozen_parameter_has_no_gradient_in_compiled_code(tiny_npz, tmp_path, monkeypatch):
    """Of muon's three stages the first trains the whitening's bias: without it the first layer has no backward pass."""
    outputs = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting(outputs)))
    options = ["--pixels", "24,24,32", "--data", tiny_npz, "--precision", "fp32", "--out", tmp_path, "--compile"]
    run_here(*MUON, *options)
    parameters = 6 + 6 + 1  # filters, biases of norms, the head
    assert outputs == [parameters + 1, parameters, parameters]


def test_parameters_that_are_trained_later_are_compiled(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))

    def forward(x, y):
        losses = torch.nn.functional.cross_entropy(network(x), y, reduction="none")
        return Pass(losses.sum(), losses.detach(), [x.mean()])

    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    kinds = [(images, False), (images, True)]
    precision, team = fast.Precision("fp32", CPU, half_weights=False), Team(0, 1, CPU)
    assert fast.compile_training(forward, network, kinds, network[0].requires_grad_, precision, team) is not forward
    assert capsys.readouterr().err == ""


class Pass(NamedTuple):
    loss: torch.Tensor
    losses: torch.Tensor
    statistics: list[torch.Tensor]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda made: made, ""),
        (lambda made: made._replace(loss=0 * made.loss), "gradient of weight is 100% off"),  # as torch 2.11's
        (lambda made: made._replace(loss=made.loss.detach().requires_grad_()), "pass has no gradient of weight"),
        (lambda made: made._replace(loss=made.loss + 0.05 * made.loss.detach()), "loss is 5% off"),
        (lambda made: made._replace(losses=2 * made.losses), "losses is 100% off"),
        (
            lambda made: made._replace(statistics=[made.statistics[0], 0.9 * made.statistics[1]]),
            "statistics 1 is 10% off",
        ),
    ],
)
def test_every_result_of_a_compiled_pass_is_checked(fault, message, monkeypatch, capsys):
    """A pass with the fault stands in for the compiled one."""
    network = torch.nn.Linear(4, 3)

    def forward(x, y):
        losses = torch.nn.functional.cross_entropy(network(x), y, reduction="none")
        return Pass(losses.sum(), losses.detach(), [x.mean(), x.var()])

    monkeypatch.setattr(torch, "compile", lambda eager, **_: lambda *inputs: (fault(eager(*inputs)[0]), True))
    precision, team = fast.Precision("fp32", CPU, half_weights=False), Team(0, 1, CPU, 1)
    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = fast.compile_training(forward, network, [(images,)], lambda: None, precision, team)
    assert (found is forward) == bool(message)
    assert all(weight.grad is None for weight in network.parameters())
    shown = capsys.readouterr().err
    assert re.search(f"^Warning: not compiled .the compiled {message}", shown) if message else shown == ""


@pytest.mark.parametrize("edited", ["mine.py", "helper.py"])
def test_an_edited_file_does_not_continue_a_campaign_and_its_lines_are_shown(tiny_npz, tmp_path, capsys, edited):
    edits = [("import torch\n", "import helper  # nothing\nimport torch\n"), ("SETS = ", "SETS: dict = {}\n_ = ")]
    program = copy_with("muon", edits, tmp_path / "mine.py")
    (tmp_path / "helper.py").write_text("x = 1\n")
    options = ["--width", 4, "--batch_size", 100, "--epochs", 1, "--data", tiny_npz, "--no_compile", "--out", tmp_path]
    words = ["--recipe", program, *options, "--precision", "fp32", "--campaign", "before"]
    run_here(*words)
    file = tmp_path / edited
    file.write_text(file.read_text().replace("x = 1\n", "x = 2\n").replace("import helper  # nothing", "import helper"))
    capsys.readouterr()
    with pytest.raises(ConfigError, match=f"^{edited} was changed since campaign before began, as above: undo that"):
        run_here(*words, "--runs", 2)
    shown = capsys.readouterr().err.splitlines()
    old, new = {"mine.py": ("import helper  # nothing", "import helper"), "helper.py": ("x = 1", "x = 2")}[edited]
    assert shown == [f"  - {old}", f"  + {new}"]
    with pytest.raises(ConfigError, match=r"cannot be continued with .*label_smoothing"):
        run_here(*words, "--label_smoothing", 0.1)
