"""Teams, which make whole runs side by side: what they tell the first process, and how long it waits for them."""

import time
from collections.abc import Callable

from .meeting import is_late, longest_wait, waited_for
from .world import World


def tell_first(world: World, row: str) -> str:
    """Tell the first process of this team's row, and return its answer."""
    key = f"row/{world.team}/{world.store.add(f'row/{world.team}', 1)}"
    world.store.set(key, row)
    try:
        return world.store.get(f"{key}/answer").decode()
    except RuntimeError as error:
        if is_late(error):
            raise waited_for([0]) from error
        raise


def answer_teams(world: World, answer: Callable[[str], str]) -> None:
    """Answer what the first process is told, beside what it does itself, until all have said that they finished.

    On one machine a process that is lost ends all; of one that is stopped, or of another machine, nothing may be
    heard any more. Raises TimeoutError where that has lasted longer than TIMEOUT since this process finished.
    """
    store, finished = world.store, [f"finished/{place}" for place in range(world.processes)]
    timeout = longest_wait().total_seconds()
    numbers, signs, heard = dict.fromkeys(range(1, world.teams), 1), 0, time.monotonic()
    while not store.check(finished):
        for team, number in numbers.items():
            key = f"row/{team}/{number}"
            if store.check([key]):
                store.set(f"{key}/answer", answer(store.get(key).decode()))
                numbers[team] += 1
        before, signs = signs, store.add("alive", 0)
        if signs > before or not store.check(finished[:1]):
            heard = time.monotonic()
        if time.monotonic() - heard > timeout:
            raise waited_for(place for place, word in enumerate(finished) if not store.check([word]))
        time.sleep(0.05)


def say_alive(world: World) -> None:
    """A sign of life for the first process: a run of another team may take longer than TIMEOUT."""
    if world.teams > 1:
        world.store.add("alive", 1)


def say_finished(world: World) -> None:
    """Let the first process know that no run is left to make here: it keeps the store until none is left anywhere."""
    if world.teams > 1:
        world.store.set(f"finished/{world.place}", "")
