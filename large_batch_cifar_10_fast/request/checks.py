"""Whatever can be refused before training is refused here: processes, images, outputs, a campaign to go on with."""

import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ..images.sources import Images, count_training_images, load_images
from ..results.lines import as_pairs, from_pairs
from ..results.provenance import code_digest
from ..results.tables import changes, finished_rows, read_rows, refuse_other
from ..settings.settings import Refusal, Settings, has_option, spelled
from ..training.recipe import Recipe
from ..training.world import World


def check_request(settings: Settings, recipe: Recipe, world_size: int) -> None:
    """Raise Refusal for what cannot be trained; CIFAR-10 is fetched here if need be."""
    check_processes(settings, recipe, world_size)
    check_out(settings)
    check_images(recipe, count_training_images(settings.data))
    for row in finished_rows(settings)[-1:]:
        refuse_other(row, changes(row, processes=world_size, digest=load_images(settings.data).digest()))


def check_agreement(settings: Settings, recipe: Recipe, images: Images, world: World) -> None:
    """Refuse processes, on several machines, that would train different things: the result would be neither."""
    if world.world_size == 1:
        return
    mine = {"recipe": recipe.name, **asdict(recipe), **asdict(settings), "images": images.digest()}
    mine |= {"code": code_digest(), "torch": version("torch")}
    for name in ("data", "out", "save"):  # the same images may lie elsewhere; only the first machine writes
        del mine[name]
    first, *others = map(from_pairs, world.words_of_all("request", as_pairs(mine)))
    for rank, other in enumerate(others, 1):
        here, there = ({name: facts.get(name, "none") for name in first | other} for facts in (first, other))
        differing = [f"{name} ({there[name]}, not {here[name]})" for name in here if there[name] != here[name]]
        if differing:
            raise Refusal(f"process {rank} has other {', '.join(differing)} than process 0: give all machines the same")


def check_processes(settings: Settings, recipe: Recipe, world_size: int) -> None:
    """Refuse a number of processes, or of micro-batches, that would split a worker."""
    if recipe.workers % world_size:
        fitting = " or ".join(str(p) for p in range(1, recipe.workers + 1) if recipe.workers % p == 0)
        raise Refusal(f"{_workers_of(recipe)} cannot be spread over NPROC={world_size} processes: use {fitting}")
    if (recipe.workers // world_size) % settings.micro_batches:
        here = f"the {recipe.workers // world_size} workers of a process"
        raise Refusal(f"{spelled(settings, 'micro_batches')} does not divide {here}")


def _workers_of(recipe: Recipe) -> str:
    if has_option(recipe, "workers"):
        return spelled(recipe, "workers")
    return f"the workers of recipe {recipe.name} ({recipe.workers})"


def check_images(recipe: Recipe, train_count: int) -> None:
    """Refuse a training set of which a worker's shard does not fill one batch."""
    needed = recipe.workers * recipe.batch_size
    if needed > train_count:
        raise Refusal(
            f"{_workers_of(recipe)} x --batch_size {recipe.batch_size} = {needed} images a step, more than "
            f"the training set's {train_count}: use a smaller batch, fewer workers or more images"
        )


def check_out(settings: Settings) -> None:
    """Refuse an `--out` or `--save` that cannot be written, and a runs.tsv of other columns."""
    out, save = Path(settings.out), Path(settings.save)
    for option, folder in (("--out", out), *([("--save", save.parent)] if settings.save else [])):
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise Refusal(f"{option} {folder} cannot be written: {existing} is no folder that you may write to")
    if settings.save and save.is_dir():
        raise Refusal(f"--save {save} is a folder: name a file")
    for name in ("runs.tsv", "timing_log.tsv"):
        path = out / name
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise Refusal(f"{path} cannot be written: move it or choose another --out")
    if (out / "runs.tsv").exists():
        read_rows(out / "runs.tsv")
