"""What only a GPU can show. Skipped without one; every program here is started with the GPU that conftest.py hides.

Tests of `numbers` look at what the GPU computed: a simulated one, which computes nothing, takes -m "not numbers".
"""

import functools
import re
import sys

import pandas as pd
import pytest
import torch
from conftest import GPU, GPUS, TINY, launch, python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]

TRAIN = "large_batch_cifar_10_fast.train"
ONE_GRAPH = "graphs=True"
IMPORTS = f"""
import sys, torch
from large_batch_cifar_10_fast.compiling import compiled
from large_batch_cifar_10_fast.core.images import random_images
from large_batch_cifar_10_fast.distributed import init_distributed
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.optim import follow_schedules
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from {TRAIN} import make_model, make_step, prepare, warm_up
"""
EPOCH_WITHOUT_WAITING = """
muon = MuonRecipe(width=16, batch_size=64, workers=8, kept="0.9", pixels="24", whitening_epochs=9)
for recipe in (Apple2019(width=16, batch_size=64), muon):
    with init_distributed(recipe.workers) as ctx:
        model = compiled(make_model(recipe, ctx, "fp16"))
        warm_up(model, 5000, 100)
        data = prepare(random_images(5000, 100).pinned(), model, Clock(ctx.synchronize))
        step = make_step(model, data, use_graphs=False)
        torch.cuda.set_sync_debug_mode("error")
        samples = data.train.epoch(seed=0, epoch=1)
        for number, sample in enumerate(samples, 1):
            follow_schedules(model.optimizers, number / len(samples))
            step(sample)
        torch.cuda.set_sync_debug_mode("default")
"""
ERRORS = """
with init_distributed() as ctx:
    make_model(MuonRecipe(), ctx, sys.argv[1])
    print(torch.cuda.get_device_capability()[0])
    x, filters = (torch.randn(128, 256, side, side, device=ctx.device) for side in (16, 3))
    for multiply, a, b in ((torch.conv2d, x, filters), (torch.matmul, x.flatten(2), x.flatten(2))):
        exact = multiply(a.double(), b.double())
        print(float((multiply(a, b) - exact).norm() / exact.norm()))
"""
SMALL = {
    "apple2019": ["--demo", *TINY, "--lr_scaler", 0.1],  # at higher rates, rounding alone soon changes the weights
    "muon": ["--recipe=muon", "--width=4", "--batch_size=100", "--epochs=2", "--pixels=24,32", "--kept=1,0.5"],
}
# NCCL takes two ranks with the same GPU for a mistake unless they name different hosts.
OWN_HOST = ["--no-python", "bash", "-c", 'NCCL_HOSTID=$RANK LOCAL_RANK=0 exec "$0" "$@"', sys.executable]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", 2]


@pytest.fixture(scope="module")
def trained(tiny_npz, tmp_path_factory):
    """Return a function that trains a small recipe, once in the same way, and returns all weights and the log."""

    @functools.cache
    def train(recipe: str, *options: object, program: tuple = ()) -> tuple[torch.Tensor, str]:
        command = [*program, "-m", TRAIN, *SMALL[recipe], "--data", tiny_npz, "--seed", 6, "--save", "w.pt", *options]
        result = python(*command, cwd=(folder := tmp_path_factory.mktemp(recipe)), **GPU)
        assert result.returncode == 0, result.stderr
        assert "Warning: no" not in result.stderr, "not compiled, or no CUDA graphs"
        assert (ONE_GRAPH in result.stdout) == ("--no_graph" not in options)
        weights = torch.load(folder / "w.pt", weights_only=True)["weights"].values()
        return torch.cat([weight.double().flatten() for weight in weights]), result.stdout

    return train


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("recipe", "precision", "options", "tolerance"),
    [
        *((recipe, "fp64", ("--no_compile", "--no_graph"), 1e-9) for recipe in SMALL),
        *((recipe, "fp64", ("--no_compile", "--runs", 2, "--seed", 5), 1e-9) for recipe in SMALL),  # then seed 6
        *((recipe, "fp64", ("--compile",), 1e-9) for recipe in SMALL),
        # In half precision rounding moves weights nearly as far as training; Muon enlarges rounding in fp32, too.
        ("apple2019", "fp32", ("--compile",), 5e-4),
    ],
)
def test_a_seed_gives_the_weights_of_a_single_uncompiled_run(recipe, precision, options, tolerance, trained):
    """But for rounding: cuDNN may choose other kernels in another process."""
    weights, expected = (trained(recipe, "--precision", precision, *o)[0] for o in (options, ("--no_compile",)))
    assert torch.dist(weights, expected) < tolerance * expected.norm()


@pytest.mark.numbers
def test_two_processes_on_one_gpu_equal_one_over_nccl(trained):
    options = ("apple2019", "--precision", "fp64", "--no_compile")
    (weights, log), (expected, _) = trained(*options, program=(*TORCHRUN, *OWN_HOST)), trained(*options)
    assert "8 workers on 2 processes" in log
    assert torch.dist(weights, expected) < 1e-9 * expected.norm()


def test_an_epoch_neither_waits_for_the_gpu_nor_copies_from_it(tmp_path):
    result = python("-c", IMPORTS + EPOCH_WITHOUT_WAITING, cwd=tmp_path, **GPU)
    assert result.returncode == 0, result.stderr


def test_two_teams_share_a_gpu(tiny_npz, tmp_path):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", 4, "--data", tiny_npz]
    result = launch(*arguments, "--teams", 2, cwd=tmp_path, **GPU)
    assert (result.returncode, result.stderr) == (0, "")
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert sorted(rows["run"]) == [0, 1, 2, 3]
    assert rows["device"].str.fullmatch("2 teams of 1 x .*").all()


@pytest.mark.numbers
def test_fp32_is_ieee_float32_and_tf32_is_not(tmp_path):
    """By the errors of a convolution and of a matrix product."""
    outputs = [python("-c", IMPORTS + ERRORS, name, cwd=tmp_path, **GPU).stdout for name in ("fp32", "tf32")]
    (major, *fp32), (_, *tf32) = ([float(number) for number in output.split()] for output in outputs)
    assert max(fp32) < 1e-5
    assert min(tf32) > 1e-4 or major < 8, "which has no TF32"


@pytest.mark.numbers
@pytest.mark.parametrize("recipe", ["basenet", "page", "fastai", "muon"])
def test_every_recipe_learns_compiled_in_half_precision(recipe, tmp_path):
    options = ["--width", 16, "--epochs", 2, "--data", "synthetic"]
    if recipe == "fastai":  # whose rate is low at first
        options = ["--entry", "one_gpu", "--width", 8, "--epochs", 4, "--data", "synthetic"]
    result = launch("--recipe", recipe, *options, "--nproc", 1, cwd=tmp_path, **GPU)
    assert (result.returncode, result.stderr) == (0, ""), "not compiled?"
    assert re.search(" precision=(fp|bf)16 ", result.stdout)
    assert (ONE_GRAPH in result.stdout) == (recipe != "fastai"), "whose momentum changes"
    first, *_, last = pd.read_csv(tmp_path / "epochs.tsv", sep="\t")["train_loss"]
    assert last < 0.98 * first


@pytest.mark.numbers
def test_the_demo_passes_94_percent_compiled_in_half_precision(tmp_path):
    result = launch("--demo", "--precision", "fp16", "--compile", "--nproc", 1, cwd=tmp_path, **GPU)
    assert (result.returncode, result.stderr) == (0, ""), "not compiled?"
    assert "precision=fp16" in result.stdout
    assert " compile=True " in result.stdout
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")
