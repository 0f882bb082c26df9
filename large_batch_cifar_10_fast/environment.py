"""What a log records about code, versions and devices."""

import contextlib
import hashlib
import platform
import resource
from datetime import UTC, datetime
from functools import cache

import torch

from .devices import output_of
from .distributed import DistContext
from .options import PACKAGE, REPO

DECIDING = ("train.py", "recipe.py", "recipes/*.py", "data/*.py", "layers.py", "optim.py", "cpu.py", "compiling.py")
DECIDING += ("devices.py", "distributed.py", "metrics.py", "evaluate.py")


def utc_now() -> str:
    """Return the time as the head of a log has it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def code_digest() -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the source files that decide the weights, committed or not."""
    total = hashlib.sha256()
    for path in sorted(path for part in DECIDING for path in PACKAGE.glob(part)):
        total.update(str(path.relative_to(PACKAGE)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


@cache
def commit() -> str:
    """Return the commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    return output_of("git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def software() -> dict[str, object]:
    """Return the versions of Python, of torch, and of the libraries torch was built for."""
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_initialized() else ""
    cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": cuda, "cudnn": cudnn, "nccl": nccl}


def device_name(ctx: DistContext, teams: int = 1) -> str:
    """Return the names of the devices of all processes, all of which must call this.

    It includes the number of teams: they share the machine's bandwidth, so times compare for equal numbers only.
    """
    kinds = " and ".join(sorted(set(ctx.all_gather_words("device", _kind_of_device(ctx)))))
    of_teams = f"{teams} teams of " if teams > 1 else ""
    if not ctx.on_gpu:
        return f"CPU {kinds}, {of_teams}{ctx.world_size} x {torch.get_num_threads()} threads"
    return f"{of_teams}{ctx.world_size} x {kinds}"


def _kind_of_device(ctx: DistContext) -> str:
    if ctx.on_gpu:
        return torch.cuda.get_device_name(ctx.device)
    name = platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("model name"))
        name = line.split(":")[1].strip()
    return name


def driver_and_clocks(ctx: DistContext) -> dict[str, str]:
    """Return this GPU's driver and clocks from nvidia-smi; empty texts without a GPU."""
    output = ""
    if ctx.on_gpu:
        found = torch.cuda.get_device_properties(ctx.device)  # nvidia-smi has indices of its own
        bus = f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        output = output_of("nvidia-smi", f"--id={bus}", query, "--format=csv,noheader")
    driver, _, clocks = output.partition(", ")
    if clocks:
        clocks = "SM {} (at most {}), memory {}, power limit {}".format(*clocks.split(", "))
    return {"driver": driver, "clocks": clocks}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this process has used: of GPU memory since `reset_peak_memory_stats`, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
