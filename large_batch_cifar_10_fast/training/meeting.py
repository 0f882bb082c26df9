"""How the processes of a launch come together and leave, how long they wait, and how one that is silent is named."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..settings.settings import Refusal, count_from
from .process import take_device
from .world import World

Answer = TypeVar("Answer")

TIMEOUT = 3600  # seconds that processes wait for each other; one epoch on a slow machine may keep the others waiting
SLACK = timedelta(seconds=5)  # in which a store tells that a wait took too long
LISTENING = timedelta(seconds=60)  # in which others, still starting, can hear of a refusal
GRACE = timedelta(seconds=10)  # in which all that still can have given up waiting, too
LOST = 3  # seconds that a process leaves the launcher to find the one that it lost, and to end it with the others


def launched_world_size() -> int:
    """How many processes this one is part of, from torchrun's environment; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_teams() -> int:
    """TEAMS; raises Refusal where the processes that there are do not come out even."""
    teams, processes = count_from(os.environ, "TEAMS", 1), launched_world_size()
    if processes % teams:
        raise Refusal(f"TEAMS={teams} cannot be made of {processes} processes: start them by train_cifar_parallel.sh")
    return teams


def has_other_machines() -> bool:
    """Whether this is a process that torchrun started, and some others are elsewhere."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]


def longest_wait() -> timedelta:
    return timedelta(seconds=count_from(os.environ, "TIMEOUT", TIMEOUT))


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Where processes leave word for each other, when all have come. Raises TimeoutError, which says who has not."""
    try:
        store = answer_of(lambda: meeting_point(rank, world_size, timeout), timeout)
    except RuntimeError as error:
        if rank and is_late(error):
            raise waited_for([0]) from error
        raise
    store.set(f"here/{rank}", "")
    wait_for(store, "here", world_size, timeout)
    return store


def wait_for(store: dist.Store, subject: str, world_size: int, timeout: timedelta) -> None:
    """Return when each process has left its word on a subject. Raises TimeoutError, which says who has not."""
    if late := silent_of(store, subject, world_size, timeout):
        raise waited_for(late)


def silent_of(store: dist.Store, subject: str, world_size: int, timeout: timedelta) -> list[int]:
    """Who of all processes has not left its word on a subject in this time; returns when all have. Raises TimeoutError
    where the store itself is silent."""
    words = [f"{subject}/{other}" for other in range(world_size)]

    def silent() -> list[int]:
        try:
            store.wait(words, timeout)
        except RuntimeError as error:
            if not is_late(error):
                raise
            return [other for other, word in enumerate(words) if not store.check([word])]
        return []

    return answer_of(silent, timeout)


def waited_for(processes: Iterable[int]) -> TimeoutError:
    return TimeoutError(f"waited for process {' and '.join(map(str, processes))} longer than TIMEOUT")


def answer_of(ask: Callable[[], Answer], timeout: timedelta) -> Answer:
    """What a store says, asked in a thread of its own: where its keeper, process 0, is stopped, even a wait with an end
    has none. Raises TimeoutError then."""
    answers: list[Answer | Exception] = []

    def hear() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=hear, daemon=True)
    asking.start()
    asking.join((timeout + SLACK).total_seconds())
    if not answers:
        raise waited_for([0])
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def is_late(error: RuntimeError) -> bool:
    """Whether it is of a wait that took too long."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def meeting_point(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """torchrun's; but on one machine heard on loopback only: PyTorch's own would listen on all interfaces."""
    if has_other_machines() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        return store
    host, port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    listening = None
    if rank == 0:
        server = socket.create_server((host, port), backlog=world_size)
        listening = server.detach()
    given = {"is_master": rank == 0, "master_listen_fd": listening, "timeout": timeout, "wait_for_workers": False}
    return dist.TCPStore(host, port, world_size, **given)


@contextlib.contextmanager
def naming_the_silent(store: dist.Store, rank: int, world_size: int, team: range) -> Iterator[None]:
    """Where a wait for others takes too long, say which of them do not even say that they gave up waiting; and
    where another is gone, keep quiet until the launcher has seen that: its end is the cause, this one's follows."""
    try:
        yield
    except RuntimeError as error:
        if re.search("connection|remote process", str(error), re.IGNORECASE):
            time.sleep(LOST)
        if not is_late(error):
            raise
        silent = [0]  # which keeps the store, where that is gone
        with contextlib.suppress(RuntimeError):
            store.set(f"given up/{rank}", "")
            silent = silent_of(store, "given up", world_size, GRACE)
        # Other teams have no cause to give up.
        raise waited_for([other for other in silent if other in team] or silent) from error


def store_of_all() -> dist.Store:
    """torchrun's, where the processes of several machines leave word for each other before they have met."""
    return dist.PrefixStore("before", next(dist.rendezvous("env://", timeout=longest_wait()))[0])


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Where a process of several machines refuses before all have met, tell the others: they would wait for it."""
    try:
        yield
    except Refusal as refusal:
        if has_other_machines():
            store, rank = store_of_all(), int(os.environ["RANK"])
            store.set(f"refusal/{rank}", str(refusal))
            others = [f"refusal/{other}" for other in range(int(os.environ["WORLD_SIZE"])) if other != rank]
            with contextlib.suppress(RuntimeError):  # the store may end with this process's launcher
                store.wait(others, LISTENING)
        raise


def refuse_with_others() -> None:
    """Raise Refusal if a process of another machine has refused; returns when all have said that they have not."""
    store, rank, world_size = store_of_all(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"refusal/{rank}", "")
    wait_for(store, "refusal", world_size, longest_wait())
    for other in range(world_size):
        if refusal := store.get(f"refusal/{other}").decode():
            raise Refusal(f"process {other}: {refusal}")


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
def join_world(total_workers: int, teams: int = 1, device: str = "") -> Iterator[World]:
    """Take this process's place in the world, and leave it in order; `device` is that of the command line."""
    rank, world_size = int(os.environ.get("RANK", 0)), launched_world_size()
    device = take_device(device)
    if world_size == 1:
        yield World(rank, world_size, device, total_workers)
        return
    timeout = longest_wait()
    if has_other_machines():
        refuse_with_others()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store, size = meet(rank, world_size, timeout), world_size // teams
    word = dist.PrefixStore("large_batch", store)
    world = World(rank % size, size, device, total_workers, rank // size, teams, store=word)
    if has_other_machines():
        refuse_other_teams(world)
    place = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    # NCCL takes two ranks on one GPU for a mistake; teams that share one are of one process each, and send nothing.
    nccl = device.type == "cuda" and count_from(os.environ, "TEAMS_PER_GPU", 1) == 1
    ranks = [range(first, first + size) for first in range(0, world_size, size)]
    with silent_stdout():
        dist.init_process_group("nccl" if nccl else "gloo", **place, device_id=device if nccl else None)
        if teams > 1 and size > 1:
            groups = [dist.new_group(team, timeout) for team in ranks]
            world = replace(world, group=groups[world.team])
    with naming_the_silent(word, rank, world_size, ranks[world.team]):
        yield world
    dist.destroy_process_group()


def refuse_other_teams(world: World) -> None:
    """Processes that were told of other TEAMS would wait for each other for ever; seen before any group is formed."""
    first, *others = world.all_gather_words("teams", str(world.teams))
    for place, theirs in enumerate(others, 1):
        if theirs != first:
            raise Refusal(f"process {place} has TEAMS={theirs}, process 0 TEAMS={first}: give all machines the same")
