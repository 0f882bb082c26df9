"""The devices that torch can use, and a clear error where it cannot use the GPUs of this machine."""

import contextlib
import glob
import os
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from .cpu import keep_freed_memory
from .options import ConfigError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}
TESTED = "torch 2.10.0 and torchvision 0.25.0"
DEFAULT_BUILD = f"{TESTED} from PyPI (CUDA 12.8, compute capability 7.0 to 12.0, drivers from 525 on)"
OLDER_BUILD = f"{TESTED} from https://download.pytorch.org/whl/cu126 (compute capability 5.0 to 9.0)"
MINIMUM_DRIVER = {12: 525, 13: 580}  # by CUDA's major version (NVIDIA's table of minor version compatibility)
HIDDEN = ("", "-1", "NoDevFiles")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs; the last is Slurm's
ON_CPU = "--device cpu trains on the CPU"
BF16_FROM = (8, 0)  # the least compute capability with bfloat16 and TF32


def count_gpus(device: str = "") -> int:
    """Return the number of GPUs to train on: 0 with `--device cpu`, or where there are none.

    It is the number that torch can use, under CUDA_VISIBLE_DEVICES and MIG; NVML may list others. Raise ConfigError
    where torch cannot use the GPUs that are there, and with `--device cuda` where there are none.
    """
    if device == "cpu":
        return 0
    try:
        with warnings.catch_warnings(action="ignore"):  # of an old GPU, in eleven lines: check_kernels has one
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, a driver too old, a build for the CPU
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in HIDDEN
        if has_nvidia_devices() and not hidden:
            reason = str(error).strip().splitlines()[0].partition(". ")[0]
            raise ConfigError(f"{unusable(torch.version.cuda, driver_version(), reason)}; {ON_CPU}") from error
        if device == "cuda":
            raise ConfigError(
                f"--device cuda: there is no GPU here, or CUDA_VISIBLE_DEVICES hides it; {ON_CPU}"
            ) from error
        return 0
    for index in range(torch.cuda.device_count()):
        check_kernels(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    return torch.cuda.device_count()


def has_nvidia_devices() -> bool:
    """Return whether the system shows NVIDIA GPUs, whatever torch makes of them."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or "GPU" in output_of("nvidia-smi", "--list-gpus")


def unusable(cuda: str | None, driver: str, reason: str) -> str:
    """Return what keeps torch, built for this CUDA, from using the GPUs, and what to install or set."""
    build, major = f"CUDA {cuda}" if cuda else "a build for the CPU", int((cuda or "0").split(".")[0])
    needed, visible = MINIMUM_DRIVER.get(major, 0), os.environ.get("CUDA_VISIBLE_DEVICES")
    found = int(re.match(r"\d*", driver)[0] or needed)
    if not cuda:
        advice = f"install {DEFAULT_BUILD}"
    elif MINIMUM_DRIVER[12] <= found < needed:
        advice = f"install a driver from {needed} on, or {DEFAULT_BUILD}"
    elif found < needed:
        advice = f"install a driver from {needed} on"
    elif visible is not None:
        advice = f"correct CUDA_VISIBLE_DEVICES={visible}"
    else:
        advice = "check that nvidia-smi works, and that this user may open /dev/nvidia*"
    return f"torch {torch.__version__} ({build}) cannot use the NVIDIA GPUs here, driver {driver} ({reason}): {advice}"


def check_kernels(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a GPU that this torch has no kernels for."""
    built = torch.cuda.get_arch_list()
    if not torch.version.cuda or has_kernels(capability, built):  # ROCm has other names
        return
    if capability[0] in (7, 8, 9, 10, 12):
        advice = DEFAULT_BUILD
    else:
        advice = OLDER_BUILD if capability < (7, 0) else "a newer torch"
    what = f"{name} has compute capability {capability[0]}.{capability[1]}"
    why = f"torch {torch.__version__} is built for {' '.join(built)} only"
    raise ConfigError(f"{what}, but {why}: install {advice}; {ON_CPU}")


def has_kernels(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Return whether code built for these architectures, such as sm_80 or compute_90, runs on a GPU.

    Binaries (sm) run on GPUs of the same major version from their minor version on; PTX (compute) on all newer ones.
    """
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(built)):
        code = divmod(int(number), 10)
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    with contextlib.suppress(OSError):
        if found := re.search(r"Module .*?\s(\d+\.[\d.]+)\s", Path("/proc/driver/nvidia/version").read_text()):
            return found[1]
    found = re.search(
        r"^\d+\.[\d.]+$", output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), re.MULTILINE
    )
    return found[0] if found else "unknown"


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return ""


def take_device(device: str = "") -> torch.device:
    """Return this process's GPU; the CPU where there is none, or with `--device cpu`. Raise ConfigError."""
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
    """Return this device's floating-point operations a second in a large matrix product."""
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


GAIN = 1.25  # times float32's rate, from which bfloat16 is used: rates on a busy machine vary by some tens of percent


@cache
def gains_by_bf16() -> bool:
    """Return whether this CPU multiplies faster in bfloat16; some have slow instructions for it."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: another torch may lack them
    if not any(getattr(torch.cpu, name, bool)() for name in asked):
        return False
    half, single = (matrix_rate(precision, torch.device("cpu")) for precision in ("bf16", "fp32"))
    return half > GAIN * single


def check_precision(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a precision that a GPU lacks; torch would emulate it slowly."""
    if precision in ("bf16", "tf32") and capability < BF16_FROM:
        other = "fp16" if precision == "bf16" else "fp32"
        what = f"{name} has {capability[0]}.{capability[1]}: use --precision {other}"
        raise ConfigError(f"--precision {precision} needs a GPU of compute capability 8.0 or later, {what}")


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
