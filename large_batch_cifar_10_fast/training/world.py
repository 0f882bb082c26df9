"""The world: which processes there are, which workers live on which, and how they average and add up."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from ..settings.settings import count_from
from .process import (
    has_other_machines,
    is_late,
    launched_world_size,
    longest_wait,
    meet,
    refuse_other_teams,
    refuse_with_others,
    silent_of,
    take_device,
    waited_for,
)

Item = TypeVar("Item")

GRACE = timedelta(seconds=10)  # in which all that still can have given up waiting, too
LOST = 3  # seconds that a process leaves the launcher to find the one that it lost, and to end it with the others


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
        return self.is_main and self.team == 0

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

    @property
    def _places(self) -> tuple[int, int]:
        """This process's place among those of all teams, and how many they are."""
        return self.team * self.world_size + self.rank, self.teams * self.world_size

    def all_gather_words(self, subject: str, word: str) -> list[str]:
        """What each process of every team says about a subject; returns when all have said it."""
        if self.store is None:
            return [word]
        place, count = self._places
        self.store.set(f"{subject}/{place}", word)
        return [self.store.get(f"{subject}/{other}").decode() for other in range(count)]

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

    def tell_first(self, subject: str, word: str) -> str:
        """Tell the first process something for this team, and return its answer."""
        key = f"{subject}/{self.team}/{self.store.add(f'{subject}/{self.team}', 1)}"
        self.store.set(key, word)
        try:
            return self.store.get(f"{key}/answer").decode()
        except RuntimeError as error:
            if is_late(error):
                raise waited_for([0]) from error
            raise

    def answer_teams(self, subject: str, answer: Callable[[str], str]) -> None:
        """Answer what the first process is told, beside what it does itself, until all have said that they finished.

        On one machine a process that is lost ends all; of one that is stopped, or of another machine, nothing may be
        heard any more. Raises TimeoutError where that has lasted longer than TIMEOUT since this process finished.
        """
        finished = [f"finished/{place}" for place in range(self.teams * self.world_size)]
        timeout = longest_wait().total_seconds()
        numbers, signs, heard = dict.fromkeys(range(1, self.teams), 1), 0, time.monotonic()
        while not self.store.check(finished):
            for team, number in numbers.items():
                key = f"{subject}/{team}/{number}"
                if self.store.check([key]):
                    self.store.set(f"{key}/answer", answer(self.store.get(key).decode()))
                    numbers[team] += 1
            before, signs = signs, self.store.add("alive", 0)
            if signs > before or not self.store.check(finished[:1]):
                heard = time.monotonic()
            if time.monotonic() - heard > timeout:
                raise waited_for(place for place, word in enumerate(finished) if not self.store.check([word]))
            time.sleep(0.05)

    def say_alive(self) -> None:
        """A sign of life for the first process: a run of another team may take longer than TIMEOUT."""
        if self.teams > 1:
            self.store.add("alive", 1)

    def say_finished(self) -> None:
        """Let the first process know that no run is left to make here: it keeps the store for as long as one is."""
        if self.teams > 1:
            self.store.set(f"finished/{self._places[0]}", "")

    @contextlib.contextmanager
    def naming_the_silent(self) -> Iterator[None]:
        """Where a wait for others takes too long, say which of them do not even say that they gave up waiting; and
        where another is gone, keep quiet until the launcher has seen that: its end is the cause, this one's follows."""
        try:
            yield
        except RuntimeError as error:
            if re.search("connection|remote process", str(error), re.IGNORECASE):
                time.sleep(LOST)
            if not is_late(error):
                raise
            place, count = self._places
            silent = [0]  # which keeps the store, where that is gone
            with contextlib.suppress(RuntimeError):
                self.store.set(f"given up/{place}", "")
                silent = silent_of(self.store, {other: f"given up/{other}" for other in range(count)}, GRACE)
            team = range(place - self.rank, place - self.rank + self.world_size)
            # Other teams have no cause to give up.
            raise waited_for([other for other in silent if other in team] or silent) from error


def warn(text: str) -> None:
    """A line on STDERR, clear of the progress bar."""
    with tqdm.external_write_mode():
        print(f"Warning: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def join_world(total_workers: int, teams: int = 1) -> Iterator[World]:
    """Take this process's place in the world, and leave it in order."""
    rank, world_size = int(os.environ.get("RANK", 0)), launched_world_size()
    device = take_device()
    if world_size == 1:
        yield World(rank, world_size, device, total_workers)
        return
    timeout = longest_wait()
    if has_other_machines():
        refuse_with_others()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store = meet(rank, world_size, timeout)
    word = dist.PrefixStore("large_batch", store)
    if has_other_machines():
        refuse_other_teams(rank, world_size, teams, word)
    meeting = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    # NCCL takes two ranks on one GPU for a mistake; teams that share one are of one process each, and send nothing.
    nccl = device.type == "cuda" and count_from(os.environ, "TEAMS_PER_GPU", 1) == 1
    dist.init_process_group("nccl" if nccl else "gloo", **meeting, device_id=device if nccl else None)
    size, group = world_size // teams, None
    if teams > 1 and size > 1:
        groups = [dist.new_group(range(first, first + size), timeout) for first in range(0, world_size, size)]
        group = groups[rank // size]
    world = World(rank % size, size, device, total_workers, rank // size, teams, group, word)
    with world.naming_the_silent():
        yield world
    dist.destroy_process_group()
