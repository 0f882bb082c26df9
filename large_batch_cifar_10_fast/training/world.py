"""The world: which processes train together, which workers live on which, and how they average and add up."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

Item = TypeVar("Item")


@dataclass(frozen=True)
class World:
    """One process's view of those that train a run together, a team: its rank, how many they are, its device, and how
    many workers all have together. Several teams make runs side by side, each whole ones."""

    rank: int
    world_size: int
    device: torch.device
    total_workers: int
    team: int = 0
    teams: int = 1
    group: dist.ProcessGroup | None = None  # of the team; None: of all
    store: dist.Store | None = None  # where the processes of all teams leave word; one by itself has none

    @property
    def workers(self) -> range:
        """The workers that live on this process: equal consecutive parts, so that worker 0 is on rank 0."""
        share = self.total_workers // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def is_main(self) -> bool:
        """Whether this is the team's process that speaks for it, with worker 0."""
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks for all teams."""
        return self.place == 0

    @property
    def place(self) -> int:
        """This process's place among those of all teams."""
        return self.team * self.world_size + self.rank

    @property
    def processes(self) -> int:
        """Of all teams."""
        return self.teams * self.world_size

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def warn(self, text: str) -> None:
        """A line on STDERR, from one process alone."""
        if self.is_first:
            warn(text)

    def synchronize(self) -> None:
        """Return when the devices of all processes have finished what they were given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier(self.group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, *tensors: Tensor) -> None:
        """Give all processes the main one's values, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=self.team * self.world_size, group=self.group)

    @torch.no_grad()
    def average_gradients(self, network: nn.Module, loss_scale: int) -> None:
        """The mean over all workers, in place; a process's gradients are sums over its own workers, of scaled losses.

        Divided before they are summed, as published: half precision does not reach as far as the sum. All of one
        type go in one message, at the end: a compiled backward hands over nothing earlier.
        """
        gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            # A gradient has its weight's strides, which leave no gaps: as a line of numbers it needs no copy.
            lines = [g.as_strided((g.numel(),), (1,)) for g in gradients if g.dtype == dtype]
            torch._foreach_div_(lines, self.total_workers * loss_scale)
            if self.world_size > 1:
                message = torch.cat(lines)
                dist.all_reduce(message, group=self.group)
                torch._foreach_copy_(lines, message.split([len(line) for line in lines]))

    def all_gather_words(self, subject: str, word: str) -> list[str]:
        """What each process of every team says about a subject; returns when all have said it."""
        if self.store is None:
            return [word]
        self.store.set(f"{subject}/{self.place}", word)
        return [self.store.get(f"{subject}/{other}").decode() for other in range(self.processes)]

    def take_next(self, things: Sequence[Item]) -> Iterator[Item]:
        """Each of these to one team: a free team takes the next that nobody has taken."""
        if self.teams == 1:
            yield from things
            return
        while True:
            taken = torch.tensor(self.store.add("taken", 1) if self.is_main else 0, device=self.device)
            self.broadcast(taken)
            if taken > len(things):
                return
            yield things[int(taken) - 1]


def warn(text: str) -> None:
    """A line on STDERR, clear of the progress bar."""
    with tqdm.external_write_mode():
        print(f"Warning: {text}", file=sys.stderr, flush=True)
