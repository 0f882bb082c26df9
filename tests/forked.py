"""A process of a test's process group, forked from a server that has imported everything (see conftest.py)."""

import multiprocessing
import os
import sys
from pathlib import Path

import torch

from large_batch_cifar_10_fast import INVALID, ConfigError, apple2019
from large_batch_cifar_10_fast.lab.conduct import run_program
from large_batch_cifar_10_fast.lab.program import load_program, recipe_of

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
    try:
        run_program(load_program(recipe_of(arguments)), arguments)
    except ConfigError as error:
        if not error.reported:
            print(f"train: {error}", file=sys.stderr)
        sys.exit(INVALID)
