"""The timing of a run: seconds by part, read when all devices have finished (docs/method.md, section 6)."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from .. import ConfigError

PARTS = ("upload", "preprocessing", "whitening", "training")  # of the training time


class Clock:
    """Add up seconds by part. Every reading waits until the devices of all processes have finished."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.laps: dict[str, list[float]] = defaultdict(list)  # the durations of each part
        self.cpu_seconds = 0.0  # of all threads of this process, over the training time
        self._set_up: tuple[dict[str, list[float]], float] | None = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the body to a part."""
        self._synchronize()
        start = time.perf_counter()
        cpu_start = time.process_time()
        yield
        self._synchronize()
        self.laps[part].append(time.perf_counter() - start)
        if part in PARTS:
            self.cpu_seconds += time.process_time() - cpu_start

    def begin_run(self) -> None:
        """Reset the clock to the end of the set-up, which counts for each run. The first call stores that time."""
        if self._set_up is None:
            self._set_up = {part: [*laps] for part, laps in self.laps.items()}, self.cpu_seconds
        laps, self.cpu_seconds = self._set_up
        self.laps = defaultdict(list, {part: [*durations] for part, durations in laps.items()})

    def last(self, part: str) -> float:
        """Return the seconds of a part's last lap. Raise ConfigError if the program has not timed this part."""
        if not self.laps[part]:
            raise ConfigError(f'the program has timed no {part}: use `with machine.clock.timed("{part}"):`')
        return self.laps[part][-1]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part; 0 for parts of the training time that the program does not have."""
        return dict.fromkeys(PARTS, 0.0) | {part: sum(laps) for part, laps in self.laps.items()}

    @property
    def total(self) -> float:
        """The training time."""
        return sum(sum(laps) for part, laps in self.laps.items() if part in PARTS)
