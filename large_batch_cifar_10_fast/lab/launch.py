"""Start the processes of a launch on this machine, for one team or several, and tell how they end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from .. import INVALID, LAUNCH, LAUNCHER, PACKAGE, RENDEZVOUS, SIGNALS, ConfigError
from ..core.devices import count_cores, count_gpus, may_share_gpus
from ..images.load import fetch_images
from .program import load_program, read_command
from .snapshot import check_unchanged, environment_of, keep, place_of
from .table import new_name


class Ended(NamedTuple):
    """How a launch ended."""

    failure: str  # "" if it made all runs
    status: int


def start_launch(arguments: Sequence[str], log: IO | None = None) -> "Processes":
    """Start the processes of all teams of a launch. Raise ConfigError.

    With `log` their STDOUT and STDERR go there.
    """
    place = place_of(arguments)
    program = load_program(place.kept_recipe if place.is_begun else place.recipe)
    _, options, hyp = read_command(program, arguments)
    if not options.resume:
        check_unchanged(program, place)
    gpus = count_gpus(options.device)
    cores = count_cores()
    teams = options.teams
    processes = plan_processes(options.nproc, teams, hyp.workers, gpus, cores)
    fetch_images(options.data)  # in the launcher, which cleans up after Ctrl-C
    threads = max(1, cores // (processes * teams))  # of each process, unless the user says otherwise
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | environment_of(keep(place))
    command = [sys.executable, "-m", f"{PACKAGE.name}.lab.process", *arguments, f"--recipe={place.kept_recipe}"]
    return Processes(command, environment, teams, processes, options.runs, log)


def plan_processes(nproc: int, teams: int, workers: int, gpus: int, cores: int) -> int:
    """Return --nproc, or the largest divisor of the workers for which each process has its own GPU or core."""
    places = max(1, (gpus or cores) // teams)
    if gpus and nproc > places and not may_share_gpus():
        needed = f"--nproc {nproc} --teams {teams} needs {nproc * teams} GPUs"
        raise ConfigError(f"{needed}, this machine has {gpus}: use --nproc {places}")
    return nproc or max(n for n in range(1, places + 1) if workers % n == 0)


class Processes:
    """The processes of a launch, each of a team. They are ended with the `with` statement.

    Each team takes runs of the campaign by itself. The rendezvous of a team is a file: no port is opened, and no name
    server is asked.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        teams: int,
        processes: int,
        runs: int,
        log: IO | None = None,
    ) -> None:
        """Start `processes` processes for each team. `runs` is the number of runs that they are asked for."""
        self.runs = runs
        self.running: dict[subprocess.Popen, str] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="large_batch_cifar_10_fast_")
        launch = new_name()
        shared = {LAUNCHER: os.getpid(), "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": teams * processes}
        try:
            for place in range(teams * processes):
                team, rank = divmod(place, processes)
                own = {"RANK": rank, "LOCAL_RANK": place, RENDEZVOUS: f"file://{self.folder.name}/{team}"}
                own |= {LAUNCH: f"{launch}.{team}" if teams > 1 else launch}
                variables = {name: str(value) for name, value in (shared | own).items()}
                # Popen would ignore what a handler raises. The process unblocks its signals itself.
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                process = subprocess.Popen(command, env={**environment, **variables}, stdout=log, stderr=log)
                self.running[process] = f"process {rank} of team {team}" if teams > 1 else f"process {rank}"
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def wait(self) -> Ended:
        """Wait until all processes end, or one fails. Raise ConfigError for an invalid request."""
        while True:
            codes = [process.poll() for process in self.running]
            failed = [process for process in self.running if process.returncode]
            if failed:
                # One that a signal ended comes first: the others lost their connection to it.
                process = min(failed, key=lambda each: each.returncode)
                return self.describe(process)
            if None not in codes:
                return Ended("", 0)
            time.sleep(0.05)

    def describe(self, process: subprocess.Popen) -> Ended:
        """Return how a process failed. Raise ConfigError for an invalid request, whose text it left in the folder."""
        code = process.returncode
        name = self.running[process]
        if code == INVALID:
            raise ConfigError(Path(self.folder.name, f"error.{process.pid}").read_text())
        if code > 0:
            return Ended(f"{name} ended with status {code}", code)
        return Ended(f"{name} was ended by {signal.Signals(-code).name}", 1)

    def end(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
        self.folder.cleanup()
