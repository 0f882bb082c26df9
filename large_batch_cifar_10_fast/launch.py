"""Start the processes of a launch on this machine, for one team or several, and report how they ended."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from . import INVALID, RENDEZVOUS, ConfigError, exit_on_config_error, program

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIBC, LAUNCHER = ctypes.CDLL(None), os.getpid()


class Interrupted(BaseException):
    """The launcher was sent a signal."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(f"ended by {signal.Signals(number).name}", 128 + number)


def main() -> None:
    """Make a campaign's runs, and exit: with 0, 1 after a failure, 2 for an invalid request, 128 + N after signal N."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)  # before torch is imported, which takes seconds: PID 1 has no default
    os.environ.pop("LOCAL_RANK", None)  # left over from a launcher around this one
    if not re.match("[1-9]", os.environ.get("OMP_NUM_THREADS", "")):  # OpenMP would take all cores, with a warning
        os.environ.pop("OMP_NUM_THREADS", None)
    try:
        with exit_on_config_error(program()):
            sys.exit(launch(sys.argv[1:]))
    except Interrupted as end:  # before the processes were started
        print(f"{program()}: {end.args[0]}", file=sys.stderr)
        sys.exit(end.args[1])


def launch(arguments: Sequence[str]) -> int:
    """Start the processes of a launch and wait for their end. Return the exit status; raise ConfigError."""
    from .core import devices, log, table

    command, options, workers = read_command(arguments)
    gpus = devices.count_gpus(options.device)
    cores = devices.count_cores()
    teams = options.teams
    out = Path(options.out)
    if teams > options.runs:
        raise ConfigError(f"--teams {teams} is more than the runs to make ({options.runs}): use fewer")
    processes = plan_processes(options.nproc, teams, workers, gpus, cores)
    campaign = table.campaign_named(out, options.campaign, options.resume)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (processes * teams))))
    try:
        how, status = run_processes([*command, "--campaign", campaign], teams, processes)
    except Interrupted as end:
        how, status = end.args
    if status == INVALID:
        raise ConfigError(how)
    rows = [row for row in table.read(out / "runs.tsv") if row["campaign"] == campaign]
    rows = [row for row in rows if int(row["run"]) < options.runs]
    if status:
        again = f"; the same command with --campaign {campaign} continues" if rows else ""
        print(f"{program()}: {how}; {len(rows)} of {options.runs} runs are finished{again}", file=sys.stderr)
    elif teams > 1 and rows:
        log.print_summary(rows)
    return status


def read_command(arguments: Sequence[str]) -> tuple[list[str], Any, int]:
    """Return the command that starts a process, the options, and the number of workers. Raise ConfigError."""
    from .core import program

    recipe = program.recipe_of(arguments, "apple2019")
    _, options, hyp = program.read_command(program.load_program(recipe), arguments)
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.train", *arguments]
    return command, options, program.workers_of(hyp)


def plan_processes(nproc: int, teams: int, workers: int, gpus: int, cores: int) -> int:
    """Return --nproc, or the most processes of a team that divide the workers, each with a GPU or core of its own."""
    places = max(1, (gpus or cores) // teams)
    if gpus and nproc > places:
        raise ConfigError(f"--nproc {nproc} is more than the {gpus} GPUs of {teams} teams: use at most {places}")
    return nproc or max(n for n in range(1, places + 1) if workers % n == 0)


def run_processes(command: Sequence[str], teams: int, processes: int) -> tuple[str, int]:
    """Run the processes of all teams until the last ends, or one fails. Return how it failed, and the exit status.

    Each team takes runs of the campaign by itself. The rendezvous of a team is a file: no port is opened, and no name
    server is asked.
    """
    from .core.files import temporary_folder

    running: dict[subprocess.Popen, str] = {}
    folder = temporary_folder()
    try:
        for team in range(teams):
            place = {RENDEZVOUS: f"file://{folder.name}/{team}", "WORLD_SIZE": processes}
            for rank in range(processes):
                variables = place | {"RANK": rank, "LOCAL_RANK": team * processes + rank}
                variables |= {"LOCAL_WORLD_SIZE": teams * processes}
                environment = os.environ | {name: str(value) for name, value in variables.items()}
                process = subprocess.Popen(command, env=environment, preexec_fn=follow_launcher)
                running[process] = f"process {rank} of team {team}" if teams > 1 else f"process {rank}"
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


def describe_failure(process: subprocess.Popen, name: str, folder: Path) -> tuple[str, int]:
    """Return how a process failed, and the exit status for that. `folder` has the text of an invalid request."""
    code = process.returncode
    if code == INVALID:
        return (folder / f"error.{process.pid}").read_text(), code
    if code > 0:
        return f"{name} ended with status {code}", code
    memory = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"{name} was ended by {signal.Signals(-code).name}{memory}", 1


def follow_launcher() -> None:
    """In a new process: leave Ctrl-C to the launcher, and ask Linux to end this process when the launcher ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError):  # not Linux
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != LAUNCHER:  # it ended before the request
        os._exit(1)


if __name__ == "__main__":
    main()
