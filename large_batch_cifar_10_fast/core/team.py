"""The processes of a run: rank and workers of each; average, broadcast, synchronize."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.redirects import redirect_stdout

from .. import RENDEZVOUS, ConfigError
from .devices import take_device


@dataclass(frozen=True)
class Team:
    """The processes that train a run together, and the rank of this process."""

    rank: int
    world_size: int
    device: torch.device
    total_workers: int = 1  # workers of all processes
    store: dist.Store | None = None  # for messages between processes; None for a single process

    def with_workers(self, workers: int, micro_batches: int = 1) -> "Team":
        """Return a team of the same processes with `workers` workers.

        Each process computes its workers' batch in `micro_batches` parts. Raise ConfigError if the workers cannot be
        split equally over processes and parts.
        """
        if workers % self.world_size:
            raise ConfigError(
                f"{workers} workers cannot be split over {self.world_size} processes: use a divisor as --nproc"
            )
        here = workers // self.world_size
        if here % micro_batches:
            wrong = f"--micro_batches {micro_batches} does not divide the {here} workers of a process"
            raise ConfigError(f"{wrong}: use a number that does")
        return replace(self, total_workers=workers)

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

    def synchronize(self) -> None:
        """Wait until the devices of all processes have finished."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def sum_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the processes, in place, with one collective. All tensors have the same dtype."""
        if self.world_size > 1:
            message = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(message)
            parts = message.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    @torch.no_grad()
    def average_gradients(self, weights: Iterable[Tensor], loss_scale: int = 1) -> None:
        """Replace this process's gradients, which are sums over its workers, by the mean over all workers.

        `loss_scale` is the factor by which the loss was multiplied.
        """
        # One collective per dtype, without overlap: a compiled backward pass returns all gradients at its end.
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            # Gradients have the strides of their weights, without gaps, so this flat view needs no copy.
            lines = [g.as_strided((g.numel(),), (1,)) for g in gradients if g.dtype == dtype]
            # As published, divide first: the sum could overflow in half precision.
            divisor = self.total_workers * loss_scale
            if divisor > 1:
                torch._foreach_div_(lines, divisor)
            self.sum_up(lines)

    def broadcast(self, *tensors: Tensor) -> None:
        """Copy rank 0's values to all processes, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, key: str, text: str) -> list[str]:
        """Return the strings that all processes pass for a key, by rank. Use each key once."""
        if self.store is None:
            return [text]
        self.store.set(f"{key}/{self.rank}", text)
        return [self.store.get(f"{key}/{other}").decode() for other in range(self.world_size)]

    def first_failure(self, key: str, failure: str) -> str:
        """Return a failure that a process passes for a key, or "" if all pass "". Use each key once."""
        return max(self.gather(key, failure))


def launched_world_size() -> int:
    """Return the number of processes from the environment of the launcher or torchrun, by default 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


def on_one_machine() -> bool:
    """Return whether all processes run on this machine."""
    return launched_world_size() <= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@contextlib.contextmanager
def join_team(device: str = "", timeout: int = 3600) -> Iterator[Team]:
    """Join the process group of this run, and leave it at the end.

    Waiting for more than `timeout` seconds raises an error of torch. The rendezvous is a file of our launcher, or that
    of torchrun.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = launched_world_size()
    taken = take_device(device)
    if world_size == 1:
        yield Team(rank, world_size, taken)
        return
    if on_one_machine():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    backend = "nccl" if taken.type == "cuda" else "gloo"
    own = taken if taken.type == "cuda" else None
    wait = timedelta(seconds=timeout)
    store = next(dist.rendezvous(os.environ.get(RENDEZVOUS, "env://"), rank, world_size, timeout=wait))[0]
    group = dist.PrefixStore("group", store)
    with redirect_stdout(os.devnull):  # STDOUT is the log, and Gloo (torch 2.10) prints a line per rank
        dist.init_process_group(backend, None, wait, world_size, rank, group, device_id=own)
    try:
        yield Team(rank, world_size, taken, store=dist.PrefixStore("messages", store))
    except ConfigError as error:  # only the first process with an error prints it
        error.reported = store.add("errors", 1) > 1
        raise
    dist.destroy_process_group()
