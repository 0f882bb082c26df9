"""Where and how a program computes, and its set-up: compile, check, warm up, upload, capture graphs.

In a notebook, `Machine()` trains on this process's GPU or CPU. The command line makes a Machine from its options.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .clock import Clock
from .compiled import change_by_update, compile_checked, results_of_pass
from .cpu import keep_freed_memory
from .data import Images, Shards, random_images
from .devices import take_device
from .evaluation import chunks, predict, predict_all
from .graphs import CudaGraphs, capture_all
from .model import Model
from .precision import Precision, choose_precision
from .printing import show
from .score import Score, read_score, sums_of
from .team import Team


class Machine:
    """The processes that train, how they compute, their images, and their clock.

    A program calls `restart`, `make_batch`, `forward`, `step` and `evaluate`. During the set-up, `shards` has random
    images.
    """

    _make_batch: Callable  # (all images, all labels, batch, *stage) to (images, labels)
    forward: Callable  # (images, labels, *stage) to the results of a pass
    predict: Callable  # (network, images) to logits
    step: Callable[..., None]  # (batch, *stage): the program's `train_step`, or its CUDA graphs
    shards: Shards

    def __init__(
        self,
        team: Team | None = None,
        precision: str = "",
        compile: bool | None = None,
        graphs: bool = True,
        warm_up: bool = True,
        micro_batches: int = 1,
    ) -> None:
        """By default, use this process only, in the precision that the command line chooses; compile on a GPU only.

        `graphs`: replay CUDA graphs. `warm_up`: take an untimed step of each kind. `micro_batches`: forward and
        backward passes per step.
        """
        self.team = team or Team(0, 1, take_device())
        if not self.team.on_gpu:
            keep_freed_memory()
        self.asked_precision = precision
        self.compile = self.team.on_gpu if compile is None else compile
        self.graphs = graphs
        self.warm_up = warm_up
        self.micro_batches = micro_batches
        self.clock = Clock(self.team.synchronize)
        self.is_compiled = False  # whether compilation succeeded
        self.captured: CudaGraphs | None = None

    def assign_workers(self, workers: int) -> Team:
        """Assign a program's workers to the processes. Return the team. Raise ConfigError if that is impossible."""
        self.team = self.team.with_workers(workers, self.micro_batches)
        return self.team

    def choose_precision(self, preferred: str, half_weights: bool) -> Precision:
        """Return the precision: `preferred` is a GPU's default. Raise ConfigError."""
        name = choose_precision(self.asked_precision, preferred, self.team.device)
        self.precision = Precision(name, self.team.device, half_weights)
        return self.precision

    def set_up(
        self,
        images: Images,
        model: Model,
        make_batch: Callable,
        forward: Callable,
        load: Callable[[Images, Clock], Shards],
        train_step: Callable[..., None],
        examples: Sequence[tuple],
    ) -> None:
        """Get ready to be timed: compile, warm up, load the images and, if `graphs`, capture CUDA graphs.

        `make_batch(images, labels, batch, *stage)` and `forward(images, labels, *stage)` are the functions to compile.
        `load(images, clock)` returns the images on the device. `train_step(batch, *stage)` is a step; `examples` has
        its arguments for each kind of step. Each kind has its own compiled code and CUDA graph.

        Only `load` is timed (docs/method.md, section 6). Three things are not timed: compilation, a warm-up step of
        each kind, which chooses kernels, and the capture of CUDA graphs. The first two use random images.
        """
        team = self.team
        self._make_batch = make_batch
        self.forward = forward
        self.predict = predict
        self.step = train_step
        self.clock = Clock(team.synchronize)
        if self.compile or self.warm_up:
            # A CPU gets few test images: it chooses no kernels by their number.
            tests = len(images.test_images) if team.on_gpu else team.world_size
            noise = random_images(len(images.train_images), tests, images.classes)
            self.shards = load(noise, Clock(team.synchronize))
        if self.compile:
            model.restart(0, team)
            self.compile_all(model, examples)
        if self.warm_up:
            model.restart(0, team)
            for example in examples:
                train_step(*example)
            self.logits(model.network, "one")
        vars(self).pop("shards", None)  # frees the random images
        self.shards = load(images, self.clock)
        if team.on_gpu:
            torch.cuda.reset_peak_memory_stats(team.device)  # before the capture: a replay allocates nothing
        if team.on_gpu and self.graphs:
            self.captured = capture_all(train_step, examples, team)
            self.step = self.captured or train_step

    def compile_all(self, model: Model, examples: Sequence[tuple]) -> None:
        """Compile the forward pass; on a GPU also batches, updates and evaluation."""
        show("compiling, about a minute without a cache")
        network = model.network
        precision = self.precision
        parts = [(batch.chunk(self.micro_batches, dim=1)[0], *stage) for batch, *stage in examples]  # one pass

        def passes(forward: Callable, part: Tensor, *stage: Any) -> dict[str, Tensor]:
            images, _ = self.make_batch(part, *stage)
            with torch.no_grad(), precision.autocast():
                predicted = network(images).argmax(1)
            # All labels are the class predicted most often. So gradients add up, and some images are correct.
            labels = predicted.mode().values.expand_as(predicted).contiguous()
            return results_of_pass(network, forward, images, labels, *stage)

        def batches(function: Callable, *part: Any) -> dict[str, Tensor]:
            made = function(self.shards.images, self.shards.labels, *part)
            return dict(zip(("images", "labels"), made, strict=True))

        @torch.no_grad()
        def logits_of(function: Callable, images: Tensor) -> dict[str, Tensor]:
            network.eval()
            with precision.autocast():
                found = function(network, images)
            network.train()
            return {"logits": found}

        def updates(update: Callable, optimizer: Any) -> dict[str, Tensor]:
            optimizer.update = update
            part, *stage = parts[0]
            self.forward(*self.make_batch(part, *stage), *stage).loss.backward()
            changes = change_by_update(optimizer, precision)
            network.zero_grad()
            return changes

        compiled = partial(compile_checked, precision=precision.name, team=self.team)
        plain = self.forward
        self.forward = compiled("training", plain, passes, parts)
        self.is_compiled = self.forward is not plain
        if self.is_compiled and self.team.on_gpu:
            for number, optimizer in enumerate(model.optimizers):
                if hasattr(optimizer, "update"):  # it is ours
                    optimizer.update = compiled(f"update {number}", optimizer.update, updates, [(optimizer,)])
            self._make_batch = compiled("batches", self._make_batch, batches, parts)
            test_images = list(chunks(self.shards.test_images))  # the last may be smaller
            self.predict = compiled("evaluation", self.predict, logits_of, [(test_images[0],), (test_images[-1],)])

    def close(self) -> None:
        """Free the graphs, before the process group ends."""
        if self.captured:
            self.captured.reset()

    def restart(self, model: Model, seed: int) -> None:
        """Begin a run: fresh weights, and the clock at the end of the set-up."""
        model.restart(seed, self.team)
        self.clock.begin_run()

    def evaluate(self, network: nn.Module, losses_of: Callable[[Tensor, Tensor], Tensor], views: str) -> Score:
        """Return a network's score on all test images. `losses_of(logits, labels)` are the losses of images."""
        logits = self.logits(network, views)
        labels = self.shards.test_labels
        return read_score(sums_of(logits, labels, losses_of(logits, labels)), self.team)

    def logits(self, network: nn.Module, views: str) -> Tensor:
        """Return the logits of this process's test images, by rank 0's buffers: running statistics of worker 0."""
        network.eval()
        self.team.broadcast(*network.buffers())
        with torch.no_grad(), self.precision.autocast():
            found = predict_all(partial(self.predict, network), self.shards.test_images, views)
        network.train()
        return found

    def make_batch(self, batch: Tensor, *stage: Any) -> tuple[Tensor, Tensor]:
        """Return augmented images and labels for a forward pass."""
        return self._make_batch(self.shards.images, self.shards.labels, batch, *stage)
