"""Compare campaigns with a reference: differences in conditions, means with 99% confidence intervals, and verdicts.

    cifar10-fast compare night/runs.tsv day/runs.tsv published

The reference is the last campaign, or the one that --reference names. A single runs.tsv is not compared: the command
lists its campaigns. A campaign is one of
  FILE             the last campaign of a runs.tsv
  FILE:CAMPAIGN    a campaign of a runs.tsv; FILE:* is each of them
  '*/runs.tsv'     several tables as one
  published        Apple's 50 runs of apple2019 on CIFAR-10; published:NAME is an entry to DAWNBench
docs/experiments.md explains the intervals and verdicts.

Exit status: 0 none is worse, 1 one is worse (in accuracy, or in time on the same devices), 2 unreadable.
"""

from collections.abc import Sequence

from .. import ConfigError
from ..lab.options import command_parser
from ..lab.report import MARGIN, Cells, accuracies, compare
from ..lab.results import Results, each_campaign, find_files, names_of, read_results
from ..lab.statistics import in_columns, in_markdown, mean_and_std


def list_campaigns(campaigns: Sequence[Results]) -> Cells:
    """Return a table of campaigns, with their results so far."""
    lines: Cells = [("campaign", "runs", "diverged", "accuracy, %", "runs at 94%")]
    for each in campaigns:
        counts = (str(each.count), str(each.diverged))
        lines.append((each.campaign, *counts, mean_and_std(accuracies(each)), str(each.reached)))
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("campaigns", nargs="+", metavar="CAMPAIGN")
    parser.add_argument("--reference", metavar="CAMPAIGN", help="campaign to compare with (default: the last)")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points of accuracy that are equivalent (0.1)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    options = parser.parse_args(arguments)
    sources = [name for source in options.campaigns for name in each_campaign(source)]
    if options.reference:
        sources = [each for each in sources if each != options.reference] + [options.reference]
    if len(sources) == 1:
        listed = [f"{table}:{campaign or '*'}" for table, campaign in find_files(sources[0])]
        found = [read_results(name) for source in listed for name in each_campaign(source)]
        print((in_markdown if options.markdown else in_columns)(list_campaigns(found)))
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
