"""How the processes of a launch form a process group."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from .process import take_device
from .world import World

TIMEOUT = 3600  # seconds; one epoch on a slow machine may keep the others waiting


def launched_world_size() -> int:
    """Return how many processes this one is part of, from torchrun's environment; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def has_other_machines() -> bool:
    """Return whether some processes of this launch are on other machines."""
    return os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Drop what libraries print to file descriptor 1. STDOUT is the log; Gloo (torch 2.10) prints a line per rank."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def join_world(total_workers: int = 1, device: str = "", timeout: int = TIMEOUT) -> Iterator[World]:
    """Join the process group, and leave it in order.

    `device` is that of the command line. A collective or a rendezvous that takes longer than `timeout` seconds raises
    torch's own error.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), launched_world_size()
    chosen = take_device(device)
    if world_size == 1:
        yield World(rank, world_size, chosen, total_workers)
        return
    if not has_other_machines():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout)
    store = rendezvous_store(rank, world_size, wait)
    group = {"store": dist.PrefixStore("group", store), "rank": rank, "world_size": world_size, "timeout": wait}
    nccl = chosen.type == "cuda"
    with silent_stdout():
        dist.init_process_group("nccl" if nccl else "gloo", **group, device_id=chosen if nccl else None)
    yield World(rank, world_size, chosen, total_workers, dist.PrefixStore("messages", store))
    dist.destroy_process_group()


def rendezvous_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return torchrun's store; under our launcher one on loopback only, where PyTorch's listens on all interfaces."""
    if has_other_machines() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        return store
    host, port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    listening = socket.create_server((host, port), backlog=world_size).detach() if rank == 0 else None
    given = {"is_master": rank == 0, "master_listen_fd": listening, "timeout": timeout, "wait_for_workers": False}
    return dist.TCPStore(host, port, world_size, **given)
