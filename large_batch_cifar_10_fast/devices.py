"""The devices that torch can use, and a clear error where it cannot use the GPUs of this machine."""

import contextlib
import glob
import os
import re
import statistics
import subprocess
import timeit
import warnings
from collections.abc import Iterable, Iterator
from functools import cache

import torch

from .cpu import keep_freed_memory
from .options import ConfigError, first_line

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}
TESTED = "torch 2.10.0 and torchvision 0.25.0"
DEFAULT_BUILD = f"{TESTED} from PyPI (CUDA 12.8, compute capability 7.0 to 12.0, drivers from 525 on)"
OLDER_BUILD = f"{TESTED} from https://download.pytorch.org/whl/cu126 (compute capability 5.0 to 9.0)"
HIDDEN = ("", "-1", "NoDevFiles")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs; the last is Slurm's
ON_CPU = "--device cpu trains on the CPU"


def count_gpus(device: str = "") -> int:
    """Return the number of GPUs that torch (not NVML) can use; 0 with `--device cpu`. Raise ConfigError."""
    if device == "cpu":
        return 0
    try:
        with warnings.catch_warnings(action="ignore"):  # of a GPU without kernels: check_kernels raises an error
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, a driver too old, a build for the CPU
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in HIDDEN
        present = glob.glob("/dev/nvidia[0-9]*") or "GPU" in output_of("nvidia-smi", "--list-gpus")
        if present and not hidden:
            build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
            driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
            reason = f"driver {first_line(driver)}, {first_line(error).partition('. ')[0]}"
            advice = f"check CUDA_VISIBLE_DEVICES and nvidia-smi, install a newer driver, or {DEFAULT_BUILD}; {ON_CPU}"
            raise ConfigError(f"{build} cannot use the NVIDIA GPUs here ({reason}): {advice}") from error
        if device == "cuda":
            raise ConfigError(f"--device cuda: no GPU here, or CUDA_VISIBLE_DEVICES hides it; {ON_CPU}") from error
        return 0
    for index in range(torch.cuda.device_count()):
        check_kernels(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    return torch.cuda.device_count()


def check_kernels(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a GPU that this torch has no kernels for."""
    built = torch.cuda.get_arch_list()
    if not torch.version.cuda or has_kernels(capability, built):  # ROCm names its architectures otherwise
        return
    advice = OLDER_BUILD if capability < (7, 0) else "a newer torch"
    if capability[0] in (7, 8, 9, 10, 12):
        advice = DEFAULT_BUILD
    here, there = f"compute capability {capability[0]}.{capability[1]}", f"torch {torch.__version__}"
    raise ConfigError(f"{name} has {here}, but {there} is built for {' '.join(built)} only: install {advice}; {ON_CPU}")


def has_kernels(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Return whether code for these architectures runs on a GPU: binaries (sm_80) on the same major version from their
    minor version on, PTX (compute_90) on all newer GPUs."""
    codes = [(kind, divmod(int(n), 10)) for kind, n in re.findall(r"(sm|compute)_(\d+)", " ".join(built))]
    return any(code <= capability and (kind == "compute" or code[0] == capability[0]) for kind, code in codes)


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return ""


def take_device(device: str = "", team: int = 0) -> torch.device:
    """Return this process's GPU, or the CPU where there is none or with `--device cpu`. Raise ConfigError.

    Each team has GPUs of its own; processes share GPUs where there are too few.
    """
    gpus = count_gpus(device)
    if not gpus:
        keep_freed_memory()
        return torch.device("cpu")
    first = team * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.device("cuda", (first + int(os.environ.get("LOCAL_RANK", 0))) % gpus)
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = True  # shapes never change, so the fastest kernels are worth finding
    return gpu


def allow_tf32(allowed: bool) -> None:
    """Let float32 convolutions and matrix products use TF32 on a GPU, or not. By default convolutions do."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # with which torch.compile recommends them


NO_MEMORY = ("allocate memory", "ALLOC_FAILED")  # in torch's errors on a CPU, and on a GPU from cuBLAS and cuDNN


@contextlib.contextmanager
def out_of_memory_hint(doing: str, load: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a ConfigError that names what was done, and what to change."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise ConfigError(f"{doing} ran out of memory with {load} on {device}: {advice}") from error


def matrix_rate(precision: str, device: torch.device) -> float:
    """Return this device's floating-point operations a second in a large matrix product."""
    allow_tf32(precision == "tf32")
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))

    def multiply() -> None:
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / statistics.median(timeit.repeat(multiply, number=1, repeat=7)[2:])


@cache
def gains_by_bf16() -> bool:
    """Return whether this CPU multiplies faster in bfloat16; some have slow instructions for it."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: another torch may lack them
    if not any(getattr(torch.cpu, name, bool)() for name in checks):
        return False
    half, single = (matrix_rate(precision, torch.device("cpu")) for precision in ("bf16", "fp32"))
    return half > 1.25 * single  # rates on a busy machine vary by some tens of percent


def count_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    v1 = (f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us" for name in ("quota", "period"))
    quota, period, *_ = (output_of("cat", "/sys/fs/cgroup/cpu.max") or output_of("cat", *v1) or "max 1").split()
    return cores if quota in ("max", "-1") else max(1, min(cores, int(quota) // int(period)))
