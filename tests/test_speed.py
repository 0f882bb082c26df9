"""On a pretended GPU an epoch never waits, and CUDA graphs change only the speed. Convolutions need not transpose.

To be pretended, a GPU is a FakeTensorMode, or a CPU with graphs that repeat a step's recorded calls: the package takes
the paths of a GPU, where learning rates are tensors, SGD is fused, steps are captured and replayed.
"""

from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import pytest
import torch
from conftest import TINY, Recorder, prepared, run_here, train_prepared
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.core.images import Images, random_images
from large_batch_cifar_10_fast.core.shapes import draw_shapes
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipes import Apple2019, Basenet, FastAI, MuonRecipe, Page
from large_batch_cifar_10_fast.train import make_model, make_step, prepare

RECIPES = [
    Apple2019(workers=2, batch_size=16, ghost_batch=8, width=4),
    Basenet(width=16),
    Page(width=16),
    FastAI(width=3),
    MuonRecipe(width=4, batch_size=20, workers=2, pixels="24,32", kept="0.5"),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_weights_and_activations_are_channels_last_in_memory(recipe):
    recipe = replace(recipe, batch_size=8)
    (model, data), found = prepared(recipe, random_images(16 * recipe.workers, 1), "fp32"), {}

    def look(name: str, tensor: torch.Tensor) -> None:
        if tensor.ndim == 4:
            found[name] = tensor.is_contiguous(memory_format=torch.channels_last)

    for name, module in model.network.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: look(f"output of {name}", output))
    for name, weight in model.network.named_parameters():
        look(name, weight)
    [(images, labels)] = data.train.epoch(seed=0, epoch=1)[0].micro_batches()
    model.forward(images, labels)
    assert len(found) > 20
    assert [name for name in found if not found[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_on_a_pretended_gpu_an_epoch_neither_waits_nor_mixes_devices(monkeypatch, recipe):
    """FakeTensorMode knows shapes and devices alone: what needs a value, or tensors of two devices, raises.

    Backward would need a driver; zeros stand for its gradients.
    """
    gpu = torch.device("cuda", 0)

    class Generator:
        device = gpu

        def __init__(self, device):
            assert device == gpu

        def manual_seed(self, seed):
            return self

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "randperm", lambda n, generator, device: torch.arange(n, device=device))
    monkeypatch.setattr(torch, "randint", lambda n, size, generator, device: torch.arange(*size, device=device) % n)
    monkeypatch.setattr(torch, "rand", lambda n, generator, device: torch.ones(n, device=device))
    monkeypatch.setattr(train, "place", lambda network, precision: network)  # it is made on the GPU
    monkeypatch.setattr(train, "prepare_for_gpu", lambda optimizers: None)  # fused SGD has no fake kernel
    with FakeTensorMode(allow_non_fake_inputs=False):
        with gpu:
            model = make_model(recipe, DistContext(0, 1, gpu, recipe.workers), "fp32", min(2, recipe.workers))
        weights = [*model.network.parameters()]
        set_zero = lambda _: [setattr(weight, "grad", torch.zeros_like(weight)) for weight in weights]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "backward", set_zero)
        count = round(3 * recipe.workers * recipe.batch_size / recipe.stages[0].keep_fraction)
        data = prepare(random_images(count, 10), model, Clock(lambda: None))
        step, samples = make_step(model, data), data.train.epoch(seed=0, epoch=1)
        for sample in samples:
            step(sample)
        with pytest.raises(DataDependentOutputException):
            data.sums.tolist()
    assert len(samples) == 3
    assert not data.train.losses.requires_grad, "or a step's graph would be kept for an epoch"
    assert {tensor.device for tensor in (*weights, data.sums, *data.test)} == {gpu}


WAITING = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}  # a capture fails at what reads a value


def storages(values: object) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


class RecordedGraph(TorchDispatchMode):
    """As torch.cuda.CUDAGraph: a replay repeats the calls that a capture recorded, with their numbers, on their memory.

    What they allocate is lost between replays, as where graphs share a pool: all its bits are set, which makes NaN.
    """

    failing = WAITING

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.made, self.before = [], {}, {}

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

    def end_capture(self) -> None:
        """Undo the calls: a capture computes nothing."""
        for storage, content in self.before.values():
            storage.copy_(content)
        self.poison()

    def poison(self) -> None:
        for storage in self.made.values():
            storage.fill_(255)

    @torch.no_grad()
    def replay(self) -> None:
        self.poison()
        for func, args, kwargs, recorded, new in self.calls:
            for result, memory in zip(tree_leaves(func(*args, **kwargs)), recorded, strict=True):
                if memory is not None and storages(memory).keys() & new:
                    memory.copy_(result)
        self.poison()


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


@pytest.fixture
def graphs(monkeypatch) -> list[RecordedGraph]:
    """Let the package take a CPU for a GPU. Return a list, to which the captured graphs are appended."""
    default, captured = Stream(), []
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
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    stand_ins = {"reset_peak_memory_stats": lambda device: None, "get_device_capability": lambda gpu: (9, 0)}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Images, "pinned", lambda images: images)
    monkeypatch.setattr(DistContext, "on_gpu", True)
    monkeypatch.setattr(Team, "on_gpu", True)
    return captured


def run(recipe, *seeds, use_graphs=False, precision="fp32", micro_batches=1) -> Recorder:
    """Train in one process from these seeds, one after the other."""
    images = Images("shapes", *draw_shapes(recipe.workers * (3 * recipe.batch_size + 5), 20))
    model, data = prepared(recipe, images, precision, micro_batches)
    step, log = make_step(model, data, use_graphs), Recorder()
    for seed in seeds:
        train_prepared(model, data, seed, log, step)
    return log


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(weights[name], others[name]) for name in weights)


APPLE = {"epochs": 2, "width": 4, "batch_size": 16, "ghost_batch": 8, "ema_ep": 0.5, "workers": 4}
MUON = {"epochs": 4, "width": 4, "pixels": "12,12,16,16", "kept": "1,0.7,1,0.7", "whitening_epochs": 1}


@pytest.mark.parametrize(
    ("recipe", "count", "how"),
    [
        (Apple2019(**APPLE), 1, {}),
        (Apple2019(**APPLE, eval_stats="average"), 1, {"micro_batches": 2}),
        (MuonRecipe(**MUON, batch_size=24), 3, {"precision": "bf16"}),
        (MuonRecipe(**MUON, batch_size=8, workers=4), 3, {"micro_batches": 2}),
        (Page(epochs=2, width=16, batch_size=8), 2, {}),
        (Basenet(epochs=2, width=16, batch_size=8), 2, {}),
    ],
    ids=["apple2019", "apple2019 micro-batches", "muon bf16", "muon 4 workers", "page", "basenet"],
)
def test_runs_by_graphs_equal_runs_without_each_alone(recipe, count, how, graphs, monkeypatch):
    """Bit for bit. A CPU, where rates are numbers and SGD is not fused, rounds a little differently."""
    replayed = run(recipe, 1, 2, use_graphs=True, **how)
    assert len(graphs) == count, "one for each kind of stage and batch size"
    alone = [run(recipe, seed, **how) for seed in (1, 2)]
    assert replayed.scores == [score for log in alone for score in log.scores]
    assert all(map(same, replayed.weights, (log.weights[0] for log in alone)))
    monkeypatch.undo()
    on_cpu = run(recipe, 2, **how).weights[0]
    for name, tensor in replayed.weights[1].items():
        torch.testing.assert_close(tensor, on_cpu[name], rtol=1e-5, atol=1e-7, msg=name)


MUON_OPTIONS = ["--recipe", "muon", "--epochs", 4, "--width", 4, "--pixels", "12,12,16,16", "--kept", "1,0.7,1,0.7"]
OF_PROGRAMS = {
    "apple2019": (["--demo", *TINY], 1),
    "apple2019 micro-batches": (["--demo", *TINY, "--micro_batches", 2, "--eval_stats", "average"], 1),
    "muon bf16": ([*MUON_OPTIONS, "--batch_size", 24, "--precision", "bf16"], 3),
    "muon 4 workers": ([*MUON_OPTIONS, "--batch_size", 8, "--workers", 4, "--micro_batches", 2], 3),
}


@pytest.mark.parametrize("name", OF_PROGRAMS)
def test_runs_of_programs_by_graphs_equal_runs_without_each_alone(name, graphs, monkeypatch, tiny_npz, tmp_path):
    options, count = OF_PROGRAMS[name]
    options = ["--precision", "fp32", *options, "--data", tiny_npz, "--no_compile", "--out", tmp_path]
    run_here(*options, "--campaign", "replayed", "--runs", 2, "--seed", 1, "--save", tmp_path / "replayed.pt")
    assert len(graphs) == count, "one for each kind of step"
    run_here(*options, "--campaign", "alone", "--seed", 2, "--no_graph", "--save", tmp_path / "alone.pt")
    assert len(graphs) == count
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert rows["no_graph"].tolist() == [False, False, True]
    for column in ("train_loss", "train_accuracy", "validation_loss", "validation_count"):
        assert rows[column][1] == rows[column][2], column
    replayed, alone = (torch.load(tmp_path / f"{n}.pt", weights_only=True)["weights"] for n in ("replayed", "alone"))
    assert same(replayed, alone)


@pytest.mark.parametrize("other", ["", "no graphs there"], ids=["here", "on another process"])
def test_if_a_capture_fails_a_program_trains_without_graphs(other, graphs, monkeypatch, capsys, tiny_npz, tmp_path):
    if other:
        monkeypatch.setattr(Team, "first_failure", lambda team, key, failure: failure or other)
    else:
        monkeypatch.setattr(RecordedGraph, "failing", {"_foreach_div_"})  # once gradients are computed
    run_here("--demo", *TINY, "--data", tiny_npz, "--out", tmp_path)
    assert capsys.readouterr().err.startswith(f"Warning: no CUDA graphs ({other or 'aten._foreach_div_'}")
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["no_graph"].tolist() == [True]


def test_no_graph_is_captured_where_the_momentum_changes(graphs):
    """A graph would keep the momentum it was captured with."""
    run(FastAI(epochs=1, width=3, batch_size=2), use_graphs=True)
    assert not graphs


@pytest.mark.parametrize("other", ["", "no graphs there"], ids=["here", "on another process"])
def test_if_a_capture_fails_on_one_process_all_train_without_graphs(other, graphs, monkeypatch, capsys):
    recipe = Apple2019(**APPLE)
    expected = run(recipe, 1)
    if other:
        monkeypatch.setattr(DistContext, "all_gather_strings", lambda ctx, key, text: [text, other])
    else:
        monkeypatch.setattr(RecordedGraph, "failing", {"_foreach_div_"})  # once gradients are computed
    found = run(recipe, 1, use_graphs=True)
    assert same(found.weights[0], expected.weights[0])
    assert found.scores == expected.scores
    assert capsys.readouterr().err.startswith(f"Warning: no CUDA graphs ({other or 'aten._foreach_div_'}")
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert len(graphs) == bool(other)
