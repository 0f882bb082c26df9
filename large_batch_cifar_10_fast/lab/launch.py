"""Start the processes of a launch on this machine, and tell how they end."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple

from .. import INVALID, LAUNCHER, PACKAGE, RENDEZVOUS, SIGNALS, ConfigError
from ..core.devices import count_cores, count_gpus
from ..images.load import SYNTHETIC, load_images
from .program import load_program, read_command
from .snapshot import check_unchanged, environment_of, keep, place_of


class Ended(NamedTuple):
    """How a launch ended."""

    failure: str  # "" if it made all runs
    status: int


def start_launch(arguments: Sequence[str], log: IO | None = None) -> "Processes":
    """Start the processes of a launch. Raise ConfigError.

    With `log` their STDOUT and STDERR go there.
    """
    place = place_of(arguments)
    program = load_program(place.kept_recipe if place.is_begun else place.recipe)
    _, options, hyp = read_command(program, arguments)
    if not options.resume:
        check_unchanged(program, place)
    cores = count_cores()
    processes = options.nproc or largest_divisor(hyp.workers, count_gpus(options.device) or cores)
    if options.data != SYNTHETIC and not Path(options.data).is_file():
        load_images(options.data)  # downloads CIFAR-10, and refuses other data before anything is written
    threads = max(1, cores // processes)  # threads per process, unless the user gives a number
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | environment_of(keep(place))
    if not place.is_begun:
        (place.folder / "command").write_text(shlex.join(arguments))  # for --resume
    command = [sys.executable, "-m", PACKAGE.name, "train", *arguments, f"--recipe={place.kept_recipe}"]
    return Processes(command, environment, processes, options.runs, log)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


class Processes(AbstractContextManager):
    """The processes of a launch. They are ended with the `with` statement.

    Their rendezvous is a file: no port is opened, and no name server is asked.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], count: int, runs: int, log: IO | None = None
    ) -> None:
        """Start `count` processes. `runs` is the number of runs that they are asked for."""
        self.runs = runs
        self.running: list[subprocess.Popen] = []
        self.folder = tempfile.TemporaryDirectory(prefix="large_batch_cifar_10_fast_")
        shared = {LAUNCHER: os.getpid(), RENDEZVOUS: f"file://{self.folder.name}/store"}
        shared |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        try:
            for rank in range(count):
                own = shared | {"RANK": rank, "LOCAL_RANK": rank}
                variables = {name: str(value) for name, value in own.items()}
                # A handler that raises within Popen could lose the process, which then ends with this one. The mask
                # prevents that, unless a library's thread takes the signal. The process inherits the mask, so that
                # Ctrl-C does not interrupt its imports, and unblocks its signals itself.
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                process = subprocess.Popen(command, env={**environment, **variables}, stdout=log, stderr=log)
                self.running.append(process)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        except BaseException:
            self.end()
            raise

    def __exit__(self, *error: object) -> None:
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
        name = f"process {self.running.index(process)}"
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
