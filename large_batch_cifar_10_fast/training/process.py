"""One process among others: where it meets them, and how it ends."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from datetime import timedelta

import torch.distributed as dist


def loopback_store(rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """torchrun's meeting point, but heard on loopback only: PyTorch's own would listen on all interfaces."""
    host, port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    listening = None
    if rank == 0:
        server = socket.create_server((host, port), backlog=world_size)
        listening = server.detach()
    return dist.TCPStore(host, port, world_size, is_master=rank == 0, master_listen_fd=listening, timeout=timeout)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that ends (even by SIGKILL).

    Ctrl-C ends it silently too: eight tracebacks would tell nobody anything.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # not Linux: torchrun's own clean-up has to do
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def leave() -> None:
    """End a process that has written all it had to.

    An ordinary exit would run PyTorch's static destructors beside its threads, which aborted 5 of 90 two-process
    launches after their last line ("terminate called without ...").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
