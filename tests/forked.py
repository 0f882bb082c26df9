"""A process that trains together with others, forked from one that has imported all (see conftest)."""

import multiprocessing
import os
import sys
from pathlib import Path

import torch

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.options import exit_on_config_error

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([train.__name__, "torch._dynamo"])  # which every optimizer of torch's imports


def train_forked(arguments: list[str], environment: dict[str, str], cwd: Path, told: Path) -> None:
    """Train on one thread; what is told, by native code too, goes to stdout_RANK and stderr_RANK in `told`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = open(told / f"{name}_{environment['RANK']}", "w", buffering=1)  # noqa: SIM115 (closed with the process)
        os.dup2(file.fileno(), descriptor)
        setattr(sys, name, file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    with exit_on_config_error("train_cifar_parallel.sh"):
        train.main(arguments)
