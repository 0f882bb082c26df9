"""Make the runs of a campaign.

Start the processes of a launch on this machine, and report how they ended.
"""

import shlex
from collections.abc import Sequence

from .. import Interrupted
from ..core.printing import show
from ..lab.launch import Ended, start_launch
from ..lab.log import print_summary
from ..lab.process import is_started, train
from ..lab.snapshot import place_of
from ..lab.store import rows_in


def main(arguments: Sequence[str]) -> int:
    """Make a campaign's runs. Return the exit status: 0, 1 after a failure, 128 + N after signal N."""
    if is_started():
        train(arguments)
    place = place_of(arguments).named()
    if "--resume" in arguments:  # the words of the first launch, which those of this command follow
        arguments = [*shlex.split((place.folder / "command").read_text()), *arguments]
    with start_launch([*arguments, "--campaign", place.campaign]) as launch:
        try:
            ended = launch.wait()
        except Interrupted as end:
            ended = Ended(*end.args)
    rows = [row for row in rows_in(place.folder) if int(row["run"]) < launch.runs]
    if ended.status:
        again = f"; the same command with --campaign {place.campaign} continues" if rows else ""
        finished = f"{len(rows)} of {launch.runs} runs are finished"
        show(f"train: {ended.failure}; {finished}{again}")
        return ended.status
    print_summary(rows)
    return 0
