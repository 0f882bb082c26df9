"""One process among others: where it meets them, and how it ends."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..settings.settings import count_from

TIMEOUT = 3600  # seconds that processes wait for each other; one epoch on a slow machine may keep the others waiting


def meeting_point(rank: int, world_size: int, one_machine: bool, timeout: timedelta) -> dist.Store:
    """torchrun's; but on one machine heard on loopback only: PyTorch's own would listen on all interfaces."""
    if not one_machine or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        return store
    host, port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    listening = None
    if rank == 0:
        server = socket.create_server((host, port), backlog=world_size)
        listening = server.detach()
    return dist.TCPStore(host, port, world_size, is_master=rank == 0, master_listen_fd=listening, timeout=timeout)


def told_by_the_first(subject: str, word: str) -> str:
    """What the first process says about a subject, to all: its word, not theirs. torchrun's store must be up."""
    timeout = timedelta(seconds=count_from(os.environ, "TIMEOUT", TIMEOUT))
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ["RANK"] == "0":
        store.set(subject, word)
    return store.get(subject).decode()


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Do this, and end the process. Under torchrun a fault is left in the file that it names, for the launcher to tell.

    An ordinary exit would run PyTorch's static destructors beside its threads, which aborted 5 of 90 two-process
    launches after their last line ("terminate called without ..."), and takes a while, in which others may notice.
    """
    status = 0
    try:
        yield
    except SystemExit as end:
        status = end.code
    except Exception as fault:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        get_error_handler().record_exception(fault)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
