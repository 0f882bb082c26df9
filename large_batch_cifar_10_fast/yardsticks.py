"""What the bench holds its figures against: the device's own rate; a step's operations, its memory; a process's age."""

import os
import resource
import statistics
import time

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .network import DTYPES, Network
from .settings import GROUP


def matrix_rate(precision: str, device: torch.device) -> float:
    """This device's own floating-point operations a second in a large matrix product."""
    size = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else DTYPES[precision]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[2:])


def operations_of_a_step(network: Network, images: Tensor) -> int:
    """Floating-point operations of forward and backward: backward takes twice what forward does."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(images[:GROUP])
    return 3 * counter.get_total_flops() * len(images) // GROUP


def forget_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` tell of what follows; without CUDA it always tells of the whole life of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has had, of the GPU's memory if it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def seconds_since_start() -> float:
    """How long ago this process began: the interpreter and its imports."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("nan")
