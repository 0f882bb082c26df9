"""How many processes, where they meet, and what ends them: what torchrun is told."""

import math
import re
import signal
from collections.abc import Mapping

from ..settings.settings import Refusal, count_from, most_restarts
from ..training.recipe import Recipe

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # that end a launch in order
MEETING = 900  # seconds that machines wait for each other at first, unless TIMEOUT says otherwise


def plan_processes(recipe: Recipe, environment: Mapping[str, str], gpus: int, cores: int) -> int:
    """NPROC, or the most processes on this machine that divide the workers, one per GPU or core."""
    machines = count_from(environment, "NNODES", 1)
    teams, sharing = count_from(environment, "TEAMS", 1), count_from(environment, "TEAMS_PER_GPU", 1)
    places = gpus * sharing or cores
    least = teams // math.gcd(teams, machines)  # with which all teams are of as many processes
    fitting = [n for n in range(least, places + 1, least) if recipe.workers % (n * machines // teams) == 0]
    processes = count_from(environment, "NPROC", least if sharing > 1 else max(fitting, default=least))
    if processes * machines % teams:
        there = f"NPROC={processes} processes on {machines} machines"
        raise Refusal(f"TEAMS={teams} cannot be made of {there}: as many processes in each team")
    if sharing > 1 and not (gpus and processes * machines == teams):
        here = f"TEAMS={teams} and NPROC={processes} on {gpus} GPUs"
        raise Refusal(f"TEAMS_PER_GPU={sharing} is for teams of one process each that share GPUs, not for {here}")
    if gpus and processes > places:
        advice = f"use at most {places}, or let teams share a GPU with TEAMS_PER_GPU"
        raise Refusal(f"NPROC={processes} is more than fit this machine's {gpus} GPUs: {advice}")
    return processes


def torchrun_arguments(environment: Mapping[str, str], processes: int, scratch: str) -> list[str]:
    """Where the processes meet: without any port of torchrun's own on one machine, at RDZV_ENDPOINT on several."""
    machines = count_from(environment, "NNODES", 1)
    if machines == 1:
        where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={scratch}/rendezvous"]
        where += ["--rdzv-id=large_batch", "--local-addr=127.0.0.1"]
    else:
        endpoint, rank = environment["RDZV_ENDPOINT"], environment["NODE_RANK"]
        host, _, port = endpoint.rpartition(":")
        where = ["--rdzv-backend=static", f"--nnodes={machines}", f"--node-rank={rank}"]
        where += [f"--rdzv-endpoint={endpoint}", f"--master-addr={host}", f"--master-port={port}"]
        where += [f"--rdzv-conf=timeout={count_from(environment, 'TIMEOUT', MEETING)}"]
    others = ",".join(f"{rank}:2" for rank in range(1, processes))  # whose STDERR goes to a file instead
    kept = [f"--log-dir={scratch}/log", *([f"--redirects={others}"] if others else [])]
    handled = [name for name in SIGNALS if not _is_ignored(name)]
    ends = [f"--signals-to-handle={','.join(handled)}", f"--max-restarts={most_restarts(environment)}"]
    return [*where, *kept, *ends, f"--nproc-per-node={processes}", "-m", "large_batch_cifar_10_fast.train"]


def check_meeting(environment: Mapping[str, str]) -> None:
    """Refuse several machines that could not find each other, and what only one machine can do."""
    machines = count_from(environment, "NNODES", 1)
    if machines == 1:
        return
    if most_restarts(environment):
        raise Refusal("RESTARTS is for one machine: the others would not know; unset it, and go on with --resume")
    endpoint, rank = environment.get("RDZV_ENDPOINT", ""), environment.get("NODE_RANK", "")
    if rank not in map(str, range(machines)):
        raise Refusal(f"NODE_RANK={rank} must be 0 to {machines - 1} with NNODES={machines}")
    host, _, port = endpoint.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        raise Refusal(f"RDZV_ENDPOINT={endpoint} must be host:port of the first machine with NNODES={machines}")


def _is_ignored(name: str) -> bool:
    """As nohup has it of SIGHUP."""
    return signal.getsignal(getattr(signal, name)) == signal.SIG_IGN
