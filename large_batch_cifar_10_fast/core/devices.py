"""The device of a process, names of hardware and software, and the number of cores."""

import contextlib
import glob
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from .. import ConfigError, first_line, output_of

HIDDEN = ("", "-1", "NoDevFiles")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets NoDevFiles


def count_gpus(device: str = "") -> int:
    """Return the number of GPUs, or 0 with `--device cpu`. Raise ConfigError if torch cannot use a GPU that is here."""
    if device == "cpu":
        return 0
    try:
        torch.cuda.init()
        return torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, a driver too old, a build for the CPU
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in HIDDEN
        present = glob.glob("/dev/nvidia[0-9]*") or "GPU" in output_of("nvidia-smi", "--list-gpus")
        if device == "cuda" or (present and not hidden):
            build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
            failed = f"{build} cannot use the GPUs here ({first_line(error)})"
            raise ConfigError(f"{failed}: --device cpu trains on the CPU") from error
        return 0


def text_of_file(name: str) -> str:
    """Return the text of a system file, or an empty string if it is missing."""
    with contextlib.suppress(OSError):
        return Path(name).read_text().strip()
    return ""


def take_device(device: str = "") -> torch.device:
    """Return this process's GPU. Return the CPU if there is no GPU or with `--device cpu`.

    Raise ConfigError if there are fewer GPUs than processes, unless `may_share_gpus`.
    """
    gpus = count_gpus(device)
    if not gpus:
        return torch.device("cpu")
    processes = min(int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if processes > gpus and not may_share_gpus():
        raise ConfigError(f"{processes} processes need {processes} GPUs, this machine has {gpus}: start {gpus}")
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = True  # shapes never change, so searching for the fastest kernels pays off
    return gpu


def may_share_gpus() -> bool:
    """Return whether processes of a team may share a GPU. This is for tests: times mean nothing.

    NCCL 2.30 allows it if its variable is set. Earlier versions allow it if each process looks like a separate machine.
    """
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return (asked and torch.cuda.nccl.version()[:2] >= (2, 30)) or "NCCL_HOSTID" in os.environ


def count_cores() -> int:
    """Return the number of cores that this process may use, from its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = text_of_file("/sys/fs/cgroup/cpu.max").partition(" ")
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores


# Names


def hardware_name(device: torch.device) -> str:
    """Return the model of this process's GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*: (.*\S)", text_of_file("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.machine()


def software() -> str:
    """Return the versions of Python, of torch, and of the libraries torch was built for."""
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_initialized() else ""
    libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}{nccl}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {libraries}"


def driver_and_clocks(device: torch.device) -> dict[str, str]:
    """Return a GPU's driver, clocks (SM, its maximum, memory) and power limit by nvidia-smi; "" without a GPU."""
    if device.type == "cpu":
        return {"driver": "", "clocks": ""}
    gpu: Any = torch.cuda.get_device_properties(device)  # select it by its bus: nvidia-smi has its own indices
    bus = f"--id={gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    driver, *clocks = output_of("nvidia-smi", bus, query, "--format=csv,noheader").split(", ")
    return {"driver": driver, "clocks": ", ".join(clocks)}


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: GPU memory since `reset_peak_memory_stats`, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)  # KiB on Linux
