"""Seconds of the parts of a run: taken, summed up, and set in a table."""

import os
import statistics
import time
from collections.abc import Callable

from ..training.world import World

Figures = dict[str, list[float]]  # seconds of a part, one entry a repetition


def timed(world: World, figures: list[float], work: Callable[[], object]) -> object:
    world.synchronize()
    start = time.perf_counter()
    result = work()
    world.synchronize()
    figures.append(time.perf_counter() - start)
    return result


def seconds_since_start() -> float:
    """How long ago this process began: the interpreter and its imports."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("nan")


def summary(values: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(baseline: list[float], ours: list[float]) -> float:
    """How many times faster ours is: the median over pairs measured one after the other."""
    return statistics.median(p / o for p, o in zip(baseline, ours, strict=True))


def as_text(figures: dict) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in figures["conditions"].items()), ""]
    lines.append(f"{'':28}{'seconds':>10}{'least':>10}{'most':>10}{'baseline':>10}{'ratio':>8}")
    for name, value in figures.items():
        if not isinstance(value, dict) or "seconds" not in value:
            continue
        line = f"{name:28}{value['seconds']:10.4f}{value['least']:10.4f}{value['most']:10.4f}"
        if name in figures["baseline"]:
            baseline = figures["baseline"][name]["seconds"]
            times = value.get("ratio", baseline / value["seconds"] if value["seconds"] else None)
            line += f"{baseline:10.4f}" + (f"{times:8.2f}" if times else f"{'-':>8}")
        lines.append(line)
    lines.append("")
    lines += [f"{name:42}{value:12.4g}" for name, value in figures.items() if isinstance(value, float)]
    return "\n".join(lines)
