"""CUDA graphs and compiled code change only the speed, failing at them does no harm, and a run never waits for the GPU.

To be pretended, a GPU is a CPU with graphs that repeat a step's recorded calls: the programs take the paths of a GPU,
where learning rates are tensors, SGD is fused, steps are captured and replayed.
"""

import functools
import re
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from conftest import CPU, python, write_program
from functorch.compile import make_boxed_compiler
from test_programs import SMALL, rows_of, same, set_up
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.core import data, evaluation
from large_batch_cifar_10_fast.core import graphs as cuda_graphs
from large_batch_cifar_10_fast.core import machine as machines
from large_batch_cifar_10_fast.core.data import random_images
from large_batch_cifar_10_fast.core.machine import Machine
from large_batch_cifar_10_fast.core.precision import Precision
from large_batch_cifar_10_fast.core.score import Score
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.lab.program import load_program, read_command, recipe_of

pytestmark = pytest.mark.slow

RUNS = {"apple2019": 1, "muon with four workers": 3, "basenet": 2, "fastai": 0}  # kinds of steps by graphs


def trained(name, *seeds, **how):
    """Train runs in fp64. Return weights and scores of the last, and the machine."""
    run, machine = set_up(name, "fp64", **how)
    for seed in seeds:
        epochs = [*run(seed)]
    return epochs[-1].network.state_dict(), [(epoch.train, epoch.validation) for epoch in epochs], machine


@pytest.mark.parametrize("name", ["apple2019", "muon", "page", "fastai"])
def test_weights_and_activations_are_channels_last_in_memory(name):
    found = {}

    def look(what, tensor):
        if tensor.ndim == 4:
            found.setdefault(what, set()).add(tensor.is_contiguous(memory_format=torch.channels_last))

    def hook(module, inputs, output):
        if module.training:
            look(f"input of {module}", inputs[0])
            look(f"output of {module}", output)

    run, _ = set_up(name, "fp32", warm_up=False)
    with nn.modules.module.register_module_forward_hook(hook):
        epoch = next(run(seed=0))
    for key, weight in epoch.network.named_parameters():
        look(key, weight)
    assert len(found) > 20
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
    for module in (program, machines):
        monkeypatch.setattr(module, "read_score", read_score)
    monkeypatch.setattr(Precision, "autocast", lambda precision: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(data, "generator", lambda device, *key: Mock(device=device))
    for kind in ("randperm", "randint", "rand"):
        monkeypatch.setattr(torch, kind, functools.partial(draw, make=getattr(torch, kind)))
    machine = Machine(Team(0, 1, meta), "fp32", micro_batches=options.micro_batches)
    for epoch in program.train(hyp, random_images(155, 20, 10), machine)(seed=0):
        assert {tensor.device for tensor in epoch.network.state_dict().values()} == {meta}


# ---- CUDA graphs


class RecordedGraph(TorchDispatchMode):
    """As torch.cuda.CUDAGraph: a replay repeats the calls that a capture recorded, with their numbers, on their memory.

    What they allocate is lost after a replay, as where graphs share a pool: all its bits are set, which makes NaN.
    """

    failing = "aten::_local_scalar_dense"  # a capture fails at what reads a value

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.failing:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(results)))
        return results

    def reset(self):
        self.calls.clear()

    @torch.no_grad()
    def replay(self):
        allocated = []
        for func, args, kwargs, recorded in self.calls:
            allocates = all(returned.alias_info is None for returned in func._schema.returns)
            for result, memory in zip(tree_leaves(func(*args, **kwargs)), recorded, strict=True):
                if allocates and isinstance(memory, Tensor):
                    memory.copy_(result)
                    allocated.append(memory.untyped_storage())
        for storage in allocated:
            storage.fill_(255)


@pytest.fixture
def graphs(monkeypatch) -> list[RecordedGraph]:
    """Let the programs take a CPU for a GPU. Return a list, to which the captured graphs are appended."""
    captured = []

    @contextmanager
    def graph(recorder, pool, stream):
        with recorder:
            yield
        captured.append(recorder)

    for name in ("Stream", "stream", "current_stream", "default_stream", "set_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(data, "in_host_memory", lambda array, team: torch.from_numpy(np.ascontiguousarray(array)))
    monkeypatch.setattr(Team, "on_gpu", True)
    return captured


@pytest.mark.parametrize("name", RUNS)
def test_runs_by_graphs_equal_runs_without_each_alone(name, graphs, monkeypatch):
    """Bit for bit. A CPU, whose rates are numbers, rounds differently. A graph would keep fastai's first momentum."""
    replayed, scores, machine = trained(name, 1, 2, compile=False)
    assert len(graphs) == RUNS[name], "one for each kind of step"
    assert (machine.captured is not None) == (RUNS[name] > 0)
    if "muon" in name:
        assert len(graphs[1].calls) < len(graphs[0].calls), "its first bias is trained no more"
    alone, expected, machine = trained(name, 2, compile=False, graphs=False)
    assert machine.captured is None
    assert scores == expected
    assert same(replayed, alone)
    monkeypatch.undo()
    on_cpu, _, _ = trained(name, 2)
    limit = 1e-3 if "muon" in name else 1e-5  # Muon enlarges rounding
    for key, tensor in replayed.items():
        assert torch.dist(tensor, on_cpu[key]) < limit * tensor.norm(), key


def test_if_a_capture_fails_a_single_process_trains_without_graphs(graphs, monkeypatch, capsys):
    expected, _, _ = trained("apple2019", 0, compile=False, graphs=False)
    monkeypatch.setattr(RecordedGraph, "failing", "aten::_foreach_div_")  # once gradients are computed
    found, _, machine = trained("apple2019", 0, compile=False)
    assert capsys.readouterr().err.startswith("Warning: no CUDA graphs (aten._foreach_div_")
    assert machine.captured is None
    assert same(found, expected)
    torch.cuda.set_stream.assert_called_with(torch.cuda.default_stream())


def test_if_a_capture_fails_on_one_of_several_processes_all_end(graphs, monkeypatch):
    """The others have captured collectives that this one has not."""
    monkeypatch.setattr(Team, "gather", lambda team, key, text: [text, "no memory there"])
    with pytest.raises(ConfigError, match=r"^no CUDA graphs \(no memory there\): start again with --no_graph$"):
        cuda_graphs.capture_all(lambda batch: None, [(torch.zeros(1),)], Team(0, 2, CPU))


# ---- Compiled code


COMPILED = ["training", "update 0", "batches", "evaluation"]  # one after the other


@pytest.mark.parametrize(
    ("what", "wrong", "failure"),
    [
        ("training", lambda inputs, results: results.loss, "the compiled gradient of .* is 100% off"),
        ("update 0", lambda inputs, results: inputs[0][0], "the compiled gradient of weights by an update is .* off"),
        ("update 0", lambda inputs, results: inputs[2][0], "the compiled gradient of momenta by an update is .* off"),
        ("batches", lambda inputs, results: results[0], "the compiled images is 100% off"),
        ("batches", lambda inputs, results: results[1], "the compiled labels is 100% off"),
        ("evaluation", lambda inputs, results: results, "the compiled logits is 100% off"),
        ("training", None, "no compiler there"),
    ],
)
def test_a_function_that_the_compiler_breaks_is_not_used(what, wrong, failure, graphs, monkeypatch, capsys):
    """A stand-in for the compiler doubles a tensor that a function makes or changes."""
    expected, expected_scores, _ = trained("apple2019", 0, compile=False, graphs=False)
    functions = []

    def compile(function, dynamic):
        functions.append(function)

        def compiled(*inputs):
            results = function(*inputs)
            if wrong and functions.index(function) == COMPILED.index(what):
                wrong(inputs, results).mul_(2)
            return results

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    if "there" in failure:
        monkeypatch.setattr(Team, "gather", lambda team, key, text: [text, failure])
    found, scores, machine = trained("apple2019", 0, compile=True, graphs=False)
    assert machine.is_compiled == (what != "training")
    assert re.search(rf"Warning: not compiled \({failure}\): {what} continue", capsys.readouterr().err)
    assert scores == expected_scores
    assert same(found, expected)


@pytest.mark.parametrize("name", ["apple2019", "muon with four workers"])
def test_all_code_is_compiled_before_the_runs_which_it_does_not_change(name, graphs, monkeypatch, capsys):
    """As on a GPU, where updates, batches and evaluation are compiled, too. C++ takes long: graphs run uncompiled."""
    expected, _, _ = trained(name, 0, compile=False, graphs=False)
    compiled = []
    checked = []
    gradients = []  # of each backward pass

    def backward(graph, inputs):
        (returned,) = list(graph.graph.nodes)[-1].args
        gradients.append(sum(output is not None for output in returned))
        return graph

    def backend(graph, inputs):
        compiled.append(graph)
        boxed = make_boxed_compiler(lambda graph, inputs: graph)
        return aot_module_simplified(graph, inputs, fw_compiler=boxed, bw_compiler=make_boxed_compiler(backward))

    def compile_all(*arguments, original=Machine.compile_all):
        original(*arguments)
        checked.extend(compiled)

    monkeypatch.setattr(Machine, "compile_all", compile_all)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(evaluation, "AT_ONCE", 8)  # test images: of 20, four are left
    found, _, machine = trained(name, 0, compile=True, graphs=False)
    assert machine.is_compiled
    assert "Warning" not in capsys.readouterr().err
    assert len(compiled) == len(checked), "the warm-up, which checks nothing, and the run compile nothing"
    for key, tensor in found.items():
        assert torch.dist(expected[key], tensor) < 1e-5 * tensor.norm(), key
    assert len(gradients) == RUNS[name]
    if "muon" in name:  # without the whitening's bias, which only its first stage trains, that has no backward pass
        parameters = 6 + 6 + 1  # filters, biases of norms, the head
        assert gradients == [parameters + 1, parameters, parameters]


def test_if_the_compiler_fails_training_goes_on_with_one_warning_that_says_why(tiny_npz, tmp_path):
    script = 'case $1 in --version) echo g++ ;; *) echo "In a.h:\na.h:1: fatal error: no Python.h" >&2; exit 1;; esac'
    variables = {"CXX": write_program(tmp_path / "c++", script), "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    variables["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # so that it fails as late as it can
    variables |= {"TORCHDYNAMO_SUPPRESS_ERRORS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = ["-m", "large_batch_cifar_10_fast", "train", *SMALL["apple2019"], "--compile", "--data", tiny_npz]
    result = python(*command, cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"Warning: not compiled \(.*: a.h:1: fatal error: no Python.h\): .*\n", result.stderr)
    assert "\n# compile False, graphs False\n" in result.stdout
    assert rows_of(tmp_path)["compile"].tolist() == [False]
