"""Make the missing runs of a campaign in this process, or in several processes together."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import RENDEZVOUS, ConfigError, __version__, commit
from ..core.clock import PARTS, Clock
from ..core.data import Images
from ..core.devices import driver_and_clocks, hardware_name, peak_memory
from ..core.hyp import BaseHyp, settings_of
from ..core.machine import Machine
from ..core.model import checksum
from ..core.precision import choose_precision
from ..core.printing import show, warn
from ..core.score import Epoch
from ..core.team import Team, join_team
from ..images.load import SYNTHETIC, load_images
from . import snapshot
from .log import Progress, print_head, print_run, print_set_up, print_summary
from .model import save_weights
from .options import Options, as_words, check_save, text_of
from .program import read_command
from .store import Campaign
from .table import GOAL, OPTION, Row, differences, must_agree, new_name

LONG = 0.08  # a CPU compiles runs of at least this many PFLOP: about ten minutes on two cores in fp32


def run_program(program: ModuleType, arguments: Sequence[str]) -> list[Row]:
    """Make the missing runs of a campaign. Return the rows of all its finished runs, on rank 0."""
    name, options, unfitted = read_command(program, arguments)
    check_save(options.save)
    is_launched = RENDEZVOUS in os.environ
    with join_team(options.device, options.timeout) as processes, contextlib.ExitStack() as opened:
        team = processes.with_workers(unfitted.workers, options.micro_batches)
        images = load_images(options.data, options.holdout)
        count = len(images.train_images)
        hyp = read_command(program, arguments, count)[2]
        if count < hyp.images_of_step:
            raise ConfigError(
                f"a step has {hyp.images_of_step} images, but {count} train: reduce --batch_size or --workers"
            )
        changed = {name: value for name, value in asdict(hyp).items() if value != getattr(unfitted, name)}
        if changed:
            show(f"for {count} training images: {' '.join(as_words(changed))}")
        sizes = sizes_of(program, hyp, images)
        options = choose_computation(options, hyp.gpu_precision, float(sizes["pflop"] or 0), team)
        common = conditions(options, name, hyp, program, images, sizes, team)
        check_processes_agree({name: value for name, value in common.items() if must_agree(name)}, team)
        campaign = None
        if team.is_main:
            place = snapshot.place_of(arguments).named()
            if not is_launched:  # otherwise the launcher has kept the code
                snapshot.check_unchanged(program, place)
                snapshot.keep(place)
            campaign = opened.enter_context(Campaign(place.out, place.campaign, options.runs))
            campaign.agree({name: value for name, value in common.items() if name not in ("compile", "no_graph")})
            if options.save and options.runs - 1 in campaign.rows:
                warn(f"--save {options.save} is not written: run {options.runs - 1} is finished")
            print_head(images, campaign)
        first = next_run(campaign, team, "first")
        if first is not None:
            machine = Machine(
                team,
                options.precision,
                options.compile,
                not options.no_graph,
                not options.no_warmup,
                options.micro_batches,
            )
            opened.callback(machine.close)  # before the process group ends, also after an error
            run = program.train(hyp, images, machine)
            if campaign:
                no_graph = team.on_gpu and not machine.captured
                campaign.agree({"compile": str(machine.is_compiled), "no_graph": str(no_graph)})
                campaign.common |= driver_and_clocks(team.device)  # after the warm-up: an idle GPU slows down
                print_set_up(machine, campaign)
            for_use = {"options": asdict(hyp), "classes": images.class_names, "normalization": images.normalization}
            make_runs(run, first, options, campaign, machine, hyp.actual_epochs, for_use)
        if not campaign:
            return []
        campaign.write_tables(at_once=True)
        if not is_launched:  # otherwise the launcher prints it
            print_summary(campaign.requested)
        return campaign.requested


# ---- The runs


def make_runs(
    run: Callable[[int], Iterator[Epoch]],
    first: int,
    options: Options,
    campaign: Campaign | None,
    machine: Machine,
    epochs: int,
    for_use: Mapping[str, object],
) -> None:
    """Train one run after the other, from the first on, until none is left to take. All processes must call this.

    Rank 0 writes epochs, rows, and the weights of the last run, with the data `for_use`.
    """
    team = machine.team
    finished = len(campaign.requested) if campaign else 0
    progress = Progress(team.is_main, epochs, options.runs, finished)
    number: int | None = first
    while number is not None:
        curve: list[dict[str, float]] = []
        last: Epoch | None = None
        for last in run(options.seed + number):
            curve.append(last.row())
            progress.show(number, last, machine.clock.last["training"])
            if last.diverged:
                break
        assert last, "run(seed) of the program yields an Epoch after each epoch"
        check_weights_agree(last.network, number, team)
        if campaign:
            row = {"run": number, "seed": options.seed + number, **row_of_run(curve, last, machine.clock)}
            campaign.add_run(number, row | {"peak_memory": peak_memory(team.device)}, curve)
            campaign.write_tables()
            print_run(campaign.rows[number])
            if last.diverged:
                warn(f"run {number} stopped after epoch {last.number}: its loss is not finite")
            if number == options.runs - 1 and options.save:
                save_weights(Path(options.save), last.network.state_dict(), campaign.rows[number], for_use)
                show(f"{options.save} has the weights of run {number}, for cifar10-fast evaluate and predict")
        number = next_run(campaign, team, f"after run {number}")
    progress.bar.close()


def row_of_run(epochs: Sequence[dict[str, float]], last: Epoch, clock: Clock) -> dict[str, Any]:
    """Return the results of a run, from its epochs and its clock."""
    at_goal = [epoch for epoch in epochs if epoch["validation_accuracy"] >= GOAL]
    reached = at_goal[0] if at_goal and not last.diverged else {"epoch": "", "seconds": ""}
    return {
        **epochs[-1],
        "validation_count": last.validation.correct,
        "validation_images": last.validation.images,
        **{part: clock.seconds[part] for part in PARTS},
        "cpu_seconds": clock.cpu_seconds,
        "last_validation": clock.last["validation"],
        "goal_epoch": reached["epoch"],
        "goal_seconds": reached["seconds"],
    }


def next_run(campaign: Campaign | None, team: Team, key: str) -> int | None:
    """Return the run that rank 0 takes; None if none is left. All processes must call this, with a key of its own."""
    taken = campaign.take_run() if campaign else None
    return json.loads(team.gather(f"run {key}", json.dumps(taken))[0])


def check_weights_agree(network: nn.Module, run: int, team: Team) -> None:
    """Raise ConfigError if the processes have trained different weights. All must call this."""
    if team.world_size > 1 and len({*team.gather(f"weights of run {run}", checksum(network))}) > 1:
        raise ConfigError(f"the processes have different weights, so run {run} does not count: try --no_compile")


# ---- The conditions


def conditions(
    options: Options,
    name: str,
    hyp: Any,
    program: ModuleType,
    images: Images,
    sizes: Mapping[str, str],
    team: Team,
) -> dict[str, str]:
    """Return the values that all rows of a launch share, as texts: recipe, images, code, device, versions."""
    names = " and ".join(sorted(set(team.gather("device", hardware_name(team.device)))))
    device = f"{team.world_size} x {names}"
    if not team.on_gpu:
        device = f"CPU {names}, {team.world_size} x {torch.get_num_threads()} threads"
    common: dict[str, Any] = {
        "recipe": name,
        **{f"{OPTION}{option}": text_of(value) for option, value in settings_of(hyp).items()},
        "workers": team.total_workers,
        "data": options.data if options.data == SYNTHETIC else os.path.abspath(options.data),
        "images": images.name,
        **sizes,
        "digest": images.digest,
        "precision": options.precision,
        "micro_batches": options.micro_batches,
        "compile": options.compile,
        "no_graph": options.no_graph,
        "device": device,
        "processes": team.world_size,
        "version": __version__,
        "commit": commit(),
        **snapshot.digests(program),
        "torch": version("torch"),
        "seed": options.seed,  # the seed of run 0
        "launch": os.environ.get(RENDEZVOUS, new_name()),  # which launch made a run
    }
    return {name: str(value) for name, value in common.items()}


def check_processes_agree(values: Mapping[str, str], team: Team) -> None:
    """Raise ConfigError if the conditions of a process differ from another's."""
    for rank, text in enumerate(team.gather("conditions", json.dumps(values))):
        found = differences(json.loads(text), values, values)
        if found:
            raise ConfigError(f"process {rank} differs from process {team.rank} in {found}: give all the same options")


def sizes_of(program: ModuleType, hyp: BaseHyp, images: Images) -> dict[str, str]:
    """Return the sizes of a run for its row: training images, trained parameters and PFLOP; "" where unknown."""
    sizes = {"training_images": str(len(images.train_images)), "parameters": "", "pflop": ""}
    try:
        network = program.Network(hyp, images.classes)
        parameters = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
        sizes["parameters"] = str(parameters)
        sizes["pflop"] = f"{hyp.flop(network, len(images.train_images)) / 1e15:.4g}"
    except Exception as error:  # a network that only `train` can make, or that reads values
        warn(f"pflop is not known ({error!r})")
    return sizes


def choose_computation(options: Options, gpu_precision: str, pflop: float, team: Team) -> Options:
    """Choose precision and compilation where they were not given, by the hardware and by the work of a run."""
    precision: Any = choose_precision(options.precision, gpu_precision, team.device)
    is_long = team.on_gpu or pflop >= LONG
    use_compiler = options.compile or (is_long and not options.no_compile)
    return replace(options, precision=precision, compile=use_compiler)
