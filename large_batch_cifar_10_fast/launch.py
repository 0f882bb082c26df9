"""Start the processes that train, for one team or several, again after a failure, and say how they ended."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .campaign import (
    CAMPAIGN,
    STARTED,
    SUPERVISED,
    Row,
    campaign_of_this_launch,
    finished_rows,
    is_restart,
    planned_by,
    rows_of,
    started,
)
from .checks import check_request, count_cores
from .command_line import read_launch, read_request
from .devices import count_gpus
from .ending import LAUNCH
from .log import print_summary
from .options import INVALID, WHOLE, ConfigError, Launch, Settings, exit_on_config_error
from .recipe import Recipe

COMMAND = "train_cifar_parallel.sh"
SCRATCH = "large_batch_"  # what the name of a launch's folder for temporary files begins with
REPORT = "last_failure.txt"  # in --out: all that torchrun and the processes had to say of a failure
LOGS = (".txt", ".log")  # of torchrun, and of the processes


def main() -> None:
    with exit_on_config_error(COMMAND):
        sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Make a campaign's runs; return the exit status. Raise ConfigError."""
    launch, settings, processes, gpus = check_launch(arguments)
    os.environ |= {LAUNCH: str(os.getpid()), CAMPAIGN: campaign_of_this_launch(), STARTED: started()}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // (processes * launch.teams))))
    if launch.nnodes == 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would listen on all interfaces
    alone = not is_restart() and launch.is_first_machine
    with only_campaign_in(Path(settings.out)) if alone else contextlib.nullcontext():
        if launch.teams > 1 or launch.restarts:
            return supervise(arguments, launch, settings, processes, gpus)
        return start_processes(arguments, launch, settings, processes)


@contextlib.contextmanager
def only_campaign_in(out: Path) -> Iterator[None]:
    """Hold a lock on the folder of the tables. Raise ConfigError while another launcher holds it."""
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another campaign is running in {out}: wait for it or choose another --out") from None
    except OSError:  # a file system without locks; rows are safe all the same (campaign.append)
        pass
    try:
        yield
    finally:
        os.close(folder)


def start_processes(arguments: Sequence[str], launch: Launch, settings: Settings, processes: int) -> int:
    """Start the processes of one team, and return the exit status when they have ended. Raise ConfigError."""
    with scratch_folder() as scratch, config_errors_say_how_to_resume(settings, launch):
        given = [argument.replace("$", "$$") for argument in arguments]  # torchrun takes them for templates
        return run_processes([*torchrun_arguments(launch, processes, scratch), *given], settings, launch, scratch)


def check_launch(arguments: Sequence[str]) -> tuple[Launch, Settings, int, int]:
    """Return how to launch, the settings, the processes of a team and the GPUs. Raise ConfigError."""
    launch, settings = read_launch(arguments)
    gpus = count_gpus(settings.device)
    if settings.resume and not launch.is_first_machine:
        if not launch.nproc:
            raise ConfigError(
                "--resume: give this machine its --nproc; only the first knows the campaign before they meet"
            )
        return launch, settings, launch.nproc, gpus
    finished = finished_rows(settings) if settings.resume else []
    settings, recipe = read_request(arguments, finished)
    processes = plan_processes(recipe, launch, gpus, count_cores())
    if launch.teams > len(settings.planned):
        raise ConfigError(f"--teams {launch.teams} is more than the runs to make ({len(settings.planned)}): use fewer")
    check_request(settings, recipe, processes * launch.nnodes, launch.is_first_machine, finished)
    return launch, settings, processes, gpus


def supervise(arguments: Sequence[str], launch: Launch, settings: Settings, processes: int, gpus: int) -> int:
    """Run a launch for each team, one that fails up to --restarts times again, and print the summary.

    A launch that starts again finds the campaign's rows in the table, and makes the runs that are missing.
    """
    interrupted: list[int] = []
    for name in SIGNALS:
        if not is_ignored(number := getattr(signal, name)):
            signal.signal(number, lambda number, _: interrupted.append(number))
    places = visible_gpus(gpus)
    command = [sys.executable, "-m", "large_batch_cifar_10_fast.launch", *arguments, "--nproc", str(processes)]
    command += ["--teams", "1", "--restarts", "0"]

    def start(team: int) -> subprocess.Popen:
        mine = {SUPERVISED: "1"}
        if places:
            mine["CUDA_VISIBLE_DEVICES"] = gpus_of_team(team, processes, places)
        return subprocess.Popen([*command, "--team", f"{team}/{launch.teams}"], env={**os.environ, **mine})

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
        if (interrupted or status) and running:
            for process in running.values():
                process.send_signal(interrupted[0] if interrupted else signal.SIGTERM)
            for process in running.values():
                process.wait()
            running = {}
    if interrupted:
        print(f"{COMMAND}: ended by {signal.Signals(interrupted[0]).name}; {advice(settings, launch)}", file=sys.stderr)
        return 128 + interrupted[0]
    if not status and launch.teams > 1:
        print_summary(made(settings))
    return status


def gpus_of_team(team: int, processes: int, places: Sequence[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a team: a GPU for each process. Teams share GPUs where there are too few."""
    return ",".join(places[(team * processes + i) % len(places)] for i in range(processes))


def visible_gpus(gpus: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls the GPUs that torch can use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else [str(index) for index in range(gpus)])[:gpus]


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a folder for temporary files, removed when the launch ends; those of killed launches are removed now."""
    with contextlib.ExitStack() as until_the_end:
        try:
            for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/lock"):
                with contextlib.suppress(OSError), open(left, "rb") as lock:  # another user's, or one that is in use
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left.parent)
            folder = until_the_end.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH))
            lock = until_the_end.enter_context(open(f"{folder}/locking", "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(f"{folder}/locking", f"{folder}/lock")  # from now on, and only locked, it is seen by others
        except OSError as error:
            raise ConfigError(f"no temporary folder ({error.strerror}): set TMPDIR to one with room") from error
        yield folder


def run_processes(arguments: list[str], settings: Settings, launch: Launch, scratch: str) -> int:
    """Be torchrun until all processes have ended; return the status, and print one line about any end but the usual.

    Raise ConfigError if a process has refused.
    """
    logger = logging.getLogger("torch.distributed")
    logger.handlers, logger.propagate = [logging.FileHandler(f"{scratch}/torchrun.txt")], False
    try:
        torchrun.run(torchrun.parse_args(arguments))
        return 0
    except SignalException as end:
        how, status, report = f"ended by {end.sigval.name}", 128 + end.sigval, ""
        if launch.team != WHOLE:
            return status  # the launcher of all teams says it
    except ChildFailedError as failed:
        raise_config_error_of_processes(scratch)
        how, status, report = what_failed(*failed.get_first_failure()), 1, failed.format_msg()
    except Exception as fault:  # whatever torchrun may say where machines do not meet
        how = f"the {launch.nnodes} machines, each with a --node_rank of its own, did not meet"
        status, report = 1, repr(fault)
        if launch.nnodes == 1:
            how = f"the processes did not start ({first_line(fault)})"
    finally:
        for name in SIGNALS:  # torchrun's answer to them is an exception, which nobody would catch any more
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    print(f"{COMMAND}: {how}; {advice(settings, launch)}{kept(report, settings, scratch)}", file=sys.stderr)
    return status


def raise_config_error_of_processes(scratch: str) -> None:
    """Raise the ConfigError that a process has left in its file for the launcher; return if none has."""
    for path in sorted(Path(scratch).rglob("error.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # half-written, or of another form
            kind, _, text = json.loads(path.read_text())["message"]["message"].partition(": ")
            if kind == ConfigError.__name__:
                raise ConfigError(text)


def what_failed(rank: int, failure: ProcessFailure) -> str:
    """Return the failure that came first, in words; the others followed from it."""
    if isinstance(failure.message, dict):
        return f"process {rank} failed ({first_line(failure.message['message'])})"
    if failure.exitcode >= 0:
        return f"process {rank} ended with status {failure.exitcode}"
    memory = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
    return f"process {rank} was ended by {signal.Signals(-failure.exitcode).name}{memory}"


def first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [type(text).__name__])[0]


def made(settings: Settings) -> list[Row]:
    """Return the rows of this launch's campaign; raise ConfigError if somebody damaged the table in the meantime."""
    return rows_of(settings.out, "" if settings.resume else os.environ[CAMPAIGN])


@contextlib.contextmanager
def config_errors_say_how_to_resume(settings: Settings, launch: Launch) -> Iterator[None]:
    """Add to an error after which runs have been made (memory ran out, say) how to keep them."""
    before = count_made(settings, launch)
    try:
        yield
    except ConfigError as error:
        if count_made(settings, launch) > before:
            raise ConfigError(f"{error}; {advice(settings, launch)}") from None
        raise


def count_made(settings: Settings, launch: Launch) -> int:
    with contextlib.suppress(ConfigError):
        return len(made(settings)) if launch.is_first_machine else 0
    return 0


def advice(settings: Settings, launch: Launch) -> str:
    """Return how many runs of this launch's campaign are made, and how to continue."""
    if not launch.is_first_machine:
        return "the first machine tells what is made"
    try:
        rows = made(settings)
    except ConfigError as error:  # somebody damaged the table in the meantime
        return str(error)
    if not rows:
        return "no run was finished"
    planned = len(planned_by(rows[0]))
    if len(rows) == planned:
        return f"all its {planned} runs are made"
    return f"{len(rows)} of its {planned} runs are made, go on with --resume"


def kept(report: str, settings: Settings, scratch: str) -> str:
    """Put what torchrun and the processes printed into one file, and name it."""
    if not report:
        return ""
    printed = [path.read_text(errors="replace") for path in sorted(Path(scratch).rglob("*")) if path.suffix in LOGS]
    path = Path(settings.out) / REPORT
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([report, *printed]))
        return f" (details: {path})"
    return ""


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


if __name__ == "__main__":
    main()
