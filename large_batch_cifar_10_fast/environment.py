"""What a log records about code, versions and devices."""

import hashlib
import platform
import re
import resource
import sys
from datetime import UTC, datetime
from functools import cache

import torch

from .devices import output_of
from .distributed import DistContext
from .options import PACKAGE, REPO

DECIDING = ("train.py", "recipe.py", "recipes/*.py", "data/*.py", "layers.py", "optim.py", "cpu.py", "compiling.py")
DECIDING += ("graphs.py", "devices.py", "distributed.py", "metrics.py", "evaluate.py")


def utc_now() -> str:
    """Return the time in the form of the log's header."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def code_digest() -> str:
    """Return 12 hexadecimal digits of the SHA-256 over the source files that decide the weights."""
    total = hashlib.sha256()
    for path in sorted(path for part in DECIDING for path in PACKAGE.glob(part)):
        total.update(str(path.relative_to(PACKAGE)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


@cache
def commit() -> str:
    """Return the commit of this code, with -dirty if it was changed since; "unknown" outside a git checkout."""
    here = (f"--git-dir={REPO / '.git'}", f"--work-tree={REPO}")  # not a repository around this folder, nor GIT_DIR
    return output_of("git", *here, "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def software() -> dict[str, object]:
    """Return the versions of Python, of torch, and of the libraries torch was built for."""
    cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_initialized() else ""
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": cuda, "cudnn": cudnn, "nccl": nccl}


def device_name(ctx: DistContext, teams: int = 1) -> str:
    """Return the devices of all processes, which must all call this, and the number of teams that share the machine."""
    name = torch.cuda.get_device_name(ctx.device) if ctx.on_gpu else cpu_name()
    names = " and ".join(sorted(set(ctx.all_gather_strings("device", name))))
    of_teams = f"{teams} teams of " if teams > 1 else ""
    if not ctx.on_gpu:
        return f"CPU {names}, {of_teams}{ctx.world_size} x {torch.get_num_threads()} threads"
    return f"{of_teams}{ctx.world_size} x {names}"


def cpu_name() -> str:
    found = re.search(r"^model name\s*: (.*\S)", output_of("cat", "/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.machine()


def driver_and_clocks(ctx: DistContext) -> dict[str, str]:
    """Return this GPU's driver and clocks from nvidia-smi; empty strings without a GPU."""
    if not ctx.on_gpu:
        return {"driver": "", "clocks": ""}
    gpu = torch.cuda.get_device_properties(ctx.device)  # by its bus: nvidia-smi has indices of its own
    bus = f"--id={gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    driver, *clocks = output_of("nvidia-smi", bus, query, "--format=csv,noheader").split(", ")
    form = "SM {} (at most {}), memory {}, power limit {}"
    return {"driver": driver, "clocks": form.format(*clocks) if clocks else ""}


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: of the GPU since `reset_peak_memory_stats`, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)  # KiB on Linux
