"""CUDA graphs and compiled code change only the speed, failing at them does no harm, and a run never waits for the GPU.

To be pretended, a GPU is a FakeTensorMode, or a CPU with graphs that repeat a step's recorded calls: the programs take
the paths of a GPU, where learning rates are tensors, SGD is fused, steps are captured and replayed.
"""

import functools
import re
from contextlib import contextmanager
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from conftest import ALONE, CPU, TINY, python, run_here, write_npz, write_program
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from large_batch_cifar_10_fast.core import data, fast
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.load import Images, random_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import program as core_program
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

MUON = ["--recipe=muon", "--epochs=4", "--width=4", "--pixels=12,12,16,16", "--kept=1,0.7,1,0.7"]
RESNET = ["--precision=fp32", "--width=16", "--batch_size=24", "--epochs=1"]
RUNS = {  # a run's options, and the kinds of its steps
    "apple2019": (["--demo", *TINY, "--workers=4"], 1),
    "apple2019 in micro-batches": (["--demo", *TINY, "--workers=4", "--micro_batches=2", "--eval_stats=average"], 1),
    "muon in bf16": ([*MUON, "--batch_size=24", "--precision=bf16"], 3),
    "muon with four workers": ([*MUON, "--batch_size=8", "--workers=4", "--micro_batches=2"], 3),
    "page": (["--recipe=page", *RESNET], 2),
    "basenet": (["--recipe=basenet", *RESNET], 2),
}
FASTAI = ["--recipe=fastai", "--entry=one_gpu", "--width=3", "--batch_size=24", "--epochs=1"]
PROGRAMS = {"fastai": FASTAI, **{name: options for name, (options, _) in RUNS.items() if "micro" not in name}}


@pytest.fixture(scope="session")
def few_npz(tmp_path_factory):
    """155 training images: of steps of 24, eleven are left."""
    return write_npz(tmp_path_factory.mktemp("images") / "few.npz", *draw_shapes(155, 20))


def run(options, few_npz, folder, *more: str, compiled="--no_compile"):
    """Train. Return the rows of the runs, and the weights of the last one."""
    files = ["--data", few_npz, "--out", folder, "--save", folder / "w.pt"]
    run_here("--precision=fp64", *options, *files, *more, compiled)
    return pd.read_csv(folder / "runs.tsv", sep="\t"), torch.load(folder / "w.pt", weights_only=True)["weights"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_gradients_and_activations_are_channels_last_in_memory(name, few_npz, tmp_path, monkeypatch):
    found = {}

    def look(what, tensor):
        if tensor.ndim == 4:
            found.setdefault(what, set()).add(tensor.is_contiguous(memory_format=torch.channels_last))

    def hook(name, module, inputs, output):
        if module.training:
            look(f"input of {name}", inputs[0])
            look(f"output of {name}", output)

    def place(network, precision, original=fast.place):
        original(network, precision)
        for name, module in network.named_modules():
            module.register_forward_hook(functools.partial(hook, name))
        for name, weight in network.named_parameters():
            look(name, weight)
            weight.register_post_accumulate_grad_hook(lambda w, name=name: look(f"gradient of {name}", w.grad))

    monkeypatch.setattr(fast, "place", place)
    run(PROGRAMS[name], few_npz, tmp_path, "--epochs=1")
    assert len(found) > 20
    assert "input of " in found
    assert [what for what in found if found[what] != {True}] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_pretended_gpu_a_run_neither_waits_nor_mixes_devices(name, monkeypatch):
    """FakeTensorMode knows shapes and devices alone: what needs a value, or tensors of two devices, raises.

    Backward would need a driver; zeros stand for its gradients.
    """
    gpu = torch.device("cuda", 0)
    networks = []

    def read_score(sums, team):
        assert sums.device == gpu
        with pytest.raises(DataDependentOutputException):
            sums.tolist()
        return Score(1, 1, 0.0)

    def draw(*arguments, generator, device, make):
        return make(*arguments, device=device)

    def fused_sgd(*lists, lr, **settings):
        assert {tensor.device for tensor in tree_leaves(lists)} | {lr.device} == {gpu}

    def set_gradients(loss):
        for weight in networks[0].parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None

    def make_network(*arguments, make):
        with gpu:
            networks.append(make(*arguments))
        return networks[-1]

    program = load_program(recipe_of(PROGRAMS[name], "apple2019"))
    _, options, hyp = read_command(program, [*PROGRAMS[name], "--precision=fp32", "--no_compile", "--no_graph"])
    monkeypatch.setattr(program, "read_score", read_score)
    monkeypatch.setattr(data, "generator", lambda device, *key: Mock(device=device))
    for kind in ("randperm", "randint", "rand"):
        monkeypatch.setattr(torch, kind, functools.partial(draw, make=getattr(torch, kind)))
    monkeypatch.setattr(program, "Network", functools.partial(make_network, make=program.Network))
    monkeypatch.setattr(fast, "place", lambda network, precision: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(fast, "evaluation_chunks", lambda count, device: [count])
    monkeypatch.setattr(Tensor, "backward", set_gradients)
    monkeypatch.setattr(torch, "_fused_sgd_", fused_sgd)  # it has no fake kernel
    seen = []
    machine = Machine(
        Team(0, 1, gpu),
        "fp32",
        compile=False,
        graphs=False,
        micro_batches=options.micro_batches,
        watch=lambda steps: seen.extend(steps) or steps,
    )
    with FakeTensorMode(allow_non_fake_inputs=False):
        for epoch in program.train(hyp, random_images(155, 20), machine)(seed=0):
            assert {tensor.device for tensor in epoch.network.state_dict().values()} == {gpu}
    assert len(seen) > 3, "steps"


# ---- CUDA graphs

WAITING = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}  # a capture fails at what reads a value


def storages(values) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


class RecordedGraph(TorchDispatchMode):
    """As torch.cuda.CUDAGraph: a replay repeats the calls that a capture recorded, with their numbers, on their memory.

    What they allocate is lost between replays, as where graphs share a pool: all its bits are set, which makes NaN.
    """

    failing = WAITING

    def __init__(self):
        super().__init__()
        self.calls = []
        self.made = {}
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.failing:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                self.before |= {k: (s, s.clone()) for k, s in storages(value).items() if k not in self.before}
        results = func(*args, **(kwargs or {}))
        known = storages((args, kwargs))
        new = {k: storage for k, storage in storages(results).items() if k not in known}
        kept = [result if isinstance(result, Tensor) else None for result in tree_leaves(results)]
        self.calls.append((func, args, kwargs or {}, kept, new))
        self.made |= new
        return results

    def end_capture(self):
        """Undo the calls: a capture computes nothing."""
        for storage, content in self.before.values():
            storage.copy_(content)
        self.poison()

    def poison(self):
        for storage in self.made.values():
            storage.fill_(255)

    @torch.no_grad()
    def replay(self):
        self.poison()
        for func, args, kwargs, recorded, new in self.calls:
            for result, memory in zip(tree_leaves(func(*args, **kwargs)), recorded, strict=True):
                if memory is not None and storages(memory).keys() & new:
                    memory.copy_(result)
        self.poison()


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def graphs(monkeypatch) -> list[RecordedGraph]:
    """Let the programs take a CPU for a GPU. Return a list, to which the captured graphs are appended."""
    captured = []
    default = Stream()
    current = [default]

    @contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    @contextmanager
    def graph(recorder, pool, chosen):
        current.append(chosen)  # a failed capture leaves its stream
        try:
            with recorder:
                yield
        finally:
            recorder.end_capture()
        current.pop()
        captured.append(recorder)

    stand_ins = {"Stream": Stream, "stream": stream, "CUDAGraph": RecordedGraph, "graph": graph}
    stand_ins |= {"current_stream": lambda: current[-1], "default_stream": lambda: default}
    stand_ins |= {"set_stream": current.append, "graph_pool_handle": object, "synchronize": lambda device: None}
    stand_ins |= {"reset_peak_memory_stats": lambda device: None, "get_device_capability": lambda gpu: (9, 0)}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Images, "pinned", lambda images: images)
    monkeypatch.setattr(Team, "on_gpu", True)
    return captured


RESULTS = ["train_loss", "train_accuracy", "validation_loss", "validation_count"]


def same(weights, others) -> bool:
    return all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("name", RUNS)
def test_runs_by_graphs_equal_runs_without_each_alone(name, graphs, monkeypatch, few_npz, tmp_path):
    """Bit for bit. A CPU, whose rates are numbers, rounds differently."""
    options, count = RUNS[name]
    _, replayed = run(options, few_npz, tmp_path, "--campaign=replayed", "--runs=2", "--seed=1")
    assert len(graphs) == count, "one for each kind of step"
    if "muon" in name:
        assert len(graphs[1].calls) < len(graphs[0].calls), "its first bias is trained no more"
    rows, alone = run(options, few_npz, tmp_path, "--campaign=alone", "--seed=2", "--no_graph")
    assert rows["no_graph"].tolist() == [False, False, True]
    assert rows[RESULTS].iloc[1].tolist() == rows[RESULTS].iloc[2].tolist()
    assert same(replayed, alone)
    if "bf16" in name:
        return
    limit = 1e-3 if "muon" in name else 1e-5  # Muon enlarges rounding
    monkeypatch.undo()
    _, on_cpu = run(options, few_npz, tmp_path, "--campaign=cpu", "--seed=2")
    for key, tensor in replayed.items():
        assert torch.dist(tensor, on_cpu[key]) < limit * tensor.norm(), key


def test_no_graph_is_captured_where_the_momentum_changes(graphs, few_npz, tmp_path):
    """A graph would keep the momentum it was captured with."""
    rows, _ = run(FASTAI, few_npz, tmp_path)
    assert not graphs
    assert rows["no_graph"].tolist() == [True]


@pytest.mark.parametrize("other", ["", "no graphs there"], ids=["here", "on another process"])
def test_if_a_capture_fails_on_one_process_all_train_without_graphs(
    other, graphs, monkeypatch, capsys, few_npz, tmp_path
):
    options, _ = RUNS["apple2019"]
    _, expected = run(options, few_npz, tmp_path, "--campaign=expected", "--no_graph")
    capsys.readouterr()
    if other:
        monkeypatch.setattr(Team, "gather", lambda team, key, text: [text, other if key == "graph 0" else text])
    else:
        monkeypatch.setattr(RecordedGraph, "failing", {"_foreach_div_"})  # once gradients are computed
    rows, found = run(options, few_npz, tmp_path, "--campaign=found")
    assert capsys.readouterr().err.startswith(f"Warning: no CUDA graphs ({other or 'aten._foreach_div_'}")
    assert rows["no_graph"].tolist() == [True, True]
    assert rows[RESULTS].iloc[0].tolist() == rows[RESULTS].iloc[1].tolist()
    assert same(found, expected)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert len(graphs) == bool(other)


# ---- Compiled code


@pytest.mark.parametrize("name", ["apple2019", "muon with four workers", "page"])
def test_all_code_is_compiled_before_the_runs_which_it_does_not_change(name, graphs, monkeypatch, few_npz, tmp_path):
    """As on a GPU, where updates, batches and evaluation are compiled, too. C++ takes long: graphs run uncompiled."""

    def without_compiling(*arguments, original=core_program.make_runs):
        with torch._dynamo.config.patch(error_on_recompile=True):
            original(*arguments)

    @contextmanager
    def evaluating(*arguments, original=fast.evaluating):
        with torch._dynamo.config.patch(error_on_recompile=True), original(*arguments):
            yield

    monkeypatch.setattr(core_program, "make_runs", without_compiling)
    monkeypatch.setattr(fast, "evaluating", evaluating)  # also in the warm-up, which checks nothing
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(fast, "AT_ONCE", 8)  # test images: of 20, four are left
    options = [option for option in PROGRAMS[name] if option != "--no_warmup"]
    _, expected = run([*options, "--no_graph"], few_npz, tmp_path)
    rows, found = run([*options, "--no_graph"], few_npz, tmp_path, compiled="--compile")
    assert rows["compile"].tolist() == [False, True]
    for key, tensor in expected.items():
        assert torch.dist(found[key], tensor) < 1e-5 * tensor.norm(), key


@pytest.mark.parametrize(
    ("factor", "elsewhere", "failure"),
    [
        (1 + 5e-7, "", ""),
        (1.2, "", "the compiled evaluation is 20% off"),
        (1 + 5e-7, "no compiler there", "no compiler there"),
    ],
)
def test_an_evaluation_that_any_process_cannot_compile_is_not_used(factor, elsewhere, failure, monkeypatch, capsys):
    """Multiplication by a factor stands in for the compiler."""
    monkeypatch.setattr(torch, "compile", lambda eager, **_: lambda *inputs: (factor * eager(*inputs)[0], True))
    monkeypatch.setattr(Team, "gather", lambda team, key, text: [text, elsewhere])
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).double()
    images = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    precision = fast.Precision("fp64", CPU, half_weights=False)
    predict = fast.compile_evaluation(network, [images], [(images,)], lambda: None, precision, ALONE)
    assert torch.equal(predict(images), network(images)) == bool(failure)
    shown = capsys.readouterr().err
    assert shown.startswith(f"Warning: not compiled ({failure}): evaluation continues") == bool(failure)


def test_where_torch_compiles_nothing_a_launch_is_not_called_compiled(monkeypatch, capsys, few_npz, tmp_path):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rows, _ = run(PROGRAMS["apple2019"], few_npz, tmp_path, compiled="--compile")
    assert rows["compile"].tolist() == [False]
    assert "\nWarning: not compiled (torch compiled nothing" in capsys.readouterr().err


APPLE = ["-m", "large_batch_cifar_10_fast.apple2019", "--demo", *TINY]


def test_an_uncompiled_run_needs_no_folder_for_compiled_code(few_npz, tmp_path):
    result = python(*APPLE, "--data", few_npz, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR="/dev/null/folder")
    assert (result.returncode, result.stderr) == (0, "")


def test_if_the_compiler_fails_training_goes_on_with_one_warning_that_says_why(few_npz, tmp_path):
    script = 'case $1 in --version) echo g++ ;; *) echo "In a.h:\na.h:1: fatal error: no Python.h" >&2; exit 1;; esac'
    variables = {"CXX": write_program(tmp_path / "c++", script), "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    variables["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # so that it fails as late as it can
    variables["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    result = python(*APPLE, "--compile", "--data", few_npz, cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"Warning: not compiled \(.*: a.h:1: fatal error: no Python.h\): .*\n", result.stderr)
    assert re.findall(" compile=(True|False) ", result.stdout) == ["True", "False"], "what was asked for, and done"
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["compile"].tolist() == [False]
