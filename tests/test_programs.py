"""Programs: a run equals the run alone, ideas in copies, what is timed, what of compiled code is checked."""

import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, CPU, REPO, TINY, python, run_here, train_together, write_npz

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api
from large_batch_cifar_10_fast.core import data, fast, layers
from large_batch_cifar_10_fast.core.optim import NesterovSGD
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.load import make_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import compare, snapshot
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

MUON = ["--recipe=muon", "--epochs=4", "--width=4", "--pixels=12,12,16,16", "--kept=1,0.7,1,0.7"]
RESNET = ["--width=16", "--batch_size=24", "--epochs=1"]
SMALL = {  # every program, small enough for a test of 155 images
    "apple2019": ["--demo", *TINY[:-1], "--workers=4", "--micro_batches=2", "--eval_stats=average"],
    "muon": [*MUON, "--batch_size=24"],
    "muon with four workers": [*MUON, "--batch_size=8", "--workers=4", "--micro_batches=2", "--views=two"],
    "page": ["--recipe=page", *RESNET],
    "basenet": ["--recipe=basenet", *RESNET],
    "fastai": ["--recipe=fastai", "--entry=one_gpu", "--width=3", "--batch_size=24", "--epochs=1"],
}


@pytest.fixture(scope="session")
def few_npz(tmp_path_factory):
    """155 training images: of steps of 24, eleven are left."""
    return write_npz(tmp_path_factory.mktemp("images") / "few.npz", *draw_shapes(155, 20))


def set_up(name, precision, **how):
    """Return run(seed) of a small program on these images, as in a notebook, and its machine."""
    program = load_program(recipe_of(SMALL[name], "apple2019"))
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
        patch.setattr(data, "predict_all", Mock(side_effect=KeyboardInterrupt))
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
    ("processes", "kind"),
    [
        (2, ["--optimizer", "AdamW", "--norm", "batch", "--dropout", "0.5"]),
        (2, ["--optimizer", "NAdam", "--norm", "no", "--dropout", "0.3"]),  # whose state does not begin with zeros
        (1, ["--optimizer", "Adagrad"]),  # whose state is there before its first step
    ],
)
def test_a_run_of_a_campaign_equals_the_run_alone(kind, processes, tiny_npz, tmp_path):
    """Nothing leaks from run to run: of weights, norms, optimizers, rates, or what a network draws itself."""
    found = {}
    for name, words in (("alone", ["--seed", 6]), ("second", ["--seed", 5, "--runs", 2])):
        (folder := tmp_path / name).mkdir()
        options = ["--recipe", REPO / "tests" / "tiny.py", *kind, *words, "--data", tiny_npz, "--precision", "fp32"]
        result = train_together(processes, *options, "--save", "w.pt", cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
        found[name] = weights_of(folder), rows_of(folder).iloc[-1]
    assert same(found["second"][0], found["alone"][0])
    for column in ("seed", "train_accuracy", "train_loss", "validation_count", "validation_loss"):
        assert found["second"][1][column] == found["alone"][1][column]


def test_processes_draw_numbers_of_their_own_in_a_network():
    model = fast.Model(torch.nn.Identity(), [], lambda: (torch.nn.Identity(), []))
    draws = []
    for rank in (0, 1, 0):
        model.restart(1, Team(rank, 2, CPU))
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[2] != draws[1]


# Ideas: each is a copy of a program with some lines changed.


def copy_with(name: str, edits: list[tuple[str, str]], path: Path) -> Path:
    text = (PACKAGE / f"{name}.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_another_activation_is_a_copied_program_and_compare_shows_its_lines(few_npz, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("from torch.nn import SiLU")
    edits = [("nn.GELU()", "SiLU()"), ("import torch\n", "from beside import SiLU\nimport torch\n")]
    edits += [("        x = self.groups(", "        assert x.abs().sum().item()\n        x = self.groups(")]
    paths = [copy_with("muon", [], tmp_path / "gelu.py"), copy_with("muon", edits, tmp_path / "silu.py")]
    for path in paths:
        options = ["--width", 4, "--batch_size", 16, "--epochs", 1, "--runs", 2, "--data", few_npz, "--no_compile"]
        run_here("--recipe", path, *options, "--precision", "fp32", "--campaign", path.stem, "--out", tmp_path)
    rows = rows_of(tmp_path)
    assert rows["recipe"].tolist() == ["gelu", "gelu", "silu", "silu"]
    assert rows["validation_loss"][0] != rows["validation_loss"][2]
    assert (tmp_path / "runs" / "silu" / "program" / "silu.py").read_text() == paths[1].read_text()
    assert rows["pflop"].notna().tolist() == [True, True, False, False], "which is unknown where a value is read"
    compare.main([f"{tmp_path}/runs.tsv:silu", f"{tmp_path}/runs.tsv:gelu"])
    lines = re.findall(r"(?m)^  [-+] .*", capsys.readouterr().out)
    added = ["  + from beside import SiLU", "  +         assert x.abs().sum().item()"]
    assert lines == added + 2 * ["  -         nn.GELU(),", "  +         SiLU(),"]


def test_the_digests_cover_every_module_of_ours_that_a_program_imports_but_the_lab(tmp_path):
    code = "import sys, large_batch_cifar_10_fast.muon\n"
    code += "print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('large_batch_cifar_10_fast')])"
    imported = {Path(file) for file in python("-c", code, cwd=tmp_path).stdout.split()}
    covered = {*snapshot.files_of(load_program("muon")).values(), *snapshot.core_files()}
    left = {file.relative_to(PACKAGE).parts[0] for file in imported - covered}
    assert left == {"__init__.py", "files.py", "lab"}


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
        ("", "cannot be used (TypeError: it has no Hyp and no Network and no train: copy one of our programs"),
        ("raise SystemExit", "cannot be used (SystemExit: "),
        ("x = (", "cannot be used (SyntaxError: '(' was never closed (mine.py, line 1)"),
        (
            "from large_batch_cifar_10_fast.muon import Hyp, Network, train",
            "cannot be used (TypeError: it imports `train`, which would use the other",
        ),
    ],
)
def test_a_file_that_is_no_program_is_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"mine.py {message}")):
        load_program(str(tmp_path / "mine.py"))


def test_a_copy_has_a_name_of_its_own_in_tables_and_in_python(tmp_path):
    """So that weights and tables of a copy are never taken for ours, and it replaces no library."""
    for name, recipe, message in (
        ("muon", "muon", "has a recipe with our name muon: give it another name"),
        ("mine", "muon2024", "has a recipe with our name muon2024"),
        ("my muon", "my muon", "has a recipe 'my muon': use letters, digits"),
    ):
        program = load_program(str(copy_with("muon", [], tmp_path / f"{name}.py")))
        with pytest.raises(ConfigError, match=f"{name}.py {message}"):
            read_command(program, ["--recipe", recipe])
    load_program(str(copy_with("apple2019", [], tmp_path / "random.py")))
    assert hasattr(sys.modules["random"], "randrange")


def test_upload_preprocessing_whitening_and_training_count_and_validation_does_not(
    few_npz, tmp_path, monkeypatch, capsys
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
    monkeypatch.setattr(data, "in_host_memory", taking(500, data.in_host_memory))
    monkeypatch.setattr(data, "copy_to_device", taking(0.5, data.copy_to_device))
    monkeypatch.setattr(data, "normalize", taking(0.25, data.normalize))
    monkeypatch.setattr(layers, "whitening_filters", taking(0.125, layers.whitening_filters))
    monkeypatch.setattr(NesterovSGD, "step", taking(1, NesterovSGD.step))
    monkeypatch.setattr(load_program("apple2019"), "read_score", read_score)
    run_here("--demo", *TINY, "--workers", 4, "--epochs", 4, "--runs", 2, "--data", few_npz, "--out", tmp_path)
    steps = 155 // 4 // 16
    parts = {"upload": 0.5, "preprocessing": 0.5, "whitening": 0.125, "training": 4 * steps}
    parts |= {"seconds": 1.125 + 4 * steps, "last_validation": 1000, "validation_accuracy": 0.96}
    parts |= {"cpu_seconds": 2 * parts["seconds"]}
    parts |= {"goal_epoch": 2, "goal_seconds": 1.125 + 2 * steps}  # the first epoch at 94%, not the last
    assert rows_of(tmp_path)[[*parts]].to_dict("records") == [parts, parts]
    hours = pd.read_csv(tmp_path / "timing_log.tsv", sep="\t")["hours"] * 3600
    assert hours.tolist() == pytest.approx([1.125 + epoch * steps for epoch in (1, 2, 3, 4)])


def test_a_run_whose_loss_is_not_finite_stops_and_its_time_does_not_count(few_npz, tmp_path, capsys):
    run_here("--demo", *TINY, "--workers", 4, "--lr_scaler", 1e5, "--data", few_npz, "--out", tmp_path, "--epochs", 4)
    output = capsys.readouterr()
    assert "Warning: run 0 (seed 0) stopped after epoch 1 of 4: its loss is not finite" in output.err
    assert "Maximum training time nan median nan" in output.out


# Compiled code, and a stand-in for the compiler


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
        losses = F.cross_entropy(network(x), y, reduction="none")
        return Pass(losses.sum(), losses.detach(), [x.mean(), x.var()])

    monkeypatch.setattr(torch, "compile", lambda eager, **_: lambda *inputs: (fault(eager(*inputs)[0]), True))
    precision = fast.Precision("fp32", CPU, half_weights=False)
    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = fast.compile_training(forward, network, [(images,)], lambda: None, precision, ALONE)
    assert (found is forward) == bool(message)
    assert all(weight.grad is None for weight in network.parameters())
    shown = capsys.readouterr().err
    assert re.search(f"^Warning: not compiled .the compiled {message}", shown) if message else shown == ""
