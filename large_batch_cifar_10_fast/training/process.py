"""One process: its device and how fast that is, its memory, and how it ends."""

import contextlib
import ctypes
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Iterator

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..settings.ending import LAUNCH
from ..settings.settings import REFUSED, Refusal, refusals_end
from .devices import count_gpus
from .networks import DTYPES

LOST = 3  # seconds in which torchrun finds the process that was lost: its end is the cause, this one's follows
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def take_device(device: str = "") -> torch.device:
    """Return this process's GPU; the CPU where there is none, or with `--device cpu`. Raise Refusal as count_gpus."""
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
    """Run the body, then end the process. Under torchrun leave an exception in the file that the launcher reads.

    torchrun's children end by os._exit: an ordinary exit runs PyTorch's static destructors beside its threads, which
    aborted 5 of 90 launches of two processes after their last line.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with refusals_end("train"):
            yield
        return
    status = 0
    try:
        with contextlib.nullcontext() if LAUNCH in os.environ else refusals_end("train"):
            yield
    except SystemExit as end:
        status = end.code
    except Exception as fault:
        if re.search("connection|remote process", str(fault), re.IGNORECASE):
            time.sleep(LOST)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(fault)
        else:
            traceback.print_exc()
        status = REFUSED if isinstance(fault, Refusal) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
