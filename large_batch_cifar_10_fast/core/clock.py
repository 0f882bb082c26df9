"""The timing of a run: seconds by part, read when all devices have finished (docs/method.md, section 6)."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS = ("upload", "preprocessing", "whitening", "training")  # parts of the training time


class Clock:
    """Add up seconds by part. Every reading waits until the devices of all processes have finished."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last: dict[str, float] = {}  # the seconds of each part's last time
        self.cpu_seconds = 0.0  # used by all threads of this process in the training time
        self._set_up: tuple[dict[str, float], float] | None = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the body to a part."""
        self._synchronize()
        start = time.perf_counter()
        cpu_start = time.process_time()
        yield
        self._synchronize()
        self.last[part] = time.perf_counter() - start
        self.seconds[part] = self.seconds.get(part, 0.0) + self.last[part]
        if part in PARTS:
            self.cpu_seconds += time.process_time() - cpu_start

    def begin_run(self) -> None:
        """Begin a run's time with the seconds of the common set-up, which the first call remembers."""
        if self._set_up is None:
            self._set_up = self.seconds, self.cpu_seconds
        seconds, self.cpu_seconds = self._set_up
        self.seconds = dict(seconds)

    @property
    def total(self) -> float:
        """The training time."""
        return sum(self.seconds[part] for part in PARTS)
