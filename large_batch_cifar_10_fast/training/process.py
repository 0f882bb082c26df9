"""One process: its device and how fast that is, its memory, and how it ends."""

import contextlib
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..settings.ending import LAUNCH
from ..settings.settings import REFUSED, Refusal, refusals_end
from .devices import count_gpus
from .networks import DTYPES

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def take_device(device: str = "") -> torch.device:
    """Return this process's GPU, or the CPU with `--device cpu` or where there is no GPU. Raise Refusal as count_gpus.

    Teams that share GPUs take them in turn.
    """
    gpus = count_gpus(device)
    if not gpus:
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True  # shapes never change, so the fastest kernels are worth finding
    return device


def allow_tf32(allowed: bool) -> None:
    """Let convolutions and matrix products of float32 tensors use TF32 on a GPU, or not.

    PyTorch lets convolutions use it by default, so that float32 has a mantissa of 10 bits there and not of 23.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def matrix_rate(precision: str, device: torch.device) -> float:
    """This device's own floating-point operations a second in a large matrix product."""
    allow_tf32(precision == "tf32")
    size = 8192 if device.type == "cuda" else 2048
    dtype = DTYPES[precision]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[2:])


def keep_freed_memory() -> None:
    """Have the C library keep what a step frees for the next one. Blocks of hundreds of megabytes would go back to the
    system, and come back page by page, cleared: a quarter of a step's time on a CPU (docs/performance.md)."""
    with contextlib.suppress(AttributeError):  # this is glibc's; another library has its own ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)  # blocks apart from the heap
        mallopt(M_TRIM_THRESHOLD, -1)  # never


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Do this, and end the process. Under torchrun a fault is left in the file that it names, for the launcher to tell,
    and under ours a refusal, too: so it is heard once, whichever process has to refuse.

    An ordinary exit would run PyTorch's static destructors beside its threads, which aborted 5 of 90 two-process
    launches after their last line ("terminate called without ..."), and takes a while, in which others may notice.
    """
    status = 0
    try:
        with contextlib.nullcontext() if LAUNCH in os.environ else refusals_end("train_cifar_parallel.sh"):
            yield
    except SystemExit as end:
        status = end.code
    except Exception as fault:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        get_error_handler().record_exception(fault)
        status = REFUSED if isinstance(fault, Refusal) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
