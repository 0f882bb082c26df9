"""From a request to torchrun: check all that can be checked, then become `python -m torch.distributed.run`.

Nothing here imports torch, so a refusal takes a fifth of a second and a start no longer than it must.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .campaign import check_resumable, read_request
from .images import count_training_images
from .settings import Refusal, Settings, count_from
from .tables import Journal, check_out


def check_request(settings: Settings, processes: int) -> None:
    """Raise Refusal for what cannot be trained: images (fetched here if need be), outputs."""
    settings.check_processes(processes)
    check_out(settings)
    settings.check_images(count_training_images(settings.data))
    check_resumable(settings, processes)


def count_gpus() -> int:
    """CUDA's own count, which heeds CUDA_VISIBLE_DEVICES; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    working = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if working else 0


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_processes(settings: Settings, environment: Mapping[str, str], gpus: int, cores: int) -> int:
    """NPROC, or the most processes on this machine that divide the workers, one per GPU or core."""
    machines = count_from(environment, "NNODES", 1)
    places = gpus or cores
    fitting = [n for n in range(1, places + 1) if settings.workers % (n * machines) == 0]
    processes = count_from(environment, "NPROC", max(fitting, default=1))
    if gpus and processes > gpus:
        raise Refusal(f"NPROC={processes} is more than this machine's {gpus} GPUs: use at most {gpus}")
    return processes


def torchrun_arguments(environment: Mapping[str, str], processes: int) -> list[str]:
    """Where the processes meet: without any port of torchrun's own on one machine, at RDZV_ENDPOINT on several."""
    machines = count_from(environment, "NNODES", 1)
    if machines == 1:
        meeting = os.path.join(tempfile.mkdtemp(prefix="large_batch_"), "rendezvous")
        where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={meeting}",
                 "--rdzv-id=large_batch", "--local-addr=127.0.0.1"]  # fmt: skip
    else:
        endpoint, rank = environment.get("RDZV_ENDPOINT", ""), environment.get("NODE_RANK", "")
        if not rank.isdigit() or int(rank) >= machines:
            raise Refusal(f"NODE_RANK={rank} must be 0 to {machines - 1} with NNODES={machines}")
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise Refusal(f"RDZV_ENDPOINT={endpoint} must be host:port of the first machine with NNODES={machines}")
        where = ["--rdzv-backend=static", f"--nnodes={machines}", f"--node-rank={rank}",
                 f"--rdzv-endpoint={endpoint}", f"--master-addr={host}", f"--master-port={port}"]  # fmt: skip
    return [*where, f"--nproc-per-node={processes}", "-m", "large_batch_cifar_10_fast.train"]


def main() -> None:
    arguments, environment = sys.argv[1:], dict(os.environ)
    try:
        settings = read_request(arguments, environment)
        gpus, cores = count_gpus(), count_cores()
        processes = plan_processes(settings, environment, gpus, cores)
        check_request(settings, processes * count_from(environment, "NNODES", 1))
        runs = Path(settings.out) / "runs.tsv"
        if runs.exists():
            Journal(runs).close()  # only one campaign at a time may write it
        torchrun = torchrun_arguments(environment, processes)
    except Refusal as refusal:
        print(f"train_cifar_parallel.sh: {refusal}", file=sys.stderr)
        sys.exit(2)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    if count_from(environment, "NNODES", 1) == 1:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would listen on all interfaces
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *torchrun, *arguments], environment)


if __name__ == "__main__":
    main()
