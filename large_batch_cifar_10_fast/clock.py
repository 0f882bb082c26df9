"""Seconds by part, and which parts count."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS = ("upload", "preprocessing", "whitening", "training")  # of the time that counts (method, section 6)


class Clock:
    """Adds up seconds by part. Every reading waits until the devices of all processes have finished."""

    def __init__(self, synchronize: Callable[[], None], seconds: dict[str, float] | None = None) -> None:
        self._synchronize = synchronize
        self.seconds = dict(seconds or {})
        self.last: dict[str, float] = {}  # of each part, the latest stretch alone

    @contextlib.contextmanager
    def counting(self, part: str) -> Iterator[None]:
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.last[part] = time.perf_counter() - start
        self.seconds[part] = self.seconds.get(part, 0.0) + self.last[part]

    def fork(self) -> "Clock":
        """A clock that goes on from here; runs share what was done once for all of them."""
        return Clock(self._synchronize, self.seconds)

    @property
    def total(self) -> float:
        """The time that counts."""
        return sum(self.seconds.get(part, 0.0) for part in PARTS)
