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

BY_GRAPHS = "graphs True"
SMALL = {
    "apple2019": ["--demo", *TINY, "--lr_scaler", 0.1],  # at higher rates, rounding alone soon changes the weights
    "muon": ["--width=4", "--batch_size=100", "--epochs=2", "--pixels=24,32", "--kept=1,0.5"],
    "page": ["--width=16", "--batch_size=100", "--epochs=2"],  # the last batch has 43 images
}
EPOCH_WITHOUT_WAITING = """
import contextlib, sys, torch
from large_batch_cifar_10_fast.core.clock import Clock
from large_batch_cifar_10_fast.lab.conduct import run_program
from large_batch_cifar_10_fast.lab.program import load_program

timed = Clock.timed

@contextlib.contextmanager
def without_waiting(clock, part):
    with timed(clock, part):
        torch.cuda.set_sync_debug_mode("error" if part == "training" else "default")
        yield
        torch.cuda.set_sync_debug_mode("default")

Clock.timed = without_waiting
run_program(load_program(sys.argv[1]), [*sys.argv[2:], "--no_graph"])
"""
# NCCL takes two ranks with the same GPU for a mistake unless they name different hosts.
OWN_HOST = ["--no-python", "bash", "-c", 'NCCL_HOSTID=$RANK LOCAL_RANK=0 exec "$0" "$@"', sys.executable]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", 2]


def check_fast(result) -> None:
    assert result.returncode == 0, result.stderr
    assert "Warning: no" not in result.stderr, "not compiled, or no CUDA graphs"


@pytest.fixture(scope="module")
def trained(tiny_npz, tmp_path_factory):
    """Return a function that trains a small recipe, once in the same way, and returns all weights and the log."""

    @functools.cache
    def train(recipe: str, *options: object, launcher: tuple = ()) -> tuple[torch.Tensor, str]:
        folder = tmp_path_factory.mktemp(recipe)
        command = [*launcher, "-m", "large_batch_cifar_10_fast", "train", "--recipe", recipe, *SMALL[recipe], *options]
        result = python(*command, "--data", tiny_npz, "--save", "w.pt", cwd=folder, **GPU)
        check_fast(result)
        assert (BY_GRAPHS in result.stdout) == ("--no_graph" not in options)
        weights = torch.load(folder / "w.pt", weights_only=True)["weights"].values()
        return torch.cat([weight.double().flatten() for weight in weights]), result.stdout

    return train


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("recipe", "precision", "options", "tolerance"),
    [
        *((recipe, "fp64", ("--no_compile", "--no_graph", "--seed", 6), 1e-9) for recipe in SMALL),
        *((recipe, "fp64", ("--no_compile", "--runs", 2, "--seed", 5), 1e-9) for recipe in SMALL),  # then seed 6
        *((recipe, "fp64", ("--compile", "--seed", 6), 1e-9) for recipe in SMALL),
        # In half precision rounding moves weights nearly as far as training; Muon enlarges rounding in fp32, too.
        ("apple2019", "fp32", ("--compile", "--seed", 6), 5e-4),
    ],
)
def test_a_seed_gives_the_weights_of_a_single_uncompiled_run(recipe, precision, options, tolerance, trained):
    """But for rounding: cuDNN may choose other kernels in another process."""
    weights, _ = trained(recipe, "--precision", precision, *options)
    expected, _ = trained(recipe, "--precision", precision, "--no_compile", "--seed", 6)
    assert torch.dist(weights, expected) < tolerance * expected.norm()


@pytest.mark.numbers
def test_two_processes_on_one_gpu_equal_one_over_nccl(trained):
    options = ("apple2019", "--precision", "fp64", "--no_compile", "--seed", 6)
    weights, log = trained(*options, launcher=(*TORCHRUN, *OWN_HOST))
    expected, _ = trained(*options)
    assert "\n# processes 2\n" in log
    assert torch.dist(weights, expected) < 1e-9 * expected.norm()


@pytest.mark.parametrize("recipe", [*SMALL, "basenet", "fastai"])
def test_an_epoch_neither_waits_for_the_gpu_nor_copies_from_it(recipe, tiny_npz, tmp_path):
    options = SMALL.get(recipe, ["--recipe", recipe, "--width=16", "--batch_size=32"])
    how = ["--precision=fp16", "--compile" if recipe in ("apple2019", "muon") else "--no_compile"]
    command = ["-c", EPOCH_WITHOUT_WAITING, recipe, *options, *how, "--epochs=1", "--data", tiny_npz]
    check_fast(python(*command, cwd=tmp_path, **GPU))


@pytest.mark.numbers
@pytest.mark.parametrize("recipe", ["basenet", "page", "fastai", "muon"])
def test_every_recipe_learns_compiled_in_half_precision(recipe, tmp_path):
    options = ["--width", 16, "--epochs", 2, "--data", "synthetic"]
    if recipe == "fastai":  # whose rate is low at first
        options = ["--entry", "one_gpu", "--width", 8, "--epochs", 4, "--data", "synthetic"]
    result = launch("--recipe", recipe, *options, "--nproc", 1, cwd=tmp_path, **GPU)
    check_fast(result)
    assert re.search("# precision (fp|bf)16\n", result.stdout)
    assert (BY_GRAPHS in result.stdout) == (recipe != "fastai"), "whose momentum changes"
    first, *_, last = pd.read_csv(tmp_path / "epochs.tsv", sep="\t")["train_loss"]
    assert last < 0.98 * first
