"""A process of a test's process group, forked from a server that has imported everything (see conftest.py)."""

import multiprocessing
import os
from pathlib import Path

import torch

from large_batch_cifar_10_fast import apple2019, exit_on_config_error
from large_batch_cifar_10_fast.core import program

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([apple2019.__name__, "torch._dynamo"])  # every optimizer of torch imports the latter


def train_forked(arguments: list[str], environment: dict[str, str], cwd: Path, output: Path) -> None:
    """Train on one thread. STDOUT and STDERR, also of native code, go to stdout_RANK and stderr_RANK in `output`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / f"{name}_{environment['RANK']}", os.O_CREAT | os.O_WRONLY), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    with exit_on_config_error("train_cifar_parallel.sh"):
        program.run_program(program.load_program(program.recipe_of(arguments, "apple2019")), arguments)
