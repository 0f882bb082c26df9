"""The device's own rate and a process's age: what a step's seconds are held against."""

import os
import statistics
import time

import torch

from ..training.networks import DTYPES


def matrix_rate(precision: str, device: torch.device) -> float:
    """This device's own floating-point operations a second in a large matrix product."""
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


def seconds_since_start() -> float:
    """How long ago this process began: the interpreter and its imports."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("nan")
