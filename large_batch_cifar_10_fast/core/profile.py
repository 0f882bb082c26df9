"""--profile N: where the time of N steps goes, instead of a run."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch.profiler import profile

from .team import Team, print_line

T = TypeVar("T")

COSTLIEST = 15  # kernels in the table


class ProfileDone(Exception):  # noqa: N818 (no error)
    """All steps to profile were taken. `run_program` ends the launch."""


def profiled(steps: Sequence[T], trace: Path, team: Team) -> Iterator[tuple[int, T]]:
    """Yield these steps, counted from 1, under torch's profiler, then raise ProfileDone.

    Rank 0 writes a trace, which https://ui.perfetto.dev reads, and prints the costliest kernels. All must call this.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # without a GPU it prints an error
    with profile(acc_events=True) as profiler:  # all events, without a warning
        yield from enumerate(steps, 1)
        team.synchronize()
    if team.is_main:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        costs = profiler.key_averages()
        by = "self_device_time_total" if team.on_gpu else "self_cpu_time_total"
        print_line(costs.table(by, row_limit=COSTLIEST, max_name_column_width=60))
        print_line(f"# {len(steps)} steps: the trace is in {trace}")
    raise ProfileDone
