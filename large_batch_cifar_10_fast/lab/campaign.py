"""The conditions of a campaign, which all its runs share, and the weights of its last run."""

import io
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import LAUNCH, ConfigError, __version__, commit
from ..core.data import Images
from ..core.devices import hardware_name
from ..core.hyp import settings_of
from ..core.team import Team
from ..files import write_atomically, write_patiently
from ..images.load import SYNTHETIC
from .options import Options, text_of
from .snapshot import digests
from .table import OPTION, SIZES, Row, decides, differences, environment, new_name


def teams_on_this_machine(team: Team) -> int:
    """Return how many teams the launcher started here."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // team.world_size)


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
    teams = teams_on_this_machine(team)
    prefix = f"{teams} teams of " if teams > 1 else ""
    device = f"{prefix}{team.world_size} x {names}"
    if not team.on_gpu:
        device = f"CPU {names}, {prefix}{team.world_size} x {torch.get_num_threads()} threads"
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
        "environment": environment(),
        "device": device,
        "processes": team.world_size,
        "version": __version__,
        "commit": commit(),
        **digests(program),
        "torch": version("torch"),
        "seed": options.seed,  # of run 0
        "launch": os.environ.get(LAUNCH) or new_name(),  # tells whose epochs are whose
    }
    return {name: str(value) for name, value in common.items()}


def check_processes_agree(options: Options, common: Mapping[str, str], team: Team) -> None:
    """Raise ConfigError if the conditions of a process differ from those of the first process."""
    plan = {name: str(getattr(options, name)) for name in ("seed", "runs", "no_warmup")}
    first, *others = map(json.loads, team.gather("conditions", json.dumps({**common, **plan})))
    for rank, other in enumerate(others, 1):
        text = differences(other, first, [name for name in other if decides(name) and name not in SIZES])
        if text:
            raise ConfigError(f"process {rank} differs from process 0 in {text}: give all processes the same options")


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Row, for_use: Mapping[str, object]) -> None:
    """Write weights, the row of their run, and the data `for_use`. If the disk is full, wait."""
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    content = io.BytesIO()  # if torch.save writes a file, its errors do not say why
    torch.save({"weights": on_cpu, "about": about, **for_use}, content)

    def write() -> None:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(content.getbuffer())

    write_patiently(write, f"{path}, the weights of run {about['run']},")
