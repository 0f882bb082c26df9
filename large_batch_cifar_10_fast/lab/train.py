"""Train: start the processes of a launch on this machine, for one team or several, and report how they ended."""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from .. import INVALID, LAUNCH, PACKAGE, RENDEZVOUS, SIGNALS, ConfigError, Interrupted
from ..core.devices import count_cores, count_gpus, may_share_gpus
from ..files import temporary_folder
from ..images.load import fetch_images
from .log import print_summary
from .options import Options
from .program import load_program, read_command, recipe_of, workers_of
from .table import Row, campaign_named, new_name, read

LIBC = ctypes.CDLL(None)


class Launch(NamedTuple):
    """How a launch ended."""

    failure: str  # "" if it made all runs
    status: int
    options: Options
    campaign: str
    rows: list[Row]  # of the finished runs that it was asked for


def main(arguments: Sequence[str]) -> int:
    """Make a campaign's runs. Return the exit status: 0, 1 after a failure, 128 + N after signal N."""
    made = launch(arguments)
    options = made.options
    if made.status:
        again = f"; the same command with --campaign {made.campaign} continues" if made.rows else ""
        finished = f"{len(made.rows)} of {options.runs} runs are finished"
        print(f"train: {made.failure}; {finished}{again}", file=sys.stderr)
    elif options.teams > 1 and made.rows:
        print_summary(made.rows)
    return made.status


def launch(arguments: Sequence[str], log: IO | None = None) -> Launch:
    """Start the processes of a launch and wait for their end; their STDOUT goes to `log`. Raise ConfigError."""
    recipe = recipe_of(arguments)
    _, options, hyp = read_command(load_program(recipe), arguments)
    gpus = count_gpus(options.device)
    cores = count_cores()
    teams = options.teams
    out = Path(options.out)
    if teams > options.runs:
        raise ConfigError(f"--teams {teams} is more than the runs to make ({options.runs}): use fewer")
    processes = plan_processes(options.nproc, teams, workers_of(hyp), gpus, cores)
    campaign = campaign_named(out, options.campaign, options.resume)
    command = [sys.executable, "-m", f"{PACKAGE.name}.lab.process", *arguments, "--campaign", campaign]
    environment = environment_of_processes(max(1, cores // (processes * teams)))
    try:
        fetch_images(options.data)  # here: Ctrl-C kills the processes
        failure, status = run_processes(command, environment, teams, processes, log)
    except Interrupted as end:
        failure, status = end.args
    if status == INVALID:
        raise ConfigError(failure)
    rows = [row for row in read(out / "runs.tsv") if row["campaign"] == campaign]
    rows = [row for row in rows if int(row["run"]) < options.runs]
    return Launch(failure, status, options, campaign, rows)


def environment_of_processes(threads: int) -> dict[str, str]:
    """Return the environment of a launch's processes, each with so many threads unless the user says otherwise."""
    path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    own = {
        # The folder a user stands in may hold files named like modules: it is not searched for them.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(path),
        # A name of a folder that the log's encoding lacks must not end a campaign.
        "PYTHONIOENCODING": f"{encoding}:backslashreplace",
    }
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own


def plan_processes(nproc: int, teams: int, workers: int, gpus: int, cores: int) -> int:
    """Return --nproc, or the most processes of a team that divide the workers, each with a GPU or core of its own."""
    places = max(1, (gpus or cores) // teams)
    if gpus and nproc > places and not may_share_gpus():
        given = f"--nproc {nproc}" + f" --teams {teams}" * (teams > 1)
        raise ConfigError(f"{given} needs {nproc * teams} GPUs, this machine has {gpus}: use --nproc {places}")
    return nproc or max(n for n in range(1, places + 1) if workers % n == 0)


def run_processes(
    command: Sequence[str], environment: dict[str, str], teams: int, processes: int, log: IO | None
) -> tuple[str, int]:
    """Run the processes of all teams until the last ends, or one fails. Return how it failed, and the exit status.

    Each team takes runs of the campaign by itself. The rendezvous of a team is a file: no port is opened, and no name
    server is asked.
    """
    running: dict[subprocess.Popen, str] = {}
    folder = temporary_folder()
    if processes > 1:
        check_locks(Path(folder.name))
    launch = new_name()
    follow = partial(follow_launcher, os.getpid())
    try:
        for team in range(teams):
            name = f"{launch}.{team}" if teams > 1 else launch
            place = {LAUNCH: name, RENDEZVOUS: f"file://{folder.name}/{team}", "WORLD_SIZE": processes}
            for rank in range(processes):
                variables = place | {"RANK": rank, "LOCAL_RANK": team * processes + rank}
                variables |= {"LOCAL_WORLD_SIZE": teams * processes}
                own = environment | {name: str(value) for name, value in variables.items()}
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # Popen would ignore what a handler raises
                process = subprocess.Popen(command, env=own, stdout=log, preexec_fn=follow)
                running[process] = f"process {rank} of team {team}" if teams > 1 else f"process {rank}"
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        unfinished = True
        while unfinished:
            time.sleep(0.05)
            for process in running:
                process.poll()
            unfinished = any(process.returncode is None for process in running)
            failed = [process for process in running if process.returncode]
            if failed:
                # One that a signal ended comes first: the others lost their connection to it.
                process = min(failed, key=lambda each: each.returncode)
                return describe_failure(process, running[process], Path(folder.name))
        return "", 0
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        folder.cleanup()


def check_locks(folder: Path) -> None:
    """Raise ConfigError for a folder without locks, which the rendezvous of several processes takes there."""
    try:
        with open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        reason = f"files in {folder.parent} cannot be locked ({error.strerror})"
        raise ConfigError(f"{reason}: name another folder in TMPDIR") from error


def describe_failure(process: subprocess.Popen, name: str, folder: Path) -> tuple[str, int]:
    """Return how a process failed, and the exit status for that. `folder` has the text of an invalid request."""
    code = process.returncode
    if code == INVALID:
        return (folder / f"error.{process.pid}").read_text(), code
    if code > 0:
        return f"{name} ended with status {code}", code
    memory = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"{name} was ended by {signal.Signals(-code).name}{memory}", 1


def follow_launcher(launcher: int) -> None:
    """In a new process: leave Ctrl-C to the launcher, and ask Linux to end this process when the launcher ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.suppress(AttributeError):  # not Linux
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)
