"""Where and how a program computes, and its set-up: compile, check, warm up, upload, capture graphs.

In a notebook, `Machine()` trains on this process's GPU or CPU. The command line makes a Machine from its options.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .. import ConfigError
from . import data, fast
from .clock import Clock
from .devices import DTYPES, keep_freed_memory, take_device
from .team import Team


class Machine:
    """The processes that train, how they compute, and their clock."""

    def __init__(
        self,
        team: Team | None = None,
        precision: str = "",
        compile: bool | None = None,
        graphs: bool = True,
        warm_up: bool = True,
        micro_batches: int = 1,
        watch: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
    ) -> None:
        """By default, use this process only. A GPU compiles and uses the program's precision; a CPU uses fp32.

        `graphs`: replay CUDA graphs. `warm_up`: take an untimed step of each kind. `micro_batches`: forward and
        backward passes per step. `watch` iterates over the steps of an epoch, for a progress bar.
        """
        self.team = team or Team(0, 1, take_device())
        if not self.team.on_gpu:
            keep_freed_memory()
        self.precision = precision
        self.compile = self.team.on_gpu if compile is None else compile
        self.graphs = graphs
        self.warm_up = warm_up
        self.micro_batches = micro_batches
        self.watch = watch
        self.clock = Clock(self.team.synchronize)
        fast.prepare_cache_folder(self.team)
        self.is_compiled = False  # whether compilation succeeded
        self.captured: fast.CudaGraphs | None = None

    def assign_workers(self, workers: int) -> Team:
        """Assign a program's workers to the processes. Return the team. Raise ConfigError if that is impossible."""
        self.team = self.team.with_workers(workers, self.micro_batches)
        return self.team

    def choose_precision(self, preferred: str, half_weights: bool) -> fast.Precision:
        """Return the precision: by default `preferred` on a GPU, fp32 on a CPU. Raise ConfigError."""
        if self.precision not in ("", *DTYPES):
            raise ConfigError(f"precision {self.precision!r} is unknown: use one of {', '.join(DTYPES)}")
        default = fast.precision_on_gpu("", preferred, self.team.device) if self.team.on_gpu else "fp32"
        name = self.precision or default
        return fast.Precision(name, self.team.device, half_weights)

    def set_up(
        self,
        images: data.Images,
        model: fast.Model,
        precision: fast.Precision,
        forward: Callable,
        make_batch: Callable,
        examples: Sequence[tuple],
        load: Callable[[data.Images, Clock], data.Shards],
        train_step: Callable[..., None],
        evaluate: Callable[..., Any],
        set_stage: Callable[..., None] = lambda *stage: None,
        graphs: bool = True,
    ) -> tuple[Callable[..., None], Callable[..., Any]]:
        """Return `step(batch, *stage)` and `validate(...)`, ready to be timed: compiled, warm, with the images loaded.

        They call `train_step(functions, shards, batch, *stage)` and `evaluate(functions, shards, ...)`. `functions` are
        `make_batch`, `forward` and `predict`, compiled or not. `load(images, clock)` returns `shards`, the images on
        the device. `examples` has a (batch, *stage) for each kind of step. Each kind has its own compiled code and CUDA
        graph. `set_stage(*stage)` prepares the network for it.

        Only `load` is timed (docs/method.md, section 6). Three things are not timed: compilation, a warm-up step of
        each kind, which chooses kernels, and the capture of CUDA graphs (if `graphs`). The first two use random images.
        """
        team = self.team
        self.clock = Clock(team.synchronize)
        functions = fast.Functions(make_batch, forward, partial(fast.predict, model.network))
        noise = None  # as large as the images: made only for compilation and warm-up
        if self.compile or self.warm_up:
            noise = load(data.noise_like(images, team), Clock(team.synchronize))
        if self.compile:
            model.restart(0, team)
            plain = functions
            functions = fast.compile_all(plain, model, examples, set_stage, noise, self.micro_batches, precision, team)
            self.is_compiled = functions is not plain
        if self.warm_up:
            model.restart(0, team)
            for batch, *stage in examples:
                set_stage(*stage)
                train_step(functions, noise, batch, *stage)
            evaluate(functions, noise)
        del noise
        shards = load(images, self.clock)
        model.restart(0, team)
        # The capture takes trial steps. Each run begins with fresh weights.
        step = fast.graph(partial(train_step, functions, shards), examples, set_stage, team, graphs and self.graphs)
        self.captured = step if isinstance(step, fast.CudaGraphs) else None
        return step, partial(evaluate, functions, shards)

    @property
    def has_graphs(self) -> bool:
        return self.captured is not None

    def close(self) -> None:
        """Free the graphs, before the process group ends."""
        if self.captured:
            self.captured.reset()

    def restart(self, model: fast.Model, seed: int) -> None:
        """Begin a run: fresh weights, and the clock at the end of the set-up."""
        model.restart(seed, self.team)
        self.clock.begin_run()

    def steps(self, plan: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the batches of an epoch, counted from 1."""
        return enumerate(self.watch(plan), 1)
