"""Start the processes of a campaign with torchrun, for one team or several, and report how they ended."""

import contextlib
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from . import LAUNCH
from .campaign import CAMPAIGN, TEAM, campaign_of_this_launch, finished_rows, is_restart, planned_by, rows_of
from .checks import check_request
from .command_line import read_launch, read_request
from .devices import count_cores, count_gpus
from .log import print_summary
from .options import INVALID, ConfigError, Launch, RunConfig, exit_on_config_error, first_line
from .recipe import Recipe

COMMAND = "train_cifar_parallel.sh"
REPORT = "last_failure.txt"  # in --out: the output of torchrun and of the processes after a failure
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
RENDEZVOUS = 900  # seconds that machines wait for each other at most


@exit_on_config_error(COMMAND)
def main() -> None:
    """Make a campaign's runs, and exit."""
    launch, config, processes = check_launch(arguments := sys.argv[1:])
    os.environ |= {LAUNCH: str(os.getpid()), CAMPAIGN: campaign_of_this_launch()}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // (processes * launch.teams))))
    if launch.nnodes == 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would listen on all interfaces
    out, campaign = Path(config.out), "" if config.resume else os.environ[CAMPAIGN]
    if launch.node_rank == 0 and not is_restart():
        lock_folder(out)
    progress = partial(progress_of, launch, config.out, campaign)
    if launch.teams == 1 and not launch.restarts:
        sys.exit(start_processes(arguments, launch, processes, out, progress))
    status = supervise(arguments, launch, processes, progress)
    if not status and launch.teams > 1:
        print_summary(rows_of(config.out, campaign))
    sys.exit(status)


def check_launch(arguments: Sequence[str]) -> tuple[Launch, RunConfig, int]:
    """Return how to launch, the config, and the processes of a team. Raise ConfigError."""
    launch, config = read_launch(arguments)
    if config.resume and launch.node_rank > 0:
        if not launch.nproc:
            raise ConfigError("--resume: give this machine its --nproc, since only the first one has the campaign")
        return launch, config, launch.nproc
    finished = finished_rows(config.out, True) if config.resume else []
    if finished and len(finished) == len(planned_by(finished[0])) and not is_restart():
        print_summary(finished)
        sys.exit(0)
    if finished and not launch.nproc:
        launch = replace(launch, nproc=max(1, int(finished[-1]["processes"]) // launch.nnodes))
    if finished and finished[-1]["device"].startswith("CPU") and count_gpus(config.device):
        raise ConfigError("--resume: the campaign ran on the CPU: give --device cpu")
    config, recipe = read_request(arguments, finished)
    processes = plan_processes(recipe, launch, count_gpus(config.device), count_cores())
    if launch.teams > len(config.planned):
        raise ConfigError(f"--teams {launch.teams} is more than the runs to make ({len(config.planned)}): use fewer")
    check_request(config, recipe, processes * launch.nnodes, launch.node_rank == 0, finished)
    return launch, config, processes


def plan_processes(recipe: Recipe, launch: Launch, gpus: int, cores: int) -> int:
    """Return --nproc, or the most processes of a team that divide the workers, each with a GPU or core of its own."""
    places = max(1, (gpus or cores) // launch.teams)
    fitting = [n for n in range(1, places + 1) if recipe.workers % (n * launch.nnodes) == 0]
    processes = launch.nproc or max(fitting, default=1)
    if gpus and processes > places:
        of_teams = f" of {launch.teams} teams" if launch.teams > 1 else ""
        raise ConfigError(f"--nproc {processes}{of_teams} is more than the {gpus} GPUs here: use at most {places}")
    return processes


def lock_folder(out: Path) -> None:
    """Lock the folder of the tables until this process ends. Raise ConfigError if another launcher has locked it."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(out, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another campaign is running in {out}: wait for it or choose another --out") from None
    except OSError:  # a file system without locks; appending is safe all the same
        pass


# Teams and restarts


def supervise(arguments: Sequence[str], launch: Launch, processes: int, progress: Callable[[], str]) -> int:
    """Run a launch for each team; start one that fails again, up to --restarts times. Return the exit status.

    A launch that starts again finds the campaign's rows in the table, and makes the runs that are missing.
    """
    interrupted: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: interrupted.append(number))
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.launch", *arguments, "--nproc", str(processes)]
    command += ["--teams", "1", "--restarts", "0"]

    def start(team: int) -> subprocess.Popen:
        return subprocess.Popen(command, env={**os.environ, TEAM: f"{team}/{launch.teams}"})

    running, left, status = {team: start(team) for team in range(launch.teams)}, launch.restarts, 0
    while running:
        time.sleep(0.05)
        for team, process in [*running.items()]:
            if (ended := process.poll()) is None:
                continue
            del running[team]
            if ended not in (0, INVALID) and left and not interrupted and not status:
                left -= 1
                print(f"Warning: started again, {left} of {launch.restarts} restarts left", file=sys.stderr, flush=True)
                running[team] = start(team)
            elif ended:
                status = status or (ended if ended > 0 else 128 - ended)
        if interrupted or status:
            for process in running.values():
                process.send_signal(interrupted[0] if interrupted else signal.SIGTERM)
            for process in running.values():
                process.wait()
            running = {}
    if interrupted:
        print(f"{COMMAND}: ended by {signal.Signals(interrupted[0]).name}; {progress()}", file=sys.stderr)
        return 128 + interrupted[0]
    return status


# The processes of a team


def start_processes(arguments: Sequence[str], launch: Launch, processes: int, out: Path, progress: Callable) -> int:
    """Run torchrun in this process until all its processes have ended. Return the status; print a failure as one line.

    Raise ConfigError if a process raised it.
    """
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) < 2**20:  # torch would wait for its file for ever
        small = f"ulimit -f allows files of {limit} bytes, and torch's rendezvous needs more"
        raise ConfigError(f"{small}: raise it to 1 MiB")
    try:
        scratch = tempfile.TemporaryDirectory(prefix="large_batch_cifar_10_fast_")
    except OSError as error:
        raise ConfigError(f"no temporary folder ({error.strerror}): set TMPDIR to one with room") from error
    with scratch as folder:
        given = [argument.replace("$", "$$") for argument in arguments]  # torchrun expands templates
        logger = logging.getLogger("torch.distributed")
        logger.handlers, logger.propagate = [logging.FileHandler(f"{folder}/torchrun.txt")], False
        try:
            torchrun.run(torchrun.parse_args([*torchrun_arguments(launch, processes, folder), *given]))
            return 0
        except SignalException as end:
            how, status, report = f"ended by {end.sigval.name}", 128 + end.sigval, ""
            if is_restart():
                return status  # the launcher that started this one reports it
        except ChildFailedError as failed:
            how, status, report = what_failed(*failed.get_first_failure()), 1, failed.format_msg()
        except Exception as error:  # torchrun raises nearly anything where the rendezvous fails
            how, status, report = f"the processes did not start ({first_line(error)})", 1, repr(error)
            if launch.nnodes > 1:
                how = f"the {launch.nnodes} machines, each with a --node_rank of its own, found no rendezvous"
        finally:
            for number in SIGNALS:  # torchrun's handlers would raise an exception that nobody catches any more
                signal.signal(number, signal.SIG_IGN)
        details = save_report(report, Path(folder), out) if report else ""
    print(f"{COMMAND}: {how}; {progress()}{details}", file=sys.stderr)
    return status


def torchrun_arguments(launch: Launch, processes: int, folder: str) -> list[str]:
    """Return torchrun's arguments. On one machine the rendezvous is a file, and torchrun opens no port."""
    if launch.nnodes == 1:
        where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={folder}/rendezvous"]
        where += ["--rdzv-id=large_batch", "--local-addr=127.0.0.1"]
    else:
        where = ["--rdzv-backend=static", f"--nnodes={launch.nnodes}", f"--node-rank={launch.node_rank}"]
        where += [f"--rdzv-endpoint={launch.rdzv_endpoint}", f"--rdzv-conf=timeout={min(launch.timeout, RENDEZVOUS)}"]
    # The first process's STDERR is the launcher's; that of the others goes to files.
    redirects = ",".join(["0:0", *(f"{rank}:2" for rank in range(1, processes))])
    ends = [f"--signals-to-handle={','.join(number.name for number in SIGNALS)}", "--max-restarts=0"]
    output = [f"--log-dir={folder}/log", f"--redirects={redirects}", f"--nproc-per-node={processes}"]
    return [*where, *ends, *output, "-m", "--", "large_batch_cifar_10_fast.train"]


# Failures


def what_failed(rank: int, failure: ProcessFailure) -> str:
    """Describe the first failure; the others followed from it. Raise ConfigError if the process raised it."""
    if isinstance(failure.message, dict):
        kind, _, text = (message := failure.message["message"]).partition(": ")
        if kind == ConfigError.__name__:
            raise ConfigError(text)
        return f"process {rank} failed ({first_line(message)})"
    if failure.exitcode >= 0:
        return f"process {rank} ended with status {failure.exitcode}"
    memory = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
    return f"process {rank} was ended by {signal.Signals(-failure.exitcode).name}{memory}"


def progress_of(launch: Launch, out: str, campaign: str) -> str:
    """Return how many runs of a campaign are finished, and how to continue."""
    if launch.node_rank > 0:
        return "see the first machine"
    if not (rows := rows_of(out, campaign)):
        return "no run was finished"
    planned = len(planned_by(rows[0]))
    if len(rows) == planned:
        return f"all its {planned} runs are finished"
    return f"{len(rows)} of its {planned} runs are finished, continue with --resume"


def save_report(report: str, folder: Path, out: Path) -> str:
    """Write what torchrun and the processes printed to REPORT; return a mention of the file."""
    outputs = [folder / "torchrun.txt", *sorted(folder.rglob("*.log"))]
    with contextlib.suppress(OSError):
        (out / REPORT).write_text("\n".join([report, *(path.read_text(errors="replace") for path in outputs)]))
        return f" (details: {out / REPORT})"
    return ""


if __name__ == "__main__":
    main()
