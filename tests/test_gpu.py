"""What only a GPU can show. Skipped without one; every program here is started with the GPU that conftest.py hides."""

import sys

import pandas as pd
import pytest
import torch
from conftest import GPU, GPUS, TINY, launch, python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]

TRAIN = "large_batch_cifar_10_fast.train"
EPOCH_WITHOUT_WAITING = """
import torch
from large_batch_cifar_10_fast.data.cifar10 import random_images
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, warm_up
from large_batch_cifar_10_fast.distributed import init_distributed
from large_batch_cifar_10_fast.optim import follow_schedules

for recipe in (Apple2019(width=16, batch_size=64), MuonRecipe(width=16, batch_size=64, workers=8, kept="0.9")):
    with init_distributed(recipe.workers) as ctx:
        model = make_model(recipe, ctx, "fp16", compile=True)
        assert model.compiled
        warm_up(model, 5000, 100)
        data = prepare(random_images(5000, 100).pinned(), model, Clock(ctx.synchronize))
        take = make_step(model, data, use_graphs=False)
        torch.cuda.set_sync_debug_mode("error")
        steps = data.train.epoch(seed=0, epoch=1, losses=data.losses)
        for number, step in enumerate(steps, 1):
            follow_schedules(model.optimizers, number / len(steps))
            take(step)
        torch.cuda.set_sync_debug_mode("default")
"""
LITTLE_MEMORY = f"""
import sys, torch
from large_batch_cifar_10_fast.options import exit_on_config_error
from {TRAIN} import main
torch.cuda.set_per_process_memory_fraction(0.25 * 2**30 / torch.cuda.mem_get_info()[1])
with exit_on_config_error("train"):
    main(sys.argv[1:])
"""
IEEE = """
import sys, torch
from large_batch_cifar_10_fast.recipes.muon import MuonRecipe
from large_batch_cifar_10_fast.train import make_model
from large_batch_cifar_10_fast.distributed import init_distributed

with init_distributed(1) as ctx, torch.no_grad():
    network = make_model(MuonRecipe(), ctx, sys.argv[1]).network.eval()
    images = torch.randn(100, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(ctx.device)
    ours, exact = network(images).double(), network.double()(images.double())
    print(float((ours - exact).norm() / exact.norm()))
"""


def test_the_demo_passes_94_percent_compiled_in_half_precision(tmp_path):
    result = launch("--demo", cwd=tmp_path, nproc=1, **GPU)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "not compiled?"
    assert "precision=fp16" in result.stdout
    assert " compile=True " in result.stdout
    assert result.stdout.endswith("1 runs reached 0.94 out of 1\n")


def test_an_epoch_neither_waits_for_the_gpu_nor_copies_from_it(tmp_path):
    result = python("-c", EPOCH_WITHOUT_WAITING, cwd=tmp_path, **GPU)
    assert result.returncode == 0, result.stderr


def test_two_processes_on_one_gpu_equal_one_over_nccl(tiny_npz, tmp_path):
    """NCCL takes two ranks with the same GPU for a mistake unless they name different hosts."""
    options = ["--demo", *TINY, "--data", tiny_npz, "--precision", "fp64", "--no_compile"]
    alone = python("-m", TRAIN, *options, "--save", "alone.pt", cwd=tmp_path, **GPU)
    assert alone.returncode == 0, alone.stderr
    own_host = 'NCCL_HOSTID=$RANK LOCAL_RANK=0 exec "$0" "$@"'
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", 2]
    program = ["--no-python", "bash", "-c", own_host, sys.executable, "-m", TRAIN]
    both = python(*torchrun, *program, *options, "--save", "both.pt", "--out", "both", cwd=tmp_path, **GPU)
    assert both.returncode == 0, both.stderr
    assert "8 workers on 2 processes" in both.stdout
    expected = torch.load(tmp_path / "alone.pt", weights_only=True)
    for name, tensor in torch.load(tmp_path / "both.pt", weights_only=True).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def test_two_teams_share_a_gpu(tiny_npz, tmp_path):
    arguments = ["--demo", *TINY, "--no_compile", "--runs", 4, "--data", tiny_npz]
    result = launch(*arguments, cwd=tmp_path, teams=2, **GPU)
    assert (result.returncode, result.stderr) == (0, "")
    rows = pd.read_csv(tmp_path / "runs.tsv", sep="\t")
    assert sorted(rows["run"]) == [0, 1, 2, 3]
    assert rows["device"].str.fullmatch("2 teams of 1 x .*").all()


def test_too_little_memory_is_told_with_what_to_lower(tmp_path):
    options = ("--data", "synthetic", "--epochs", "3", "--ema_ep", "1", "--no_compile")
    result = python("-c", LITTLE_MEMORY, *options, cwd=tmp_path, **GPU)
    assert result.returncode == 2, result.stderr
    hint = "out of memory with 8 workers x 256 images in 1 micro-batches on cuda:0: raise --micro_batches (at most 8)"
    assert hint in result.stderr


def test_fp32_is_ieee_float32_and_tf32_is_not(tmp_path):
    capability = python("-c", "import torch; print(torch.cuda.get_device_capability() >= (8, 0))", cwd=tmp_path, **GPU)
    error = {name: float(python("-c", IEEE, name, cwd=tmp_path, **GPU).stdout) for name in ("fp32", "tf32")}
    assert error["fp32"] < 1e-5
    assert error["tf32"] > 1e-4 or capability.stdout == "False\n"


@pytest.mark.parametrize("recipe", ["basenet", "page", "fastai", "muon"])
def test_every_recipe_trains_compiled_in_half_precision(recipe, tmp_path):
    options = ["--width", 8 if recipe == "fastai" else 16, "--epochs", 2, "--data", "synthetic"]
    result = launch("--recipe", recipe, *options, cwd=tmp_path, nproc=1, **GPU)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "not compiled?"
    capability = python("-c", "import torch; print(torch.cuda.get_device_capability() >= (8, 0))", cwd=tmp_path, **GPU)
    half = "bf16" if recipe == "muon" and capability.stdout == "True\n" else "fp16"
    assert f" precision={half} " in result.stdout
    assert "nan" not in result.stdout.split("Train acc")[1]
