"""What launching costs on a GPU: the host's share of a step, and the step without it, as one CUDA graph."""

import gc
import sys
import time
from collections.abc import Callable

import torch

from ..training.world import World
from .figures import Figures, timed


def measure_launches(step: Callable[[], None], world: World, repeats: int, figures: Figures) -> None:
    """When the host has handed a step over, and how long it takes as a graph; where none can be made, say why.

    Training uses no graph: first it has to show here that it pays.
    """
    for _ in range(repeats):
        world.synchronize()
        start = time.perf_counter()
        step()
        figures.setdefault("launching of a step", []).append(time.perf_counter() - start)
    graph, stream, seconds = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    gc.collect()  # what is left of other steps' gradients may hold on to another stream
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # capturing wants one on a stream of its own first
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(repeats):
            timed(world, seconds, graph.replay)
        figures["step as one CUDA graph"] = seconds
    except RuntimeError as error:
        torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that fails leaves its own
        print(f"bench: no CUDA graph of a step: {error}", file=sys.stderr)
