"""Where the time goes: the parts of a run, and a step against a plain one, measured in turn.

    python -m large_batch_cifar_10_fast.bench [--json] [--repeats N] [options of train.py]

The plain path is the same mathematics without any of our speed: contiguous NCHW, eager, the norm as its formula
stands with autograd's gradient, the update parameter by parameter, and float32 unless --plain_precision says
otherwise. Without CUDA it takes one worker a process, or a step would last half a minute. Works under torchrun too.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .compiling import compiled
from .data import EVALUATION_BATCH, Batch
from .distributed import Team, join_team, processes_here
from .images import Images, random_images
from .network import DTYPES, Network, autocast, smoothed_cross_entropy
from .optimizer import NesterovSGD
from .plain import plain_network, plain_update
from .run_log import Clock
from .settings import Refusal, Settings, read_settings
from .train import Model, Task, decide, evaluate, new_tally, on_gpu, prepare, take_step
from .yardsticks import forget_peak_memory, matrix_rate, operations_of_a_step, peak_memory, seconds_since_start

Figures = dict[str, list[float]]  # seconds of a part, one entry a repetition


def timed(team: Team, figures: list[float], work: Callable[[], object]) -> object:
    team.wait()
    start = time.perf_counter()
    result = work()
    team.wait()
    figures.append(time.perf_counter() - start)
    return result


def step_in_parts(model: Model, batch: Batch, update: Callable[[], None], figures: Figures) -> None:
    """Forward, backward, averaging and update, each waited for."""
    images, labels = batch
    parts = {name: figures.setdefault(name, []) for name in ("forward", "backward", "averaging", "update")}

    def forward() -> Tensor:
        with autocast(model.settings.precision, model.team.device):
            return smoothed_cross_entropy(model.forward(images), labels).sum()

    loss = timed(model.team, parts["forward"], forward)
    timed(model.team, parts["backward"], loss.backward)
    timed(model.team, parts["averaging"], lambda: model.team.sum_gradients(model.network))
    timed(model.team, parts["update"], update)


def measure_steps(
    model: Model, plain: Model, task: Task, batches: list[Batch], repeats: int
) -> tuple[Figures, Figures]:
    """Steps of ours and of the plain path in turn, so that a drift of the machine's speed falls on both."""
    ours, theirs = {"step": []}, {"step": []}
    steps = task.train.steps_per_epoch
    optimizer = NesterovSGD(model.network, model.settings, steps)
    plain_optimizer = NesterovSGD(plain.network, plain.settings, steps)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    plain_batch = (whole[0].to(DTYPES[plain.settings.precision]).contiguous(), whole[1])

    def plain_step() -> None:
        with autocast(plain.settings.precision, plain.team.device):
            logits = plain.forward(plain_batch[0])
        smoothed_cross_entropy(logits, plain_batch[1]).sum().backward()
        plain.team.sum_gradients(plain.network)
        plain_update(plain_optimizer)

    for repeat in range(repeats + 1):
        if repeat == 1:  # what came before was the warm-up
            ours, theirs = {"step": []}, {"step": []}
        timed(model.team, ours["step"], lambda: take_step(model, optimizer, batches, new_tally(model.team)))
        timed(model.team, theirs["step"], plain_step)
        model.network.follow(0)
        if model.settings.passes == 1:
            step_in_parts(model, batches[0], optimizer.step, ours)
        step_in_parts(plain, plain_batch, lambda: plain_update(plain_optimizer), theirs)
    return ours, theirs


def bench(settings: Settings, plain_precision: str, repeats: int, start_up: float) -> dict | None:
    """All figures; None on all processes but the leading one."""
    settings.check_processes(processes_here())
    with join_team(settings) as team:
        settings = decide(replace(settings, data="noise"), team, 50_000)
        plain_settings = replace(settings, precision=plain_precision or "fp32", compile=False, passes=1)
        network = Network(torch.zeros(27, 3, 3, 3), settings.width, seed=0).cast(settings.precision, team.device)
        figures: Figures = {}
        fused = timed(team, figures.setdefault("compilation", []), lambda: compiled(network, settings, team))
        model = Model(network, fused, settings, team)
        noise = random_images(50_000, 10_000)
        task = measure_set_up(noise, model, repeats, figures)
        network.restart(task.filters, seed=0)
        forget_peak_memory(team.device)
        batches = next(task.train.epoch(seed=0, epoch=0))
        peak = measure_first_steps(model, task, batches, repeats, figures)
        other = plain_network(plain_settings, team)
        other.restart(task.filters, seed=0)
        plain = Model(other, other, plain_settings, team)
        for seed in range(repeats):
            timed(team, figures.setdefault("augmentation of an epoch", []), lambda s=seed: augment(task, s))
        ours, theirs = measure_steps(model, plain, task, batches, repeats)
        # A CPU would take minutes over 10,000 test images: a chunk, scaled, tells the same.
        chunk = len(task.test[0]) if on_gpu(team) else EVALUATION_BATCH // 4
        test = task.test[0][:chunk], task.test[1][:chunk]
        for _ in range(min(repeats, 3)):
            timed(team, validation := [], lambda: evaluate(model, test))
            figures.setdefault("validation", []).append(validation[0] * len(task.test[0]) / chunk)
        if not team.leads:
            return None
        rate = matrix_rate(settings.precision, team.device)
        done = operations_of_a_step(network, batches[0][0]) * settings.passes * team.processes
        step, count = statistics.median(ours["step"]), settings.batch_size * settings.workers
        epoch = step * task.train.steps_per_epoch
        return {
            "conditions": {
                "device": str(team.device), "processes": team.processes, "workers": settings.workers,
                "batch": settings.batch_size, "width": settings.width, "precision": settings.precision,
                "compiled": fused is not network, "plain precision": plain_settings.precision, "repeats": repeats,
                "threads": torch.get_num_threads(), "torch": torch.__version__,
            },
            **{name: told(values) for name, values in {**figures, **ours}.items()},
            "start-up": told([start_up]),
            "plain": {name: told(values) for name, values in theirs.items()},
            "step": {**told(ours["step"]), "ratio": ratio(theirs["step"], ours["step"])},
            "images per second": count / step,
            "TFLOP/s": done / step / 1e12,
            "share of the matrix product's rate": done / step / rate / team.processes,
            "augmentation, share of an epoch": statistics.median(figures["augmentation of an epoch"]) / epoch,
            "peak memory per process, GiB": peak / 2**30,
        }  # fmt: skip


def measure_set_up(noise: Images, model: Model, repeats: int, figures: Figures) -> Task:
    for _ in range(min(repeats, 3)):
        clock = Clock(model.team.wait)
        task = prepare(noise, model.settings, model.team, clock)
        for part, seconds in clock.seconds.items():
            figures.setdefault(part, []).append(seconds)
    return task


def measure_first_steps(model: Model, task: Task, batches: list[Batch], repeats: int, figures: Figures) -> int:
    """The peak memory, in bytes, of a step of ours before anything of the plain path has run.

    On a GPU also what launches cost: when the host has handed a step over, and how long the step takes as one
    CUDA graph. Training uses none: first it has to show here that it pays.
    """
    team, optimizer = model.team, NesterovSGD(model.network, model.settings, task.train.steps_per_epoch)

    def step() -> None:
        take_step(model, optimizer, batches, tally)

    tally = new_tally(team)
    step()
    team.wait()
    peak = peak_memory(team.device)
    if not on_gpu(team):
        return peak
    for _ in range(repeats):
        team.wait()
        start = time.perf_counter()
        step()
        figures.setdefault("launching of a step", []).append(time.perf_counter() - start)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # capturing wants one on a stream of its own first
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(repeats):
            timed(team, figures.setdefault("step as one CUDA graph", []), graph.replay)
    except RuntimeError as error:
        print(f"bench: no CUDA graph of a step: {error}", file=sys.stderr)
    return peak


def augment(task: Task, seed: int) -> None:
    for _ in task.train.epoch(seed, epoch=1):
        pass


def told(values: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(plain: list[float], ours: list[float]) -> float:
    """How many times faster ours is: the median over pairs measured one after the other."""
    return statistics.median(p / o for p, o in zip(plain, ours, strict=True))


def as_text(figures: dict) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in figures["conditions"].items()), ""]
    lines.append(f"{'':28}{'seconds':>10}{'least':>10}{'most':>10}{'plain':>10}{'ratio':>8}")
    for name, value in figures.items():
        if not isinstance(value, dict) or "seconds" not in value:
            continue
        line = f"{name:28}{value['seconds']:10.4f}{value['least']:10.4f}{value['most']:10.4f}"
        if name in figures["plain"]:
            plain = figures["plain"][name]["seconds"]
            times = value.get("ratio", plain / value["seconds"] if value["seconds"] else None)
            line += f"{plain:10.4f}" + (f"{times:8.2f}" if times else f"{'-':>8}")
        lines.append(line)
    lines.append("")
    lines += [f"{name:40}{value:12.4g}" for name, value in figures.items() if isinstance(value, float)]
    return "\n".join(lines)


def main() -> None:
    start_up = seconds_since_start()
    parser = argparse.ArgumentParser(
        prog="python -m large_batch_cifar_10_fast.bench", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    parser.add_argument("--repeats", type=int, default=5, help="measured repetitions of a step (default 5)")
    parser.add_argument("--plain_precision", choices=list(DTYPES), default="", help="of the plain path (default fp32)")
    options, others = parser.parse_known_args()
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment.setdefault("WORKERS", str(processes_here()))
    try:
        if options.repeats < 1:
            raise Refusal(f"--repeats {options.repeats} must be at least 1")
        settings = read_settings(others, environment)
        figures = bench(settings, options.plain_precision, options.repeats, start_up)
    except Refusal as refusal:
        print(f"bench: {refusal}", file=sys.stderr)
        sys.exit(2)
    if figures:
        print(json.dumps(figures, indent=2) if options.json else as_text(figures))


if __name__ == "__main__":
    main()
