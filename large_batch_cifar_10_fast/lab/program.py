"""Make the missing runs of a campaign from a command line. The last line of each program calls this module.

A program is a Python file with

* `Hyp`, a frozen dataclass whose fields are its options: `epochs`, `batch_size`, any others; `workers` (1 without it);
* `Network(hyp, classes)`, from images [B, 3, 32, 32] to logits [B, classes];
* `train(hyp, images, machine)`, which sets up what all runs share and returns the generator function run(seed). This
  trains one run and yields a `score.Epoch` after each epoch. `with machine.clock.timed("training"):` times training,
  and `("validation")` validation;
* `main()` at the file's end;
* if it likes, `SETS` (further recipes: their names and classes like Hyp), `DEMO` (what --demo changes), `Hyp.small`
  (options that --small gives, as words), `Hyp.half` (its precision on a GPU that has it, fp16 or bf16),
  `Hyp.check_images(count)` (a ConfigError for too few of them), `Hyp.fit_to(count)` (options for a small data set),
  `Hyp.views` (of a test image) and `Hyp.label_smoothing` (of the loss) for `api`, and `flop(hyp, images)` of a run, if
  not all epochs are alike.
"""

import contextlib
import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from .. import PACKAGE, PROGRAMS, RENDEZVOUS, ConfigError, first_line
from ..core.data import Images
from ..core.devices import out_of_memory_hint
from ..core.fast import checksum, count_flop, precision_on_cpu, precision_on_gpu, prepare_cache_folder
from ..core.machine import Machine
from ..core.score import Epoch
from ..core.team import Team, join_team, warn
from ..files import temporary_folder
from ..images.load import load_images
from ..loading import load_file
from . import source
from .campaign import Campaign, check_processes_agree, conditions
from .log import LONG, Recorder, warned
from .options import Options, as_words, check_fields, check_save, from_texts, parse_options
from .profile import profiled
from .table import Row, campaign_named

CORE = 70e9  # FLOP/s of a CPU core in float32, as measured: 30 images/s of the default recipe
FEWEST = 32  # training images for which `Hyp.fit_to` gives options
FEW_STEPS = 8  # steps an epoch, below which a warning names these options
SMALL_STEP = 16  # images of a step, up to which there is no warning: apple2019's options go no lower
BF16 = 4  # times as fast, compiled: 2.6 to 6.0 as measured on two AMD EPYC and an Intel Xeon with AMX


def run_program(program: ModuleType, arguments: Sequence[str]) -> list[Row]:
    """Make the missing runs of a campaign. Return the rows of all its finished runs, on rank 0."""
    name, options, hyp = read_command(program, arguments)
    check_save(options.save)
    temporary_folder().cleanup()  # check early: torch's errors without such a folder say nothing
    if (options.nproc or options.teams > 1) and RENDEZVOUS not in os.environ:
        raise ConfigError("--nproc and --teams start processes: use train_cifar_parallel.sh, or torchrun without them")
    with join_team(options.device, options.timeout) as processes, contextlib.ExitStack() as opened:
        prepare_cache_folder(processes)
        team = processes.with_workers(workers_of(hyp), options.micro_batches)
        images = load_and_check(options, hyp, team)
        flop = flop_of(program, hyp, len(images.train_images), images.classes)
        was_asked = options.precision or options.demo
        options = choose_computation(options, getattr(hyp, "half", "fp16"), flop, team)
        sizes = sizes_of(program, hyp, images, flop)
        common = conditions(options, name, hyp, program, images, sizes, team)
        check_processes_agree(options, common, team)
        campaign = None
        if team.is_main and not options.profile:  # which makes no run
            campaign_name = campaign_named(Path(options.out), options.campaign, options.resume)
            campaign = opened.enter_context(Campaign(campaign_name, Path(options.out), options.runs))
        if not was_asked:
            options = in_precision_of(campaign, options, team)
            common["precision"] = options.precision
        if campaign:
            campaign.begin(common, program)
            common = campaign.common
        recorder = Recorder(options, team, common, campaign)
        if team.is_first:
            recorder.print_head(images)
        expected = 0.0 if team.on_gpu else estimate_seconds(flop, team.world_size, options.precision)
        recorder.warn_of_hours(expected)
        if campaign:
            warn_of_weights(options, campaign)
        first = 0 if options.profile else next_run(campaign, team, "first")
        if first is not None:
            watch = partial(profiled, options.profile, Path(options.out) / "trace.json", team)
            machine = Machine(
                team,
                options.precision,
                options.compile,
                not options.no_graph,
                not options.no_warmup,
                options.micro_batches,
                watch if options.profile else recorder.watch,
            )
            if campaign:
                with warned("the program's source"):
                    source.store(program, campaign.out)
            # Close it before the process group ends, also after an error.
            opened.callback(machine.close)
            with out_of_memory_hint("training"):
                run = program.train(hyp, as_trained_on(images, options, team), machine)
                recorder.ready(machine, hyp.epochs, flop)
                if options.profile:
                    next(run(options.seed))
                else:
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
        images = 0
        last: Epoch | None = None
        for last in run(seed + number):
            images += last.train.images
            recorder.epoch(last)
            if last.diverged:
                break
        if last is None:
            raise ConfigError("run(seed) of the program has yielded no Epoch: yield one after each epoch")
        check_weights_agree(last.network, number, team)
        recorder.finish(last, images, for_use)
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


def next_run(campaign: Campaign | None, team: Team, key: str) -> int | None:
    """Return the run that rank 0 takes; None if none is left. All processes must call this, with a key of its own."""
    taken = campaign.take_run() if campaign else None
    return json.loads(team.gather(f"run {key}", json.dumps(taken))[0])


def load_and_check(options: Options, hyp: Any, team: Team) -> Images:
    """Return the images. Raise ConfigError if options or images do not fit the program."""
    images = load_images(options.data, options.holdout)
    check_counts(len(images.train_images), len(images.test_images), team, hyp)
    warn_of_few_steps(len(images.train_images), team, hyp)
    return images


def as_trained_on(images: Images, options: Options, team: Team) -> Images:
    """Return the images; to profile steps, with few test images."""
    if options.profile:
        few = team.world_size
        images = replace(images, test_images=images.test_images[:few], test_labels=images.test_labels[:few])
    return images


def warn_of_weights(options: Options, campaign: Campaign) -> None:
    """Warn if the file --save is missing, but the run with its weights is already finished."""
    last = options.runs - 1
    if options.save and not os.path.exists(options.save) and last in campaign.rows:
        warn(f"--save {options.save}: run {last} is already finished, so its weights cannot be saved")


# ---- The command line


def load_program(recipe: str) -> ModuleType:
    """Return the program of a recipe's name, or of FILE.py. Raise ConfigError."""
    if recipe in PROGRAMS:
        return importlib.import_module(f"{PACKAGE.name}.{PROGRAMS[recipe]}")
    try:
        if not recipe.endswith(".py"):
            raise LookupError(f"neither one of {', '.join(PROGRAMS)} nor FILE.py")
        program = load_file(Path(recipe))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # of whatever the file does
        raise ConfigError(f"--recipe {recipe} cannot be used ({type(error).__name__}: {first_line(error)})") from error
    check_program(program)
    return program


def check_program(program: ModuleType) -> None:
    """Raise ConfigError if a file is no program."""
    file = file_of(program)
    missing = [part for part in ("Hyp", "Network", "train") if not hasattr(program, part)]
    if missing:
        raise ConfigError(f"{file} has no {' and no '.join(missing)}: copy one of our programs and edit it")
    if program.train.__module__ != program.__name__:
        raise ConfigError(f"{file} imports `train`, which would use the other program's Network: copy it here")
    expected = len(inspect.signature(program.train).parameters)
    if expected != 3:
        contract = "it must be train(hyp, images, machine) and return run(seed)"
        raise ConfigError(f"{file} has a train of {expected} parameters: {contract}")
    for recipe, hyp in sets_of(program).items():
        check_fields(recipe, hyp)


def recipe_of(arguments: Sequence[str], default: str = "apple2019") -> str:
    """Return the value of --recipe on a command line."""
    recipe = default
    for place, word in enumerate(arguments):
        if word == "--recipe":
            recipe = "".join(arguments[place + 1 : place + 2])  # "" if it comes last
        elif word.startswith("--recipe="):
            recipe = word.partition("=")[2]
    return recipe


def read_command(program: ModuleType, arguments: Sequence[str]) -> tuple[str, Options, Any]:
    """Return the recipe's name, the options and the hyper-parameters of a command line.

    A recipe has the name of its program's file, or a name in the program's further `SETS` of hyper-parameters.
    """
    own = file_of(program).stem
    sets = sets_of(program)
    recipe = recipe_of(arguments, own)
    name = Path(recipe).stem if recipe.endswith(".py") else recipe
    if name not in sets:
        raise ConfigError(f"--recipe {recipe} is not in {file_of(program).name}: use {', '.join(sets)}")
    if name in PROGRAMS and file_of(program).resolve().parent != PACKAGE:  # its results would be taken for ours
        raise ConfigError(f"{file_of(program)} has a recipe with our name {name}: give it another name")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"{file_of(program)} has a recipe {name!a}: use letters, digits and . + - _")
    demo = getattr(program, "DEMO", {}) if name == own else {}
    options, hyp = parse_options(arguments, name, sets[name], demo)
    return name, options, hyp


def sets_of(program: ModuleType) -> dict[str, Any]:
    """Return a program's sets of hyper-parameters: their classes, by the names of their recipes."""
    return {file_of(program).stem: program.Hyp, **getattr(program, "SETS", {})}


def file_of(program: ModuleType) -> Path:
    return Path(str(program.__file__))


# ---- Recipes of stored results


def hyp_class(recipe: str) -> Any:
    """Return the class of hyper-parameters of one of our recipes; None for another recipe."""
    return sets_of(load_program(recipe))[recipe] if recipe in PROGRAMS else None


def stored_hyp(program: ModuleType, recipe: str, values: Mapping[str, object]) -> Any:
    """Return hyper-parameters that were stored with weights or in a table, perhaps as texts. Raise ConfigError."""
    hyp = sets_of(program).get(recipe, program.Hyp)
    return parse_options(as_words(from_texts(values, hyp)), recipe, hyp, {})[1]


# ---- Checks and choices


def workers_of(hyp: Any) -> int:
    return getattr(hyp, "workers", 1)


def check_counts(count: int, tests: int, team: Team, hyp: Any) -> None:
    """Raise ConfigError if there are too few training images for a step, or fewer test images than processes."""
    if tests < team.world_size:
        raise ConfigError(
            f"{team.world_size} processes need one test image each, there are {tests}: use fewer processes"
        )
    needed = team.total_workers * hyp.batch_size
    if needed > count:
        step = f"{team.total_workers} workers x --batch_size {hyp.batch_size} = {needed} images a step"
        raise ConfigError(f"{step}, more than the training set's {count}: {hint_for(count, hyp)}")
    if hasattr(hyp, "check_images"):
        hyp.check_images(count)


def warn_of_few_steps(count: int, team: Team, hyp: Any) -> None:
    """Warn if an epoch of so many training images has too few steps to learn much."""
    images_of_step = team.total_workers * hyp.batch_size
    steps = count // images_of_step
    if steps < FEW_STEPS and images_of_step > SMALL_STEP:
        team.warn(f"{count} training images make {steps} steps an epoch, too few to learn: {hint_for(count, hyp)}")


def hint_for(count: int, hyp: Any) -> str:
    """Return advice for so few training images."""
    if count >= FEWEST and hasattr(hyp, "fit_to"):
        return f"try {hyp.fit_to(count)} (as many steps and the same rate per image as on CIFAR-10)"
    return "use a smaller batch, fewer workers or more images"


def flop_of(program: ModuleType, hyp: Any, images: int, classes: int = 10) -> float:
    """Return the floating-point operations of a run's training steps, on so many images; NaN if they are unknown."""
    try:
        if hasattr(program, "flop"):
            return program.flop(hyp, images)
        return images * hyp.epochs * count_flop(program.Network(hyp, classes))
    except Exception:  # for example, the network reads values, and the counter computes none
        return math.nan


def sizes_of(program: ModuleType, hyp: Any, images: Images, flop: float) -> dict[str, str]:
    """Return the sizes of a run for its row: training images, trained parameters and PFLOP; "" where unknown."""
    try:
        network = program.Network(hyp, images.classes)
        parameters = str(sum(weight.numel() for weight in network.parameters() if weight.requires_grad))
    except Exception:  # of a network that only `train` can make
        parameters = ""
    pflop = f"{flop / 1e15:.4g}" if math.isfinite(flop) else ""
    return {"training_images": str(len(images.train_images)), "parameters": parameters, "pflop": pflop}


def estimate_seconds(flop: float, processes: int, precision: str) -> float:
    """Return an estimate of the seconds of a run on the cores of so many processes."""
    cores = torch.get_num_threads() * processes
    return flop / (CORE * cores) / (BF16 if precision == "bf16" else 1)


def choose_computation(options: Options, half: str, flop: float, team: Team) -> Options:
    """Choose precision and compilation where they were not given. All processes must call this.

    The demo is in fp32 and not compiled. Otherwise a GPU compiles. A CPU compiles if a run takes an estimated ten
    minutes or more.
    """
    asked = options.precision or ("fp32" if options.demo else "")
    precision = precision_on_gpu(asked, half, team) if team.on_gpu else precision_on_cpu(asked, team)
    is_long = team.on_gpu or estimate_seconds(flop, team.world_size, "fp32") > LONG
    use_compiler = options.compile or (is_long and not options.demo and not options.no_compile)
    return replace(options, precision=cast(Any, precision), compile=use_compiler, no_compile=not use_compiler)


def in_precision_of(campaign: Campaign | None, options: Options, team: Team) -> Options:
    """Return the options with the precision of the campaign's first launch, because a busy machine may choose another.

    All processes must call this.
    """
    known = campaign.agree({"precision": options.precision})["precision"] if campaign else options.precision
    return replace(options, precision=cast(Any, team.gather("precision of the campaign", known)[0]))
