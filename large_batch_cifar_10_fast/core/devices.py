"""The device of a process and its capabilities, names of hardware and software, and the number of cores."""

import contextlib
import ctypes
import glob
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import ConfigError, first_line, output_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}
HIDDEN = ("", "-1", "NoDevFiles")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets NoDevFiles


def count_gpus(device: str = "") -> int:
    """Return the number of GPUs, or 0 with `--device cpu`. Raise ConfigError if torch cannot use a GPU that is here."""
    if device == "cpu":
        return 0
    try:
        with warnings.catch_warnings(action="ignore"):  # a GPU without kernels raises an error below
            torch.cuda.init()
        built = torch.cuda.get_arch_list()
        count = torch.cuda.device_count()
        for index in range(count if torch.version.cuda else 0):  # ROCm names architectures differently
            if not has_kernels(torch.cuda.get_device_capability(index), built):
                name = torch.cuda.get_device_name(index)
                raise RuntimeError(f"torch has kernels for {' '.join(built)}, not for {name}")
        return count
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, a driver too old, a build for the CPU
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in HIDDEN
        present = glob.glob("/dev/nvidia[0-9]*") or "GPU" in output_of("nvidia-smi", "--list-gpus")
        if device == "cuda" or (present and not hidden):
            build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
            failed = f"{build} cannot use the GPUs here ({first_line(error)})"
            raise ConfigError(f"{failed}: --device cpu trains on the CPU") from error
        return 0


def has_kernels(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Return whether code built for these architectures runs on a GPU.

    Binaries (sm_80) run on GPUs of the same major version and an equal or later minor version. PTX (compute_90) runs on
    all equal or later GPUs.
    """
    codes = [(kind, divmod(int(n), 10)) for kind, n in re.findall(r"(sm|compute)_(\d+)", " ".join(built))]
    return any(code <= capability and (kind == "compute" or code[0] == capability[0]) for kind, code in codes)


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


def keep_freed_memory() -> None:
    """Let glibc keep freed memory. Otherwise the system clears large blocks again, which takes a quarter of a step."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: allocate all blocks on the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the end of the heap


def allow_tf32(allowed: bool) -> None:
    """Set whether float32 convolutions and matrix products on a GPU use TF32. By default only convolutions do."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # torch.compile recommends them


@contextlib.contextmanager
def ieee_float32() -> Iterator[None]:
    """Run the body without TF32. By default, torch computes float32 convolutions on a GPU in TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    allow_tf32(False)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


NO_MEMORY = ("allocate memory", "ALLOC_FAILED")  # in torch's errors on a CPU, and on a GPU from cuBLAS and cuDNN

LESS_MEMORY = {
    "training": "use --no_graph, a smaller --batch_size or --width or, with several workers, more --micro_batches",
    "evaluation": "end other programs that use it, use a --precision of fewer bits, or a smaller --width",
}


@contextlib.contextmanager
def out_of_memory_hint(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a ConfigError that names the activity and the options to change."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise ConfigError(f"{doing} ran out of memory: {LESS_MEMORY[doing]}") from error


def has_bf16(gpu: torch.device) -> bool:
    """Return whether a GPU computes in bfloat16 and TF32."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def is_fast_in_bf16() -> bool:
    """Return whether this CPU multiplies faster in bfloat16: with AMX, or as an AMD CPU with AVX-512 bf16.

    On an Intel Xeon with AVX-512 alone, the earlier `muon` takes 1.4 times as long in bf16 (docs/performance.md).
    """
    facts = text_of_file("/proc/cpuinfo")
    return "amx_bf16" in facts or ("avx512_bf16" in facts and "AuthenticAMD" in facts)


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
    """Return a GPU's driver and clocks from nvidia-smi; empty strings without a GPU."""
    if device.type == "cpu":
        return {"driver": "", "clocks": ""}
    gpu: Any = torch.cuda.get_device_properties(device)  # select it by its bus: nvidia-smi has its own indices
    bus = f"--id={gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    driver, *clocks = output_of("nvidia-smi", bus, query, "--format=csv,noheader").split(", ")
    form = "SM {} (at most {}), memory {}, power limit {}"
    return {"driver": driver, "clocks": form.format(*clocks) if clocks else ""}


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: GPU memory since `reset_peak_memory_stats`, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)  # KiB on Linux
