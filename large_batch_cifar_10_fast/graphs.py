"""Training steps as CUDA graphs: the host launches a step once instead of each of its kernels."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from . import first_line
from .data.shards import Step
from .distributed import DistContext

TakeStep = Callable[[Step], None]


class StepGraphs:
    """Take a step by replaying its graph; there is one for each kind of stage and batch size.

    A graph reads and writes the memory it was captured with: the shards' images, weights, momenta, learning rates and
    metrics stay where they are. The sample of a step is copied into the sample the graph was captured with.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Step]] = {}
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # of all graphs: none reads what another left

    def warm_up(self, take: TakeStep, step: Step) -> None:
        """Take a step a few times on the stream of the capture, as torch asks for."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                take(step)
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, take: TakeStep, step: Step) -> None:
        static = replace(step, columns=[column.clone() for column in step.columns])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool, self.stream):
            take(static)
        self.graphs[step.kind, step.columns[0].shape] = graph, static

    def __call__(self, step: Step) -> None:
        graph, static = self.graphs[step.kind, step.columns[0].shape]
        torch._foreach_copy_(static.columns, step.columns)
        graph.replay()


def graphed(take: TakeStep, steps: Iterable[Step], ctx: DistContext) -> TakeStep:
    """Return the steps' graphs; warn and return `take` if any process cannot capture them."""
    graphs = StepGraphs()
    for number, step in enumerate(steps):
        graphs.warm_up(take, step)  # fails as training would
        error = ""
        try:
            graphs.capture(take, step)
        except RuntimeError as reason:
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own
            error = first_line(reason)
        if error := ctx.first_failure(f"graph {number}", error):
            ctx.warn(f"no CUDA graphs ({error}): training continues without; --no_graph skips the attempt")
            return take
    return graphs
