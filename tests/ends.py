"""Ways in which a launch ends before its campaign does, and what there is to see of it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from conftest import LAUNCHER, children_of, environment, is_alive, options_among


def start(folder: Path, *arguments: object, stdout: int = subprocess.PIPE, **variables: object) -> subprocess.Popen:
    """A launch of two processes in `folder`."""
    return subprocess.Popen(
        ["bash", str(LAUNCHER), *map(str, arguments), *options_among({"nproc": 2} | variables)],
        cwd=folder,
        env=environment(OMP_NUM_THREADS=1, **{name: v for name, v in variables.items() if name.isupper()}),
        text=True,
        start_new_session=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def started(folder: Path, *arguments: object, **variables: object) -> Iterator[subprocess.Popen]:
    """The same, of which no process outlives a test that fails."""
    with start(folder, *arguments, **variables) as process:
        try:
            yield process
        finally:
            for pid in (*children_of(process.pid), process.pid):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def until(folder: Path, rows: int, process: subprocess.Popen) -> None:
    """Return when so many rows are in the folder's table."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        table = folder / "runs.tsv"
        if table.exists() and table.read_bytes().count(b"\n") > rows:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {rows} rows: {process.stderr.read() if process.poll() is not None else 'too slow'}")


def workers_of(process: subprocess.Popen) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(process.pid)}
    return [pid for pid, command in commands.items() if b"large_batch_cifar_10_fast.train" in command]


def listening(pids: list[int]) -> set[str]:
    """On which addresses any of these processes waits to be called, as the kernel writes them."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {os.readlink(link)[8:-1] for link in links if os.readlink(link).startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    entries = [line.split() for table in tables for line in table]
    return {fields[1].split(":")[0] for fields in entries if fields[3] == "0A" and fields[9] in sockets}


def kill_a_worker(process: subprocess.Popen) -> None:
    """While the launcher is busy, so that it could hear from the other process first."""
    worker = workers_of(process)[1]
    process.send_signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)


def interrupt(process: subprocess.Popen) -> None:
    """What Ctrl-C does: the whole group gets it."""
    os.killpg(process.pid, signal.SIGINT)


ENDS = [  # what to do, the launcher's status, and how its line begins
    (kill_a_worker, 1, "process 1 was ended by SIGKILL (out of memory?)"),
    (subprocess.Popen.terminate, 128 + signal.SIGTERM, "ended by SIGTERM"),
    (interrupt, 128 + signal.SIGINT, "ended by SIGINT"),
    (subprocess.Popen.kill, -signal.SIGKILL, None),
]
