"""How processes end: quietly on Ctrl-C, and never later than the launch that they belong to.

No torch is needed for it, so that it holds from the first moment: importing torch takes seconds.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping

LAUNCH = "LARGE_BATCH_LAUNCH"  # the launcher's process; "0" in the launcher itself; unset where there is none


def end_with_launch(environment: Mapping[str, str]) -> None:
    """Ask Linux to end this process when the launcher ends, however that ends (even by SIGKILL).

    Ctrl-C ends it silently: a traceback from each process would tell nobody anything.
    """
    if LAUNCH not in environment:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as after `&` in a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = int(environment[LAUNCH])
    if launcher:
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):  # not Linux: torchrun's own clean-up has to do
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before it could be asked for
            os._exit(1)
