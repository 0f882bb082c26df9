"""Compare campaigns with a reference: differences in conditions, means with 99% confidence intervals, and verdicts.

    cifar10-fast compare night/runs.tsv day/runs.tsv published

The reference is the last campaign, or the one that --reference names. A single runs.tsv is not compared: the command
lists its campaigns and their progress. A campaign is one of
  FILE             the last campaign of a runs.tsv
  FILE:CAMPAIGN    a campaign of a runs.tsv; FILE:* is each of them
  '*/runs.tsv'     several tables as one
  published        Apple's 50 runs of apple2019 on CIFAR-10; published:NAME is an entry to DAWNBench
docs/experiments.md explains the intervals and verdicts.

Exit status: 0 none is worse, 1 one is worse (in accuracy, or in time on the same devices), 2 unreadable.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from .. import ConfigError
from ..files import is_running
from ..lab.options import command_parser
from ..lab.report import MARGIN, Cells, compare
from ..lab.results import Results, each_campaign, find_files, names_of, read_results
from ..lab.statistics import in_columns, in_markdown

HEAD = ("campaign", "runs", "accuracy, %", "state")


def line_of(campaign: Results, table: Path) -> tuple[str, ...]:
    """Return a campaign's results so far, and its state, for the list of a table's campaigns."""
    folder = table.parent / "runs" / campaign.campaign
    count = str(campaign.count)
    state = "not running"
    with contextlib.suppress(OSError, ValueError):  # it was deleted, or may not be opened, or is being written
        planned = json.loads((folder / "campaign.json").read_text())["runs"]
        count = f"{count} of {planned}"
        if is_running(folder):
            state = "running"
        if campaign.count >= planned:
            state = "complete"
    if campaign.diverged:
        count += f", {campaign.diverged} diverged"
    accuracies = 100 * campaign.runs["accuracy"]
    shown = f"{accuracies.mean():.3f} ± {accuracies.std():.3f}".replace(" ± nan", "").replace("nan", "-")
    return campaign.campaign, count, shown, state


def list_campaigns(source: str) -> Cells:
    """Return the table of the campaigns in a runs.tsv, or of a named one."""
    lines: Cells = [HEAD]
    for table, campaign in find_files(source):
        names = each_campaign(f"{table}:{campaign or '*'}")
        lines += [line_of(read_results(name), table) for name in names]
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("campaigns", nargs="+", metavar="CAMPAIGN")
    parser.add_argument("--reference", metavar="CAMPAIGN", help="campaign to compare with (default: the last)")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points of accuracy that are equivalent (0.1)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    options = parser.parse_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    sources = [name for source in options.campaigns for name in each_campaign(source)]
    if options.reference:
        sources = [each for each in sources if each != options.reference] + [options.reference]
    if len(sources) == 1:
        print((in_markdown if options.markdown else in_columns)(list_campaigns(sources[0])))
        return 0
    found = [read_results(source) for source in sources]
    for each in found:
        if not each.count:
            raise ConfigError(f"{each.name} has no finished run: wait for one, or name another FILE:CAMPAIGN")
    names = names_of(found)
    report = compare(dict(zip(names, found, strict=True)), names[-1], options.margin, markdown=options.markdown)
    print(report.text)
    words = [verdict.word for verdict in [*report.accuracy.values(), *report.seconds.values()]]
    return int("worse" in words)
