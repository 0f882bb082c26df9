"""Compiling changes nothing but the speed, and failing at it does no harm."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from conftest import TINY, python, write_program
from test_run import Stock
from torch._inductor import config as inductor

from large_batch_cifar_10_fast import evaluate as evaluation
from large_batch_cifar_10_fast.compiling import compiled, compiled_evaluation, noise, results_of_pass
from large_batch_cifar_10_fast.core.images import random_images
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.evaluate import evaluate
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.optim import follow_schedules
from large_batch_cifar_10_fast.recipe import Model, apply_stage, make_network, reset, stage_of
from large_batch_cifar_10_fast.recipes import Apple2019, MuonRecipe
from large_batch_cifar_10_fast.core.table import read
from large_batch_cifar_10_fast.train import make_model, prepare, train_step, warm_up

pytestmark = pytest.mark.slow

ALONE = DistContext(0, 1, torch.device("cpu"), 2)
SMALL = Apple2019(workers=2, batch_size=16, ghost_batch=8, width=4)


class Short(Apple2019):
    """Each kind of block once: a compiler takes seconds for every kernel."""

    def network(self):
        network = super().network()
        network.layer2 = network.layer3 = torch.nn.Identity()
        flat = (torch.nn.MaxPool2d(16), torch.nn.Flatten())
        network.head = torch.nn.Sequential(*flat, torch.nn.Linear(2 * self.width, 10, bias=False))
        return network


def whitened(model: Model) -> Model:
    """Fresh weights of seed 1, and filters that let all colours through."""
    images = torch.randn(4, 32, 32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.recipe.whiten(model.network, images)
    reset(model.network, model.recipe, seed=1)
    return model


@inductor.patch({"cpp.vec_isa_ok": False, "compile_threads": 1})  # or torch would be imported in more processes
def test_the_compiled_network_has_the_same_gradients_and_statistics(capsys):
    """By scalar instructions: where nothing is compiled yet, as in CI, torch would try for 18 seconds which vector
    instructions there are. Whoever trains with those has each gradient checked before (compiled)."""
    recipe = Short(**asdict(SMALL))
    model = compiled(make_model(recipe, ALONE, "fp64"))
    assert model.compiled, "no compiler here?"
    assert capsys.readouterr().err == ""
    eager = make_model(recipe, ALONE, "fp64")
    batch = noise(32, 32, eager), torch.arange(32) % 10
    ours, expected = (results_of_pass(whitened(each).network, each.forward, *batch) for each in (model, eager))
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


@pytest.fixture
def without_kernels(monkeypatch):
    """Graphs are made and guarded as usual, and run uncompiled: C++ takes seconds a kernel."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize(
    ("recipe", "images", "steps"),
    [
        (MuonRecipe(width=4, batch_size=20, pixels="24,32", epochs=2, kept="1"), 20, [(20, 24), (20, 32)]),
        (Stock(batch_size=16, epochs=1), 2 * 19, [(32, 32), (6, 32)]),
    ],
    ids=["of each stage", "of a short last batch"],
)
def test_all_graphs_are_compiled_before_a_run_which_they_do_not_change(recipe, images, steps, without_kernels):
    ctx, weights = replace(ALONE, total_workers=recipe.workers), []
    for compile in (False, True):
        model = make_model(recipe, ctx, "fp64")
        model = compiled(model, images) if compile else model
        data, taken = prepare(random_images(images, 10), model, Clock(ctx.synchronize)), []
        reset(model.network, recipe, seed=0)
        follow_schedules(model.optimizers, epoch=1)
        for epoch in range(1, recipe.epochs + 1):
            apply_stage(model.network, stage_of(recipe, epoch))
            for sample in data.train.epoch(0, epoch):
                images_of_step, _ = next(sample.micro_batches())
                taken.append((len(images_of_step), images_of_step.shape[-1]))
                with torch._dynamo.config.patch(error_on_recompile=True):
                    train_step(model, data, sample)
        assert taken == steps
        weights.append([*model.network.parameters(), *model.network.buffers()])
    assert model.compiled, "no compiler here?"
    for expected, found in zip(*weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="convolutions here know no bfloat16")
@inductor.patch({"cpp.vec_isa_ok": False})
def test_compiled_for_a_cpu_nothing_is_stored_but_channels_last(monkeypatch):
    """Anything else would be copied there and back. C++ is written, not compiled: what it would compute is missing."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    network = make_network(MuonRecipe(width=9, batch_size=20), seed=0).to(memory_format=torch.channels_last)
    x = torch.randn(20, 24, 31, 31).to(memory_format=torch.channels_last)
    groups = torch.compile(torch.nn.Sequential(network.first, network.groups), dynamic=False)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            groups(x).sum().backward()

    _, codes = run_and_get_code(step)
    assert len(codes) == 2, "forward and backward"
    buffers = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\), \(([\d, ]+)\)", "".join(codes))
    larger = 0
    for layout in buffers:
        sides, steps = ([int(figure) for figure in figures.rstrip(", ").split(", ")] for figures in layout)
        if math.prod(sides) > 36 * 36 * 9:  # than all weights
            larger += 1
            assert sides[steps.index(1)] in (9, 24, 36), f"channels are not the innermost of {sides}, {steps}"
    assert larger > 15
    assert "constant_pad_nd" not in "".join(codes), "what is padded would be computed under a mask"


def test_one_graph_evaluates_all_views_of_all_stages(without_kernels, monkeypatch):
    monkeypatch.setattr(evaluation, "AT_ONCE", 3)
    recipe, generator = MuonRecipe(width=4, epochs=2), torch.Generator().manual_seed(0)
    model, sizes = whitened(make_model(recipe, ALONE, "fp64")), evaluation.chunk_sizes(7, ALONE.device)
    assert sizes == [3, 3, 1]
    compiled_model = replace(model, evaluation=compiled_evaluation(model, sizes))
    test = torch.randn(7, 32, 32, 3, generator=generator, dtype=torch.float64), torch.arange(7)
    for stage in recipe.stages:
        apply_stage(model.network, stage)
        for views in (recipe.tta_early, recipe.tta):
            expected = evaluate(model, views, test)
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = evaluate(compiled_model, views, test)
            assert (found.correct, found.loss) == (expected.correct, pytest.approx(expected.loss, rel=1e-9))


def compile_as(monkeypatch, change: Callable) -> None:
    """Let `change` stand in for the compiler: it gets and returns the results of an eager pass."""
    monkeypatch.setattr(torch, "compile", lambda eager, **_: lambda *inputs: (change(eager(*inputs)[0]), True))


@pytest.mark.parametrize(
    ("factor", "elsewhere", "failure"),
    [(1.2, "", "the compiled evaluation is 20% off"), (1 + 5e-7, "no compiler there", "no compiler there")],
)
def test_an_evaluation_that_any_process_cannot_compile_is_not_used(factor, elsewhere, failure, monkeypatch, capsys):
    compile_as(monkeypatch, lambda logits: factor * logits)
    monkeypatch.setattr(DistContext, "all_gather_strings", lambda ctx, key, text: [text, elsewhere])
    assert compiled_evaluation(whitened(make_model(SMALL, ALONE, "fp64")), [2]) is None
    assert capsys.readouterr().err.startswith(f"Warning: not compiled ({failure}): evaluation continues uncompiled; ")


def test_the_warm_up_evaluates_early_and_last_views_compiled():
    recipe, calls = MuonRecipe(width=4, batch_size=20, epochs=1, kept="1"), []
    model = make_model(recipe, replace(ALONE, total_workers=1), "fp32")
    warm_up(replace(model, evaluation=lambda images: calls.append(1) or model.network(images)), 20, 1)
    assert len(calls) == 1 + 6


def lengthen_gradient(network, made):
    def once(gradient):
        hook.remove()
        return 1.5 * gradient

    hook = network.prep[0].weight.register_hook(once)
    return made


def change_statistics(network, made, change):
    norm = network.prep[1]
    norm.batch_statistics = tuple(x * factor for x, factor in zip(norm.batch_statistics, change, strict=True))
    return made


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda _, made: made, ""),
        (lambda _, made: made._replace(loss=0 * made.loss), "gradient of prep.0.weight is 100% off"),  # as torch 2.11's
        (lambda _, made: made._replace(loss=math.nan * made.loss), "gradient of prep.0.weight is nan% off"),
        (
            lambda _, made: made._replace(loss=made.loss.detach().requires_grad_()),
            "pass has no gradient of prep.0.weight",
        ),
        (lengthen_gradient, "gradient of prep.0.weight is 50% off"),
        (lambda _, made: made._replace(loss=made.loss + 0.05 * made.loss.detach()), "loss is 5% off"),
        (lambda _, made: made._replace(losses=made.losses.roll(1)), "losses is [0-9.]+% off"),
        (lambda _, made: made._replace(sums=made.sums * torch.tensor([0, 1, 1])), "metrics is [0-9.]+% off"),
        (lambda _, made: made._replace(sums=made.sums * 2), "metrics is 100% off"),
        (partial(change_statistics, change=(0.9, 1)), "mean of norm 0 is 10% off"),
        (partial(change_statistics, change=(1, 0.9)), "variance of norm 0 is 10% off"),
    ],
)
def test_every_result_of_a_compiled_pass_is_checked(fault, message, monkeypatch, capsys):
    """A pass with the fault stands in for the compiled one."""
    model = make_model(Apple2019(workers=2, batch_size=64, ghost_batch=32, width=4), ALONE, "fp32")
    compile_as(monkeypatch, partial(fault, model.network))
    model = compiled(model)
    assert model.compiled == (not message)
    assert all(weight.grad is None for weight in model.network.parameters())
    assert re.search(f"^Warning: not compiled .the compiled {message}" if message else "^$", capsys.readouterr().err)


def test_where_torch_compiles_nothing_the_model_is_not_called_compiled(monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not compiled(make_model(SMALL, ALONE, "fp64")).compiled
    assert capsys.readouterr().err.startswith("Warning: not compiled (torch compiled nothing")


def test_an_uncompiled_run_needs_no_folder_for_compiled_code(tiny_npz, tmp_path):
    command = ["-m", "large_batch_cifar_10_fast.train", "--demo", *TINY, "--epochs", 1, "--data", tiny_npz]
    result = python(*command, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR="/dev/null/folder")
    assert (result.returncode, "Warning" in result.stderr) == (0, False), result.stderr


def test_if_the_compiler_fails_training_goes_on_with_one_warning_that_says_why(tiny_npz, tmp_path):
    script = 'case $1 in --version) echo g++ ;; *) echo "In a.h:\na.h:1: fatal error: no Python.h" >&2; exit 1;; esac'
    variables = {"CXX": write_program(tmp_path / "c++", script), "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    variables["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # so that it fails as late as it can
    variables["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    command = ["-m", "large_batch_cifar_10_fast.train", "--demo", *TINY, "--epochs", 1, "--compile", "--data", tiny_npz]
    result = python(*command, cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warning")]
    assert re.fullmatch(r"\['Warning: not compiled \(.*: a.h:1: fatal error: no Python.h\): .*'\]", str(warnings))
    assert "out of 1" in result.stdout
    shown = [line.split(" compile=")[1].split()[0] for line in result.stdout.splitlines() if " compile=" in line]
    assert shown == ["True", "False"], "what was asked for, and what was done"
    assert read(tmp_path / "runs.tsv")[0]["compile"] == "False"
