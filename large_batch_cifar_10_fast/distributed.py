"""The process group: how processes join it, which workers live on which, and how gradients are averaged."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.redirects import redirect_stdout

from . import RENDEZVOUS, ConfigError
from .core.team import exit_process, launched_world_size, on_one_machine, show, warn
from .devices import take_device

__all__ = ["DistContext", "exit_process", "init_distributed", "launched_world_size", "on_one_machine", "show", "warn"]


@dataclass(frozen=True)
class DistContext:
    """This process's rank in the group that trains a run, and the number of workers of the whole group."""

    rank: int
    world_size: int
    device: torch.device
    total_workers: int
    store: dist.Store | None = None  # for messages; a single process has none

    @property
    def workers(self) -> range:
        """The workers of this process. Rank 0 has worker 0."""
        share = self.total_workers // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def is_main(self) -> bool:  # rank 0 writes tables and log
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def warn(self, text: str) -> None:
        """Print a warning on STDERR, on rank 0 only."""
        if self.is_main:
            warn(text)

    def synchronize(self) -> None:
        """Wait until the devices of all processes have finished."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor, all of one type, over the processes: in place, by one collective."""
        if self.world_size > 1:
            message = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(message)
            parts = message.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    def broadcast(self, *tensors: Tensor) -> None:
        """Copy rank 0's values to all processes, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def average_gradients(self, network: nn.Module, loss_scale: int) -> None:
        """Replace this process's sums of gradients of scaled losses by the mean over all workers."""
        # One collective for each dtype: a compiled backward pass returns all gradients at its end.
        gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            # Gradients have their weights' strides, without gaps, so this flat view needs no copy.
            lines = [g.as_strided((g.numel(),), (1,)) for g in gradients if g.dtype == dtype]
            # As published, divide first: the sum could overflow in half precision.
            if (divisor := self.total_workers * loss_scale) > 1:
                torch._foreach_div_(lines, divisor)
            self.all_reduce(lines)

    def all_gather_strings(self, key: str, text: str) -> list[str]:
        """Return the strings that all processes pass for a key, by rank. Use each key once."""
        if self.store is None:
            return [text]
        self.store.set(f"{key}/{self.rank}", text)
        return [self.store.get(f"{key}/{other}").decode() for other in range(self.world_size)]

    def first_failure(self, key: str, failure: str) -> str:
        """Return the first failure that any process passes for a key, or ""."""
        return next(filter(None, self.all_gather_strings(key, failure)), "")


@contextlib.contextmanager
def init_distributed(total_workers: int = 1, device: str = "", timeout: int = 3600) -> Iterator[DistContext]:
    """Join the process group, and leave it at the end. Waits of more than `timeout` seconds raise torch's errors.

    Their rendezvous is a file of our launcher, or as torchrun says.
    """
    rank, world_size, taken = int(os.environ.get("RANK", 0)), launched_world_size(), take_device(device)
    if world_size == 1:
        yield DistContext(rank, world_size, taken, total_workers)
        return
    if on_one_machine():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    backend, own = ("nccl", taken) if taken.type == "cuda" else ("gloo", None)
    wait = timedelta(seconds=timeout)
    store = next(dist.rendezvous(os.environ.get(RENDEZVOUS, "env://"), rank, world_size, timeout=wait))[0]
    group = dist.PrefixStore("group", store)
    with redirect_stdout(os.devnull):  # STDOUT is the log, and Gloo (torch 2.10) prints a line per rank
        dist.init_process_group(backend, None, wait, world_size, rank, group, device_id=own)
    try:
        yield DistContext(rank, world_size, taken, total_workers, dist.PrefixStore("messages", store))
    except ConfigError as error:  # the first process that finds it prints it
        error.reported = store.add("errors", 1) > 1
        raise
    dist.destroy_process_group()
