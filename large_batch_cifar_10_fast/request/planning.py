"""How many processes, where they meet, and what ends them: what torchrun is told."""

import signal

from ..recipe import Recipe
from ..settings.settings import ConfigError, Launch

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # that end a launch in order
RENDEZVOUS = 900  # seconds that machines wait for each other at most


def plan_processes(recipe: Recipe, launch: Launch, gpus: int, cores: int) -> int:
    """Return --nproc, or the most processes of a team that divide the workers, each with a GPU or core of its own."""
    places = max(1, (gpus or cores) // launch.teams)
    fitting = [n for n in range(1, places + 1) if recipe.workers % (n * launch.nnodes) == 0]
    processes = launch.nproc or max(fitting, default=1)
    if gpus and processes > places:
        of_teams = f" of {launch.teams} teams" if launch.teams > 1 else ""
        raise ConfigError(f"--nproc {processes}{of_teams} is more than the {gpus} GPUs here: use at most {places}")
    return processes


def torchrun_arguments(launch: Launch, processes: int, scratch: str) -> list[str]:
    """Return torchrun's arguments. On one machine the processes meet in a file, and torchrun opens no port."""
    if launch.nnodes == 1:
        where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={scratch}/rendezvous"]
        where += ["--rdzv-id=large_batch", "--local-addr=127.0.0.1"]
    else:
        host, _, port = launch.rdzv_endpoint.rpartition(":")
        where = ["--rdzv-backend=static", f"--nnodes={launch.nnodes}", f"--node-rank={launch.node_rank}"]
        where += [f"--rdzv-endpoint={launch.rdzv_endpoint}", f"--master-addr={host}", f"--master-port={port}"]
        where += [f"--rdzv-conf=timeout={min(launch.timeout, RENDEZVOUS)}"]
    others = ",".join(f"{rank}:2" for rank in range(1, processes))  # whose STDERR goes to a file instead
    kept = [f"--log-dir={scratch}/log", *([f"--redirects={others}"] if others else [])]
    handled = ",".join(name for name in SIGNALS if not is_ignored(getattr(signal, name)))
    ends = [f"--signals-to-handle={handled}", "--max-restarts=0"]
    return [*where, *kept, *ends, f"--nproc-per-node={processes}", "-m", "--", "large_batch_cifar_10_fast.train"]


def is_ignored(number: int) -> bool:
    """Return whether a signal is ignored, as nohup has it of SIGHUP."""
    return signal.getsignal(number) == signal.SIG_IGN
