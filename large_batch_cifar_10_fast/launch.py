"""From a request to torchrun: check all that can be checked, then be `torchrun` for the processes that train."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import run as torchrun

from .request.advice import count_cores
from .request.checks import check_request
from .request.command_line import read_request
from .results.tables import Journal
from .settings.settings import Refusal, count_from, refusals_end
from .training.recipe import Recipe


def plan_processes(recipe: Recipe, environment: Mapping[str, str], gpus: int, cores: int) -> int:
    """NPROC, or the most processes on this machine that divide the workers, one per GPU or core."""
    machines = count_from(environment, "NNODES", 1)
    places = gpus or cores
    fitting = [n for n in range(1, places + 1) if recipe.workers % (n * machines) == 0]
    processes = count_from(environment, "NPROC", max(fitting, default=1))
    if gpus and processes > gpus:
        raise Refusal(f"NPROC={processes} is more than this machine's {gpus} GPUs: use at most {gpus}")
    return processes


def torchrun_arguments(environment: Mapping[str, str], processes: int) -> list[str]:
    """Where the processes meet: without any port of torchrun's own on one machine, at RDZV_ENDPOINT on several."""
    machines = count_from(environment, "NNODES", 1)
    if machines == 1:
        meeting = os.path.join(tempfile.mkdtemp(prefix="large_batch_"), "rendezvous")
        where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={meeting}"]
        where += ["--rdzv-id=large_batch", "--local-addr=127.0.0.1"]
    else:
        endpoint, rank = environment.get("RDZV_ENDPOINT", ""), environment.get("NODE_RANK", "")
        if not rank.isdigit() or int(rank) >= machines:
            raise Refusal(f"NODE_RANK={rank} must be 0 to {machines - 1} with NNODES={machines}")
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise Refusal(f"RDZV_ENDPOINT={endpoint} must be host:port of the first machine with NNODES={machines}")
        where = ["--rdzv-backend=static", f"--nnodes={machines}", f"--node-rank={rank}"]
        where += [f"--rdzv-endpoint={endpoint}", f"--master-addr={host}", f"--master-port={port}"]
    return [*where, f"--nproc-per-node={processes}", "-m", "large_batch_cifar_10_fast.train"]


def prepare_launch(arguments: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """What torchrun is told, and the variables it is to run with; raises Refusal."""
    settings, recipe = read_request(arguments, environment)
    machines, gpus, cores = count_from(environment, "NNODES", 1), torch.cuda.device_count(), count_cores()
    processes = plan_processes(recipe, environment, gpus, cores)
    check_request(settings, recipe, processes * machines)
    runs = Path(settings.out) / "runs.tsv"
    if runs.exists():
        Journal(runs).close()  # only one campaign at a time may write it
    variables = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, cores // processes)))}
    if machines == 1:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would listen on all interfaces
    return [*torchrun_arguments(environment, processes), *arguments], variables


def main() -> None:
    with refusals_end("train_cifar_parallel.sh"):
        arguments, variables = prepare_launch(sys.argv[1:], os.environ)
    os.environ.update(variables)
    torchrun.main(arguments)


if __name__ == "__main__":
    main()
