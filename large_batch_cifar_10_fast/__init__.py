"""CIFAR-10 to 94%, eight workers at a time: a living reproduction of the 2019 result."""

import contextlib
import ctypes
import os
import signal

__version__ = "0.1.0"
LAUNCH = "LARGE_BATCH_LAUNCH"  # set by the launcher: its process id, for its processes; "0" for itself


def end_with_launcher() -> None:
    """Ask Linux to end this process when the launcher ends, even by SIGKILL; end without a traceback on Ctrl-C.

    It happens here, before torch is imported, which takes seconds.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored, as after `&` in a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launcher := int(os.environ[LAUNCH]):
        with contextlib.suppress(OSError, AttributeError):  # not Linux: torchrun ends its processes itself
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:  # it ended before the request
            os._exit(1)


if LAUNCH in os.environ:
    end_with_launcher()
