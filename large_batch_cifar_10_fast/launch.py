"""From a request to torchrun: check what can be checked, start the processes that train, and tell how they ended."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .request.advice import count_cores
from .request.checks import check_request
from .request.command_line import read_request
from .request.planning import SIGNALS, check_meeting, plan_processes, torchrun_arguments
from .results.journal import Journal
from .results.resuming import CAMPAIGN, campaign_of_this_launch, is_told_later, rows_of
from .results.tables import Row, planned_by
from .settings.ending import LAUNCH
from .settings.settings import Refusal, Settings, count_from, is_first_machine, most_restarts, refusals_end
from .training.devices import count_gpus

SCRATCH = "large_batch_"  # what the name of a launch's folder for temporary files begins with
REPORT = "last_failure.txt"  # in --out: all that torchrun and the processes had to say of a failure
LOGS = (".txt", ".log")  # of torchrun, and of the processes


def prepare_launch(arguments: list[str], environment: Mapping[str, str]) -> tuple[Settings, int, dict[str, str]]:
    """What is asked for, how many processes, and the variables they are to run with; raises Refusal."""
    settings, recipe = read_request(arguments, environment)
    machines, gpus, cores = count_from(environment, "NNODES", 1), count_gpus(settings.device), count_cores()
    count_from(environment, "TIMEOUT", 1)
    teams, processes = count_from(environment, "TEAMS", 1), plan_processes(recipe, environment, gpus, cores)
    if is_told_later(settings):
        if not environment.get("NPROC"):
            raise Refusal("--resume: give this machine its NPROC; only the first knows the campaign before they meet")
    else:
        check_request(settings, recipe, processes * machines // teams)
        if teams > (planned := len(settings.planned)):
            raise Refusal(f"TEAMS={teams} is more than the runs to make ({planned}): use fewer, or ask for more --runs")
    check_meeting(environment)
    runs = Path(settings.out) / "runs.tsv"
    if runs.exists() and is_first_machine(environment):
        Journal(runs).close()  # only one campaign at a time may write it
    variables = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, cores // processes)))}
    variables |= {LAUNCH: str(os.getpid()), CAMPAIGN: campaign_of_this_launch()}
    if machines == 1:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would listen on all interfaces
    return settings, processes, variables


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder for temporary files, gone when the launch ends; what launches left that were killed goes now."""
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
            raise Refusal(f"no temporary folder ({error.strerror}): set TMPDIR to one with room") from error
        yield folder


def run_processes(arguments: list[str], settings: Settings, scratch: str) -> int:
    """Be torchrun until all processes have ended; the status, and one line about any end but the usual one. Raises
    Refusal if a process has refused."""
    logger, healing = logging.getLogger("torch.distributed"), Restarting(most_restarts(os.environ), scratch)
    logger.handlers, logger.propagate = [logging.FileHandler(f"{scratch}/torchrun.txt"), healing], False
    try:
        torchrun.run(torchrun.parse_args(arguments))
        return 0
    except SignalException as end:
        how, status, report = f"ended by {end.sigval.name}", 128 + end.sigval, ""
    except Refusal:
        raise
    except ChildFailedError as failed:
        refuse_as_processes_did(scratch)
        how, status, report = what_failed(*failed.get_first_failure()), 1, failed.format_msg()
    except Exception as fault:  # whatever torchrun may say where machines do not meet
        machines, status, report = count_from(os.environ, "NNODES", 1), 1, repr(fault)
        how = f"the {machines} machines, each with a NODE_RANK of its own, did not meet"
        if machines == 1:
            how = f"the processes did not start ({first_line(fault)})"
    finally:
        for name in SIGNALS:  # torchrun's answer to them is an exception, which nobody would catch any more
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    print(f"train_cifar_parallel.sh: {how}; {advice(settings)}{kept(report, settings, scratch)}", file=sys.stderr)
    return status


def refuse_as_processes_did(scratch: str) -> None:
    """Raise the Refusal that a process has left in its file for the launcher; return if none has."""
    for path in sorted(Path(scratch).rglob("error.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # half-written, or of another form
            kind, _, text = json.loads(path.read_text())["message"]["message"].partition(": ")
            if kind == Refusal.__name__:
                raise Refusal(text)


class Restarting(logging.Handler):
    """Warns of a failure after which torchrun goes on by itself; it tells nobody but its own log. Raises Refusal where
    a process has refused: started anew it would again."""

    def __init__(self, most: int, scratch: str) -> None:
        super().__init__()
        self.left, self.scratch = most, scratch

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("failed (exitcode: %s) local_rank: %s") and self.left:
            refuse_as_processes_did(self.scratch)
            self.left -= 1
            status, rank, *_ = record.args
            print(f"Warning: {ended(rank, status)}; the processes are started anew", file=sys.stderr)


def what_failed(rank: int, failure: ProcessFailure) -> str:
    """The failure that came first, in words; the others followed from it."""
    if isinstance(failure.message, dict):
        return f"process {rank} failed ({first_line(failure.message['message'])})"
    return ended(rank, failure.exitcode)


def ended(rank: int, status: int) -> str:
    if status >= 0:
        return f"process {rank} ended with status {status}"
    memory = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"process {rank} was ended by {signal.Signals(-status).name}{memory}"


def first_line(said: object) -> str:
    return (str(said).strip().splitlines() or [type(said).__name__])[0]


def made(settings: Settings) -> list[Row]:
    """The rows of this launch's campaign; raises Refusal if somebody spoilt the table in the meantime."""
    return rows_of(settings.out, "" if settings.resume else os.environ[CAMPAIGN])


@contextlib.contextmanager
def refusals_tell_how_to_go_on(settings: Settings) -> Iterator[None]:
    """What is refused when runs have been made (memory ran out, say) is no reason to make them again."""
    before = count_made(settings)
    try:
        yield
    except Refusal as refusal:
        if count_made(settings) > before:
            raise Refusal(f"{refusal}; {advice(settings)}") from None
        raise


def count_made(settings: Settings) -> int:
    """As far as this machine can tell."""
    with contextlib.suppress(Refusal):  # the table was spoilt: the answer to that is another's
        return len(made(settings)) if is_first_machine(os.environ) else 0
    return 0


def advice(settings: Settings) -> str:
    """What is made of this launch's campaign, and how to go on."""
    if not is_first_machine(os.environ):
        return "the first machine tells what is made"
    try:
        rows = made(settings)
    except Refusal as refusal:  # somebody spoilt the table in the meantime
        return str(refusal)
    if not rows:
        return "no run was finished"
    planned = len(planned_by(rows[0]))
    if len(rows) == planned:
        return f"all its {planned} runs are made"
    return f"{len(rows)} of its {planned} runs are made, go on with --resume"


def kept(report: str, settings: Settings, scratch: str) -> str:
    """Put what torchrun and the processes said into one file, and name it."""
    if not report:
        return ""
    said = [path.read_text(errors="replace") for path in sorted(Path(scratch).rglob("*")) if path.suffix in LOGS]
    path = Path(settings.out) / REPORT
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([report, *said]))
        return f" (details: {path})"
    return ""


def main() -> None:
    with refusals_end("train_cifar_parallel.sh"):
        settings, processes, variables = prepare_launch(sys.argv[1:], os.environ)
        os.environ.update(variables)
        with scratch_folder() as scratch, refusals_tell_how_to_go_on(settings):
            given = [argument.replace("$", "$$") for argument in sys.argv[1:]]  # torchrun takes them for templates
            arguments = [*torchrun_arguments(os.environ, processes, scratch), *given]
            status = run_processes(arguments, settings, scratch)
    sys.exit(status)


if __name__ == "__main__":
    main()
