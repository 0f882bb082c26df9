"""Train in this process, one of those that a launch or torchrun has started."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import INVALID, LAUNCHER, RENDEZVOUS, SIGNALS, ConfigError, LostError


def is_started() -> bool:
    """Return whether a launch, or torchrun, has started this process to train."""
    return LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def train(arguments: Sequence[str]) -> NoReturn:
    """Train the recipe of a command line, and end the process. Each process names its own error, whatever its rank.

    It ends with os._exit: PyTorch's static destructors aborted 5 of 90 launches.
    """
    status = 0
    try:
        if LAUNCHER in os.environ:
            follow_launcher()
        from .conduct import run_program  # which imports torch
        from .program import load_program, recipe_of

        try:
            run_program(load_program(recipe_of(arguments)), arguments)
        except RuntimeError as error:
            if re.search("(of|allocate) memory|ALLOC_FAILED", str(error)):
                failure = ConfigError("out of memory: reduce --batch_size")
                failure.reported = False  # perhaps only this process has it
                raise failure from error
            raise
    except ConfigError as error:
        status = INVALID
        if launched := os.environ.get(RENDEZVOUS):  # our launcher prints it
            Path(launched.removeprefix("file://")).with_name(f"error.{os.getpid()}").write_text(str(error))
        elif error.reported:
            time.sleep(3)  # until another process has printed it: torchrun ends all when one ends
        else:
            print(f"train: {error}", file=sys.stderr)
    except (Exception, SystemExit) as error:
        status = 1
        if re.search("connection|remote process|recvvalue", str(error), re.IGNORECASE):
            time.sleep(3)  # a lost process caused this error: the launcher ends this one meanwhile
        if not isinstance(error, LostError | SystemExit):
            traceback.print_exc()
        print(f"process {os.environ.get('RANK', 0)} failed ({error!r})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def follow_launcher() -> None:
    """Leave Ctrl-C to the launcher, and end when it ends. It has started this process with blocked signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[LAUNCHER]):  # it ended before the request
        os._exit(1)
