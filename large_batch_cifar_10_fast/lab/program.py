"""Make the missing runs of a campaign from a command line. Programs reach `run_program` through their `main`.

A program is a Python file with

* `Hyp`, a frozen dataclass that inherits from `core.hyp.BaseHyp`. Its fields are options: `epochs`, `batch_size`, more;
* `Network(hyp, classes)`, from images [B, 3, 32, 32] to logits [B, classes];
* `train(hyp, images, machine)`, which sets up what all runs share and returns the generator function run(seed). This
  trains one run and yields a `score.Epoch` after each epoch. `with machine.clock.timed("training"):` times training,
  and `("validation")` validation;
* `main()` at the file's end;
* if it likes, `SETS`: further recipes, their names and classes like Hyp.
"""

import contextlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

from torch import nn

from .. import PACKAGE, PROGRAMS, RENDEZVOUS, ConfigError, first_line, system_errors_in_one_line
from ..core.data import Images
from ..core.devices import out_of_memory_hint
from ..core.fast import checksum, precision_on_cpu, precision_on_gpu, prepare_cache_folder
from ..core.hyp import BaseHyp
from ..core.machine import Machine
from ..core.printing import warn
from ..core.score import Epoch
from ..core.team import Team, join_team
from ..images.load import load_images
from . import snapshot
from .campaign import check_processes_agree, conditions
from .log import Recorder
from .options import Options, check_save, parse_options, parser_of
from .store import Campaign
from .table import Row, new_name

LONG = 0.08  # PFLOP of a run, from which on a CPU compiles: about ten minutes on two cores in fp32
FEWEST = 32  # training images for which `Hyp.fit_to` gives options
FEW_STEPS = 8  # steps an epoch, below which a warning names these options
SMALL_STEP = 16  # images of a step, up to which there is no warning: apple2019's options go no lower


def run_program(program: ModuleType, arguments: Sequence[str]) -> list[Row]:
    """Make the missing runs of a campaign. Return the rows of all its finished runs, on rank 0."""
    name, options, hyp = read_command(program, arguments)
    check_save(options.save)
    if (options.nproc or options.teams > 1) and RENDEZVOUS not in os.environ:
        raise ConfigError("--nproc and --teams start processes: use train_cifar_parallel.sh, or torchrun without them")
    with join_team(options.device, options.timeout) as processes, contextlib.ExitStack() as opened:
        prepare_cache_folder(processes)
        team = processes.with_workers(hyp.workers, options.micro_batches)
        images = load_and_check(options, hyp, team)
        sizes = sizes_of(program, hyp, images)
        options = choose_computation(options, hyp.gpu_precision, float(sizes["pflop"] or 0), team)
        common = conditions(options, name, hyp, program, images, sizes, team)
        check_processes_agree(options, common, team)
        campaign = None
        if team.is_main:
            place = name_campaign(snapshot.place_of(arguments), options.resume)
            if RENDEZVOUS not in os.environ:  # the launcher has not kept the code
                file = file_of(program)
                place = place._replace(recipe=name if file.resolve().parent == PACKAGE else str(file))
                snapshot.check_unchanged(program, place)
                for edited in snapshot.edited_files(program):
                    warn(f"{edited.name} was changed after it was loaded: what runs may differ from what is kept")
                snapshot.keep(place)
            campaign = opened.enter_context(Campaign(Path(options.out), place.campaign, options.runs))
            campaign.agree({name: value for name, value in common.items() if name not in ("compile", "no_graph")})
            common = campaign.common
        recorder = Recorder(options, team, common, campaign)
        if team.is_first:
            recorder.print_head(images)
        first = next_run(campaign, team, "first")
        if first is not None:
            machine = Machine(
                team,
                options.precision,
                options.compile,
                not options.no_graph,
                not options.no_warmup,
                options.micro_batches,
                recorder.watch,
            )
            # Close it before the process group ends, also after an error.
            opened.callback(machine.close)
            with out_of_memory_hint("training"):
                run = program.train(hyp, images, machine)
                recorder.ready(machine, hyp.actual_epochs)
                for_use: dict[str, Any] = {"classes": images.class_names, "normalization": images.normalization}
                for_use |= {"size": (32, 32, 3), "options": asdict(hyp)}
                make_runs(run, first, options.seed, campaign, recorder, team, for_use)
        recorder.summary()
        return recorder.requested_rows()


def make_runs(
    run: Callable[[int], Iterator[Epoch]],
    first: int,
    seed: int,
    campaign: Campaign | None,
    recorder: Recorder,
    team: Team,
    for_use: Mapping[str, object],
) -> None:
    """Train one run after the other, from the first on, until none is left to take. All processes must call this."""
    number: int | None = first
    while number is not None:
        recorder.begin(number)
        last: Epoch | None = None
        for last in run(seed + number):
            recorder.epoch(last)
            if last.diverged:
                break
        if last is None:
            raise ConfigError("run(seed) of the program has yielded no Epoch: yield one after each epoch")
        check_weights_agree(last.network, number, team)
        recorder.finish(last, for_use)
        number = next_run(campaign, team, f"after run {number}")


def check_weights_agree(network: nn.Module, run: int, team: Team) -> None:
    """Raise ConfigError if the processes of a team have trained different weights. All must call this."""
    if team.world_size == 1:
        return
    sums = team.gather(f"weights of run {run}", checksum(network))
    others = [rank for rank, each in enumerate(sums) if each != sums[0]]
    if others:
        wrong = f"after run {run} the weights of process {others[0]} differ from process 0's, so the run does not count"
        raise ConfigError(f"{wrong}: test memory and links of the machines, or try --no_compile")


def name_campaign(place: snapshot.Place, resume: bool) -> snapshot.Place:
    """Return a place with a campaign: the named one, the last one with `resume`, or a new one. Raise ConfigError."""
    if resume and not place.campaign:
        raise ConfigError(f"--resume: there is no campaign in {place.out}: start one without --resume")
    return place._replace(campaign=place.campaign or new_name())


def next_run(campaign: Campaign | None, team: Team, key: str) -> int | None:
    """Return the run that rank 0 takes; None if none is left. All processes must call this, with a key of its own."""
    taken = campaign.take_run() if campaign else None
    return json.loads(team.gather(f"run {key}", json.dumps(taken))[0])


@system_errors_in_one_line()
def load_and_check(options: Options, hyp: Any, team: Team) -> Images:
    """Return the images. Raise ConfigError if options or images do not fit the program."""
    images = load_images(options.data, options.holdout)
    check_counts(len(images.train_images), len(images.test_images), team, hyp)
    warn_of_few_steps(len(images.train_images), team, hyp)
    return images


# ---- The command line


def load_program(recipe: str) -> ModuleType:
    """Return the program of a recipe's name, or of FILE.py. Raise ConfigError."""
    if recipe in PROGRAMS:
        return importlib.import_module(f"{PACKAGE.name}.{PROGRAMS[recipe]}")
    if not recipe.endswith(".py"):
        raise ConfigError(f"--recipe {recipe} is neither one of {', '.join(PROGRAMS)} nor FILE.py")
    try:
        program = snapshot.load_file(Path(recipe))
        check_program(program)
    except (Exception, SystemExit) as error:  # of whatever the file does
        raise ConfigError(f"--recipe {recipe} cannot be used ({type(error).__name__}: {first_line(error)})") from error
    return program


def check_program(program: ModuleType) -> None:
    """Raise an error if a file is no program."""
    missing = [part for part in ("Hyp", "Network", "train") if not hasattr(program, part)]
    if missing:
        raise TypeError(f"it has no {' and no '.join(missing)}: copy one of our programs and edit it")
    if program.train.__module__ != program.__name__:
        raise TypeError("it imports `train`, which would use the other program's Network: copy it here")
    if len(inspect.signature(program.train).parameters) != 3:
        raise TypeError("its train must be train(hyp, images, machine) and return run(seed)")
    for recipe, hyp in sets_of(program).items():
        if not issubclass(hyp, BaseHyp):
            raise TypeError("its Hyp must inherit from core.hyp.BaseHyp")
        check_names(hyp)
        parser_of(recipe, hyp)
        hyp()  # each field has a default


def check_names(hyp: type[BaseHyp]) -> None:
    """Raise TypeError for a name in Hyp that is neither a field, nor a ClassVar or property, nor one of BaseHyp."""
    for owner in hyp.__mro__[: hyp.__mro__.index(BaseHyp)]:
        for name, value in vars(owner).items():
            is_own = name in get_type_hints(owner) or isinstance(value, property)
            if not (is_own or name.startswith("_") or hasattr(BaseHyp, name)):
                raise TypeError(f"Hyp.{name} is no field, and BaseHyp has no such name: annotate it, or correct it")


def recipe_of(arguments: Sequence[str], default: str = "apple2019") -> str:
    """Return the value of --recipe on a command line."""
    return snapshot.place_of(arguments, recipe=default).recipe


def read_command(program: ModuleType, arguments: Sequence[str]) -> tuple[str, Options, Any]:
    """Return the recipe's name, the options and the hyper-parameters of a command line.

    A recipe has the name of its program's file, or a name in the program's further `SETS` of hyper-parameters.
    """
    sets = sets_of(program)
    recipe = recipe_of(arguments, file_of(program).stem)
    name = Path(recipe).stem if recipe.endswith(".py") else recipe
    if name not in sets:
        raise ConfigError(f"--recipe {recipe} is not in {file_of(program).name}: use {', '.join(sets)}")
    if name in PROGRAMS and file_of(program).resolve().parent != PACKAGE:  # its results would be taken for ours
        raise ConfigError(f"{file_of(program)} has a recipe with our name {name}: give it another name")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"{file_of(program)} has a recipe {name!a}: use letters, digits and . + - _")
    return name, *parse_options(arguments, name, sets[name])


def sets_of(program: ModuleType) -> dict[str, Any]:
    """Return a program's sets of hyper-parameters: their classes, by the names of their recipes."""
    return {file_of(program).stem: program.Hyp, **getattr(program, "SETS", {})}


def file_of(program: ModuleType) -> Path:
    return Path(str(program.__file__))


# ---- Checks and choices


def check_counts(count: int, tests: int, team: Team, hyp: BaseHyp) -> None:
    """Raise ConfigError if there are too few training images for a step, or fewer test images than processes."""
    if tests < team.world_size:
        raise ConfigError(
            f"{team.world_size} processes need one test image each, there are {tests}: use fewer processes"
        )
    needed = team.total_workers * hyp.actual_batch_size
    if needed > count:
        step = f"{team.total_workers} workers x --batch_size {hyp.actual_batch_size} = {needed} images a step"
        raise ConfigError(f"{step}, more than the training set's {count}: {hint_for(count, hyp)}")
    hyp.check_images(count)


def warn_of_few_steps(count: int, team: Team, hyp: BaseHyp) -> None:
    """Warn if an epoch of so many training images has too few steps to learn much."""
    steps = count // hyp.images_of_step
    if steps < FEW_STEPS and hyp.images_of_step > SMALL_STEP:
        team.warn(f"{count} training images make {steps} steps an epoch, too few to learn: {hint_for(count, hyp)}")


def hint_for(count: int, hyp: BaseHyp) -> str:
    """Return advice for so few training images."""
    options = hyp.fit_to(count) if count >= FEWEST else ""
    return f"try {options}" if options else "use a smaller batch, fewer workers or more images"


def sizes_of(program: ModuleType, hyp: BaseHyp, images: Images) -> dict[str, str]:
    """Return the sizes of a run for its row: training images, trained parameters and PFLOP; "" where unknown."""
    sizes = {"training_images": str(len(images.train_images)), "parameters": "", "pflop": ""}
    with contextlib.suppress(Exception):  # a network that only `train` can make, or that reads values
        network = program.Network(hyp, images.classes)
        parameters = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
        sizes["parameters"] = str(parameters)
        sizes["pflop"] = f"{hyp.flop(network, len(images.train_images)) / 1e15:.4g}"
    return sizes


def choose_computation(options: Options, gpu_precision: str, pflop: float, team: Team) -> Options:
    """Choose precision and compilation where they were not given, by the hardware and by the work of a run."""
    if team.on_gpu:
        precision = precision_on_gpu(options.precision, gpu_precision, team.device)
    else:
        precision = precision_on_cpu(options.precision)
    is_long = team.on_gpu or pflop >= LONG
    use_compiler = options.compile or (is_long and not options.no_compile)
    return replace(options, precision=cast(Any, precision), compile=use_compiler, no_compile=not use_compiler)
