"""Train: start the processes of a launch on this machine, for one team or several, and report how they ended."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from .. import FIRST, INVALID, LAUNCH, PACKAGE, RENDEZVOUS, SIGNALS, ConfigError, Interrupted
from ..core.devices import count_cores, count_gpus, may_share_gpus
from ..images.load import fetch_images
from .log import print_summary
from .options import Options
from .program import load_program, name_campaign, read_command
from .snapshot import check_unchanged, environment_of, keep, place_of
from .store import finished_runs, row_of
from .table import new_name

LIBC = ctypes.CDLL(None)


class Launch(NamedTuple):
    """How a launch ended."""

    failure: str  # "" if it made all runs
    status: int


def main(arguments: Sequence[str]) -> int:
    """Make a campaign's runs. Return the exit status: 0, 1 after a failure, 128 + N after signal N."""
    options = read_options(arguments)
    place = name_campaign(place_of(arguments), options.resume)
    folder = place.folder
    campaign = place.campaign
    try:
        with start_launch([*arguments, "--campaign", campaign]) as processes:
            ended = processes.wait()
    except Interrupted as end:
        ended = Launch(*end.args)
    rows = [row_of(folder, run) for run in finished_runs(folder) if run < options.runs]
    if ended.status:
        again = f"; the same command with --campaign {campaign} continues" if rows else ""
        finished = f"{len(rows)} of {options.runs} runs are finished"
        print(f"train: {ended.failure}; {finished}{again}", file=sys.stderr)
    elif options.teams > 1 and rows:
        print_summary(rows)
    return ended.status


def read_options(arguments: Sequence[str]) -> Options:
    return read_command(load_program(place_of(arguments).own_recipe), arguments)[1]


def start_launch(arguments: Sequence[str], log: IO | None = None, team: int | None = None) -> "Processes":
    """Start the processes of a launch: of all its teams, or of one, by number. Raise ConfigError.

    With `log` their STDOUT and STDERR go there.
    """
    place = place_of(arguments)
    program = load_program(place.own_recipe)
    _, options, hyp = read_command(program, arguments)
    if not options.resume:
        check_unchanged(program, place)
    gpus = count_gpus(options.device)
    cores = count_cores()
    teams = options.teams
    if team is None and teams > options.runs:
        raise ConfigError(f"--teams {teams} is more than the runs to make ({options.runs}): use fewer")
    processes = plan_processes(options.nproc, teams, hyp.workers, gpus, cores)
    started = range(teams) if team is None else [team]
    fetch_images(options.data)  # in the launcher, which cleans up after Ctrl-C
    environment = environment_of_processes(keep(place), max(1, cores // (processes * teams)))
    command = [sys.executable, "-m", f"{PACKAGE.name}.lab.process", *arguments, f"--recipe={place.kept_recipe}"]
    return Processes(command, environment, started, teams, processes, log)


def environment_of_processes(source: Path, threads: int) -> dict[str, str]:
    """Return the environment of a launch's processes, each with so many threads unless the user says otherwise."""
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    # A folder name that the log's encoding cannot write must not end a campaign.
    own = {"PYTHONIOENCODING": f"{encoding}:backslashreplace"}
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own | environment_of(source)


def plan_processes(nproc: int, teams: int, workers: int, gpus: int, cores: int) -> int:
    """Return --nproc, or the largest divisor of the workers for which each process has its own GPU or core."""
    places = max(1, (gpus or cores) // teams)
    if gpus and nproc > places and not may_share_gpus():
        given = f"--nproc {nproc}" + f" --teams {teams}" * (teams > 1)
        raise ConfigError(f"{given} needs {nproc * teams} GPUs, this machine has {gpus}: use --nproc {places}")
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
        started: Sequence[int],
        teams: int,
        processes: int,
        log: IO | None = None,
    ) -> None:
        """Start `processes` processes for each team in `started`, of `teams` on this machine. Raise ConfigError."""
        self.running: dict[subprocess.Popen, str] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="large_batch_cifar_10_fast_")
        self.launch = new_name()
        follow = partial(follow_launcher, os.getpid())
        streams: Any = {"stdout": log, "stderr": log}
        try:
            for team in started:
                name = f"{self.launch}.{team}" if teams > 1 else self.launch
                place = {LAUNCH: name, RENDEZVOUS: f"file://{self.folder.name}/{team}", "WORLD_SIZE": processes}
                place[FIRST] = int(team == min(started))
                for rank in range(processes):
                    variables = place | {"RANK": rank, "LOCAL_RANK": team * processes + rank}
                    variables |= {"LOCAL_WORLD_SIZE": teams * processes}
                    own = {**environment, **{name: str(value) for name, value in variables.items()}}
                    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # Popen would ignore what a handler raises
                    process = subprocess.Popen(command, env=own, preexec_fn=follow, **streams)
                    self.running[process] = f"process {rank} of team {team}" if teams > 1 else f"process {rank}"
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def wait(self) -> Launch:
        """Wait until all processes end, or one fails. Raise ConfigError for an invalid request."""
        ended = None
        while not ended:
            time.sleep(0.05)
            ended = self.ended()
        return ended

    def ended(self) -> Launch | None:
        """Return how the processes ended, or None while they run. Raise ConfigError for an invalid request."""
        codes = [process.poll() for process in self.running]
        failed = [process for process in self.running if process.returncode]
        if failed:
            # One that a signal ended comes first: the others lost their connection to it.
            process = min(failed, key=lambda each: each.returncode)
            ended = Launch(*describe_failure(process, self.running[process], Path(self.folder.name)))
            if ended.status == INVALID:
                raise ConfigError(ended.failure)
            return ended
        return None if None in codes else Launch("", 0)

    def end(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
        self.folder.cleanup()


def describe_failure(process: subprocess.Popen, name: str, folder: Path) -> tuple[str, int]:
    """Return how a process failed, and the exit status for that. `folder` has the text of an invalid request."""
    code = process.returncode
    if code == INVALID:
        return (folder / f"error.{process.pid}").read_text(), code
    if code > 0:
        return f"{name} ended with status {code}", code
    return f"{name} was ended by {signal.Signals(-code).name}", 1


def follow_launcher(launcher: int) -> None:
    """In a new process: leave Ctrl-C to the launcher, and ask Linux to end this process when the launcher ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.suppress(AttributeError):  # not Linux
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)
