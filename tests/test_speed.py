"""CUDA graphs and compiled code change only the speed, failing at them does no harm, and a run never waits for the GPU.

To be pretended, a GPU is a CPU with graphs that repeat a step's recorded calls: the programs take the paths of a GPU,
where learning rates are tensors, SGD is fused, steps are captured and replayed.
"""

import functools
import os
import re
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import ALONE, CPU, TINY, python, run_here, write_npz, write_program
from functorch.compile import make_boxed_compiler
from test_programs import SMALL, rows_of, same, set_up
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from large_batch_cifar_10_fast import PACKAGE, ConfigError
from large_batch_cifar_10_fast.core import data, fast
from large_batch_cifar_10_fast.core.data import random_images
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.optim import NesterovSGD, nesterov_update
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import program as lab_program
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

RUNS = {"apple2019": 1, "muon with four workers": 3, "basenet": 2}  # kinds of steps


def trained(name, *seeds, **how):
    """Train runs in fp64. Return weights and scores of the last, and the machine."""
    run, machine = set_up(name, "fp64", **how)
    for seed in seeds:
        epochs = [*run(seed)]
    return epochs[-1].network.state_dict(), [(epoch.train, epoch.validation) for epoch in epochs], machine


@pytest.mark.parametrize("name", ["apple2019", "muon", "page", "fastai"])
def test_weights_gradients_and_activations_are_channels_last_in_memory(name, monkeypatch):
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
    run, _ = set_up(name, "fp32", warm_up=False)
    next(run(seed=0))
    assert len(found) > 20
    first = "whitening" if name == "muon" else ""  # gets the images: a method of muon's network is called
    assert f"input of {first}" in found
    assert [what for what in found if found[what] != {True}] == []


@pytest.mark.parametrize("name", SMALL)
def test_a_run_reads_no_value_from_its_device_and_mixes_no_devices(name, monkeypatch):
    """Tensors on "meta" have no values: a GPU would be waited for where one is read."""
    meta = torch.device("meta")

    def read_score(sums, team):
        assert sums.device == meta
        return Score(1, 1, 0.0)

    def draw(*arguments, generator, device, make):
        return make(*arguments, device=device)

    program = load_program(recipe_of(SMALL[name], "apple2019"))
    _, options, hyp = read_command(program, SMALL[name])
    monkeypatch.setattr(program, "read_score", read_score)
    monkeypatch.setattr(fast.Precision, "autocast", lambda precision: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(data, "generator", lambda device, *key: Mock(device=device))
    for kind in ("randperm", "randint", "rand"):
        monkeypatch.setattr(torch, kind, functools.partial(draw, make=getattr(torch, kind)))
    machine = Machine(Team(0, 1, meta), "fp32", micro_batches=options.micro_batches)
    for epoch in program.train(hyp, random_images(155, 20, 10), machine)(seed=0):
        assert {tensor.device for tensor in epoch.network.state_dict().values()} == {meta}


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

    def reset(self):
        self.calls.clear()

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
    monkeypatch.setattr(data, "in_host_memory", lambda array, team: torch.from_numpy(np.ascontiguousarray(array)))
    monkeypatch.setattr(Team, "on_gpu", True)
    return captured


@pytest.mark.parametrize("name", RUNS)
def test_runs_by_graphs_equal_runs_without_each_alone(name, graphs, monkeypatch):
    """Bit for bit. A CPU, whose rates are numbers, rounds differently."""
    replayed, scores, machine = trained(name, 1, 2, compile=False)
    assert machine.has_graphs
    assert len(graphs) == RUNS[name], "one for each kind of step"
    if "muon" in name:
        assert len(graphs[1].calls) < len(graphs[0].calls), "its first bias is trained no more"
    alone, expected, machine = trained(name, 2, compile=False, graphs=False)
    assert not machine.has_graphs
    assert scores == expected
    assert same(replayed, alone)
    monkeypatch.undo()
    on_cpu, _, _ = trained(name, 2)
    limit = 1e-3 if "muon" in name else 1e-5  # Muon enlarges rounding
    for key, tensor in replayed.items():
        assert torch.dist(tensor, on_cpu[key]) < limit * tensor.norm(), key


def test_no_graph_is_captured_where_the_momentum_changes(graphs, tmp_path):
    """A graph would keep the momentum it was captured with."""
    few_npz = write_npz(tmp_path / "few.npz", *draw_shapes(50, 20))
    how = ["--no_compile", "--precision", "fp32", "--data", few_npz, "--out", tmp_path]
    for name in ("fastai", "apple2019"):
        run_here(*SMALL[name], *how, "--batch_size", 8, "--campaign", name)
    assert rows_of(tmp_path)["no_graph"].tolist() == [True, False]
    assert len(graphs) == 1


def test_if_a_capture_fails_a_single_process_trains_without_graphs(graphs, monkeypatch, capsys):
    expected, expected_scores, _ = trained("apple2019", 0, compile=False, graphs=False)
    monkeypatch.setattr(RecordedGraph, "failing", {"_foreach_div_"})  # once gradients are computed
    found, scores, machine = trained("apple2019", 0, compile=False)
    assert capsys.readouterr().err.startswith("Warning: no CUDA graphs (aten._foreach_div_")
    assert not machine.has_graphs
    assert scores == expected_scores
    assert same(found, expected)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_if_a_capture_fails_on_one_of_several_processes_all_end(graphs, monkeypatch):
    """The others have captured collectives that this one has not."""
    monkeypatch.setattr(Team, "gather", lambda team, key, text: [text, "no memory there"])
    with pytest.raises(ConfigError, match=r"^no CUDA graphs \(no memory there\): start again with --no_graph$"):
        fast.graph(lambda batch: None, [(torch.zeros(1),)], lambda: None, Team(0, 2, CPU))


@pytest.mark.parametrize("recipe", ["apple2019", "failing.py"])
def test_graphs_are_freed_before_the_process_group_ends(recipe, graphs, monkeypatch, tiny_npz, tmp_path):
    """Also if a program fails: one that holds a collective would let its end wait for ever."""
    ended = []
    monkeypatch.setattr(fast.CudaGraphs, "reset", lambda self: ended.append("graphs"))

    @contextmanager
    def join_team(*arguments, original=lab_program.join_team):
        with original(*arguments) as team:
            try:
                yield team
            finally:
                ended.append("process group")

    monkeypatch.setattr(lab_program, "join_team", join_team)
    failing = (PACKAGE / "apple2019.py").read_text().replace("machine.restart(model, seed)", "raise ArithmeticError")
    (tmp_path / "failing.py").write_text(failing)
    words = ["--recipe", tmp_path / recipe if recipe.endswith(".py") else recipe, *TINY, "--no_compile"]
    words += ["--precision", "fp32", "--data", tiny_npz, "--out", tmp_path / "out"]
    with pytest.raises(ArithmeticError) if recipe.endswith(".py") else nullcontext():
        run_here(*words)
    assert ended == ["graphs", "process group"]


# ---- Compiled code


def compiled_by(monkeypatch, stand_in):
    """Return an optimizer of a small network after compile_updates. `stand_in` compiles."""
    network = nn.Linear(4, 3, bias=False).double()
    optimizer = NesterovSGD([{"params": [*network.parameters()]}], momentum=0.9)
    monkeypatch.setattr(torch, "compile", stand_in)
    precision = fast.Precision("fp64", CPU, half_weights=False)
    x = torch.randn(5, 4, dtype=torch.float64)
    fast.compile_updates([optimizer], lambda: network(x).square().sum().backward(), precision, ALONE)
    return optimizer


def test_an_update_that_the_compiler_breaks_is_not_used(monkeypatch, capsys):
    optimizer = compiled_by(monkeypatch, lambda update, **_: lambda *tensors: None)
    assert optimizer.update is nesterov_update
    assert "not compiled (the compiled gradient of weights by an update is 100% off)" in capsys.readouterr().err
    optimizer = compiled_by(monkeypatch, lambda update, **_: lambda *tensors: update(*tensors))
    assert optimizer.update is not nesterov_update
    (weight,) = optimizer.param_groups[0]["params"]
    assert not optimizer.state[weight]["momentum_buffer"].any(), "the check leaves no trace"
    assert capsys.readouterr().err == ""


def test_a_batch_that_the_compiler_breaks_is_not_used(monkeypatch, capsys):
    def broken(function, **_):
        def call(*inputs):
            (images, labels), _ = function(*inputs)
            return (images, labels + 1), True

        return call

    monkeypatch.setattr(torch, "compile", broken)
    noise = SimpleNamespace(images=torch.rand(6, 2).double(), labels=torch.arange(6))

    def make_batch(images, labels, batch):
        return images[batch[0]], labels[batch[0]]

    precision = fast.Precision("fp64", CPU, half_weights=False)
    found = fast.compile_batches(make_batch, [(torch.tensor([[0, 4, 2]]),)], noise, 1, precision, ALONE)
    assert found is make_batch
    assert "Warning: not compiled (the compiled labels is" in capsys.readouterr().err


def test_one_process_of_a_machine_compiles_before_the_others(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_RANK", "1")  # of the second; the first is rank 0
    order = []

    def compile_on(rank):
        with Team(rank, 2, CPU, store=store).after_first_here("key"):
            time.sleep(0.2 * (1 - rank))
            order.append(rank)

    second = threading.Thread(target=compile_on, args=(1,))
    second.start()
    compile_on(0)
    second.join()
    assert order == [0, 1]


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


@pytest.mark.parametrize("name", ["apple2019", "muon with four workers"])
def test_all_code_is_compiled_before_the_runs_which_it_does_not_change(name, graphs, monkeypatch):
    """As on a GPU, where updates, batches and evaluation are compiled, too. C++ takes long: graphs run uncompiled."""
    outputs = []

    @contextmanager
    def evaluating(*arguments, original=fast.evaluating):
        with torch._dynamo.config.patch(error_on_recompile=True), original(*arguments):
            yield

    expected, _, _ = trained(name, 0, compile=False, graphs=False)
    monkeypatch.setattr(fast, "evaluating", evaluating)  # also in the warm-up, which checks nothing
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting(outputs)))
    monkeypatch.setattr(fast, "AT_ONCE", 8)  # test images: of 20, four are left
    run, machine = set_up(name, "fp64", compile=True, graphs=False)
    assert machine.is_compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        *_, last = run(seed=0)
    for key, tensor in last.network.state_dict().items():
        assert torch.dist(expected[key], tensor) < 1e-5 * tensor.norm(), key
    assert len(outputs) == RUNS[name]
    if "muon" in name:  # without the whitening's bias, which only its first stage trains, that has no backward pass
        parameters = 6 + 6 + 1  # filters, biases of norms, the head
        assert outputs == [parameters + 1, parameters, parameters]


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


def test_where_torch_compiles_nothing_a_launch_is_not_called_compiled(monkeypatch, capsys, tiny_npz, tmp_path):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run_here(*SMALL["apple2019"], "--compile", "--precision", "fp32", "--data", tiny_npz, "--out", tmp_path)
    assert rows_of(tmp_path)["compile"].tolist() == [False]
    assert "\nWarning: not compiled (torch compiled nothing" in capsys.readouterr().err


def test_a_folder_for_compiled_code_that_cannot_be_made_is_replaced(monkeypatch):
    """When the package is imported: torch ends uncompiled runs without it, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/folder")
    assert "'/dev/null/folder'" in fast.replace_cache_folder()
    assert "/dev/null" not in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert fast.replace_cache_folder() == ""


def test_if_the_compiler_fails_training_goes_on_with_one_warning_that_says_why(tiny_npz, tmp_path):
    script = 'case $1 in --version) echo g++ ;; *) echo "In a.h:\na.h:1: fatal error: no Python.h" >&2; exit 1;; esac'
    variables = {"CXX": write_program(tmp_path / "c++", script), "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    variables["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # so that it fails as late as it can
    variables |= {"TORCHDYNAMO_SUPPRESS_ERRORS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [
        "-m",
        "large_batch_cifar_10_fast.apple2019",
        "--demo",
        *TINY,
        "--batch_size",
        8,
        "--workers",
        2,
        "--epochs",
        1,
    ]
    result = python(*command, "--compile", "--data", tiny_npz, cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"Warning: not compiled \(.*: a.h:1: fatal error: no Python.h\): .*\n", result.stderr)
    assert "\n# compile False, graphs False\n" in result.stdout
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["compile"].tolist() == [False]
