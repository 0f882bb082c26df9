"""CUDA graphs: the host launches a step as one graph instead of many kernels."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import ConfigError, first_line
from .printing import warn
from .team import Team, on_one_machine


class CudaGraphs:
    """Replay the graph of a step's kind.

    A graph reads and writes the memory of its capture, so images, weights, momenta, learning rates and sums stay in
    place. Each batch is copied into the captured batch.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # shared: no graph reads memory that another leaves

    def capture(self, step: Callable, batch: Tensor, *stage: Any) -> None:
        """Take a few steps on the stream of the capture, as torch requires, and capture another."""
        static = batch.clone()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                step(static, *stage)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool, self.stream):
            step(static, *stage)
        self.graphs[batch.shape, *stage] = graph, static

    def reset(self) -> None:
        """Free the graphs. Otherwise a captured collective makes the end of the process group wait forever."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def __call__(self, batch: Tensor, *stage: Any) -> None:
        graph, static = self.graphs[batch.shape, *stage]
        static.copy_(batch)
        graph.replay()


def capture_all(step: Callable, examples: Iterable[tuple], team: Team) -> CudaGraphs | None:
    """Return CUDA graphs of `step(batch, *stage)` for each kind of step, or None with several machines.

    If a capture fails in a single process, warn and return None. With several processes, raise ConfigError, because
    the others have captured collectives.
    """
    # NCCL has no timeout inside a graph: if a machine is lost, processes on the others would wait forever.
    if not on_one_machine():
        return None
    graphs = CudaGraphs()
    for number, example in enumerate(examples):
        failure = ""
        try:
            graphs.capture(step, *example)
        except RuntimeError as error:
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own stream active
            failure = first_line(error)
        failure = team.first_failure(f"graph {number}", failure)
        if failure:
            graphs.reset()
            if team.world_size > 1:
                raise ConfigError(f"no CUDA graphs ({failure}): start again with --no_graph")
            warn(f"no CUDA graphs ({failure}): training continues without; --no_graph skips the attempt")
            return None
    return graphs
