"""Whatever can be refused before training is refused here: processes, images, outputs, a campaign to go on with."""

import os
import zipfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ..data.cifar10 import Images, count_training_images, load_images
from ..distributed import DistContext
from ..recipe import Recipe, images_of_an_epoch
from ..results.provenance import code_digest
from ..results.resuming import check_unchanged
from ..results.tables import Row, read_rows
from ..settings.settings import SYNTHETIC, ConfigError, Settings, as_pairs, from_pairs, has_option, spelled

TABLES = ("runs.tsv", "epochs.tsv", "timing_log.tsv")
LONGEST_NAME = 240  # bytes: files have 255, and while they are written a few more than their names


def check_request(settings: Settings, recipe: Recipe, world_size: int, writes: bool, finished: list[Row]) -> None:
    """Raise ConfigError for what cannot be trained; CIFAR-10 is fetched here if need be.

    `writes`: whether this process, or its launcher, writes the tables. `finished`: the rows of a resumed campaign.
    """
    check_processes(settings, recipe, world_size)
    if writes:
        check_out(settings)
    if settings.data != SYNTHETIC and not os.path.abspath(settings.data).isprintable():
        raise ConfigError(f"--data {settings.data}: the name of the folder it lies in cannot stand in a table; move it")
    check_images(recipe, count_training_images(settings.data))
    for row in finished[-1:]:
        check_unchanged(row, processes=world_size, digest=load_images(settings.data).digest)


def check_agreement(settings: Settings, recipe: Recipe, images: Images, finished: list[Row], ctx: DistContext) -> None:
    """Refuse processes, on several machines, that would train different things: the result would be neither."""
    if ctx.store is None:
        return
    mine = {"recipe": recipe.name, **asdict(recipe), **asdict(settings), "images": images.digest}
    mine |= {"code": code_digest(), "torch": version("torch")}
    mine["finished_runs"] = ",".join(row["run"] for row in finished)
    for name in ("data", "out", "save"):  # the same images may lie elsewhere; only the first machine writes
        del mine[name]
    first, *others = map(from_pairs, ctx.all_gather_words("request", as_pairs(mine)))
    for rank, other in enumerate(others, 1):
        here, there = ({name: facts.get(name) or "none" for name in first | other} for facts in (first, other))
        differing = [f"{name} ({there[name]}, not {here[name]})" for name in here if there[name] != here[name]]
        if differing:
            raise ConfigError(
                f"process {rank} has other {', '.join(differing)} than process 0: give all machines the same"
            )


def check_processes(settings: Settings, recipe: Recipe, world_size: int) -> None:
    """Refuse a number of processes, or of micro-batches, that would split a worker."""
    if recipe.workers % world_size:
        fitting = " or ".join(str(p) for p in range(1, recipe.workers + 1) if recipe.workers % p == 0)
        raise ConfigError(f"{_workers_of(recipe)} cannot be split over {world_size} processes: use {fitting}")
    if (recipe.workers // world_size) % settings.micro_batches:
        here = f"the {recipe.workers // world_size} workers of a process"
        raise ConfigError(f"{spelled(settings, 'micro_batches')} does not divide {here}")


def _workers_of(recipe: Recipe) -> str:
    if has_option(recipe, "workers"):
        return spelled(recipe, "workers")
    return f"the workers of recipe {recipe.name} ({recipe.workers})"


def check_images(recipe: Recipe, train_count: int) -> None:
    """Refuse a training set of which a worker's shard, or what an epoch keeps of it, does not fill one batch."""
    needed = recipe.workers * recipe.batch_size
    if needed > train_count:
        raise ConfigError(
            f"{_workers_of(recipe)} x --batch_size {recipe.batch_size} = {needed} images a step, more than "
            f"the training set's {train_count}: use a smaller batch, fewer workers or more images"
        )
    for stage in recipe.stages:
        if not images_of_an_epoch(recipe, train_count, stage.first_epoch):
            few = f"epoch {stage.first_epoch} keeps {stage.kept:g} of {train_count} images, less than a step's {needed}"
            raise ConfigError(f"{few}: raise --kept, or use a smaller batch")


def check_out(settings: Settings) -> None:
    """Refuse an `--out` or `--save` that cannot be written, and a runs.tsv of other columns."""
    out = Path(settings.out)
    try:
        existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        _check_writable("--out", out, existing)
        for name in TABLES:
            path = out / name
            if path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
                raise ConfigError(f"{path} cannot be read and written: move it or choose another --out")
        if settings.save:
            _check_save(Path(settings.save), out)
    except OSError as error:  # a name that is too long, say
        raise ConfigError(f"--out or --save cannot be written: {error}") from error
    if (out / "runs.tsv").exists():
        read_rows(out / "runs.tsv", to_append=True)


def _check_writable(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path} cannot be written: {folder} is no folder that you may write to")


def _check_save(save: Path, out: Path) -> None:
    """Weights are written when all runs are made: what they may not replace, and where they cannot go, is seen now."""
    _check_writable("--save", save, save.absolute().parent)
    if len(os.fsencode(save.name)) > LONGEST_NAME:
        raise ConfigError(f"--save {save} is too long a name: choose a shorter one")
    if save.is_dir():
        raise ConfigError(f"--save {save} is a folder: name a file")
    if save.resolve() in [(out / name).resolve() for name in TABLES]:
        raise ConfigError(f"--save {save} is the name of a table: choose another")
    if save.exists() and not holds_weights(save):
        raise ConfigError(f"--save {save} is there and holds no weights: choose another name")


def holds_weights(path: Path) -> bool:
    """Whether torch.save wrote it."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:  # a damaged one
        return False
