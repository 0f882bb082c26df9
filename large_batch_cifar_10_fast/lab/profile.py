"""--profile N: measure N steps by kernel instead of making runs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch.profiler import profile

from ..core.team import Team, print_line

T = TypeVar("T")

COSTLIEST = 15  # kernels in the table


def profiled(count: int, trace: Path, team: Team, steps: Sequence[T]) -> Iterator[T]:
    """Yield the first `count` steps of an epoch under torch's profiler. All processes must call this.

    Rank 0 writes a trace, which https://ui.perfetto.dev reads, and prints the costliest kernels.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # without a GPU it prints an error
    steps = steps[:count]
    with profile(acc_events=True) as profiler:  # all events, without a warning
        yield from steps
        team.synchronize()
    if team.is_main:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        costs = profiler.key_averages()
        by = "self_device_time_total" if team.on_gpu else "self_cpu_time_total"
        print_line(costs.table(by, row_limit=COSTLIEST, max_name_column_width=60))
        print_line(f"# {len(steps)} steps: the trace is in {trace}")
