"""Compare campaigns with a reference: differences in conditions, means with 99% confidence intervals, and verdicts.

    cifar10-fast compare night/runs.tsv day/runs.tsv published

The reference is the last campaign. A single runs.tsv is not compared: the command lists its campaigns. A campaign is
one of
  FILE             the last campaign of a runs.tsv
  FILE:CAMPAIGN    a campaign of a runs.tsv; FILE:* is each of them
  published        Apple's 50 runs of apple2019 on CIFAR-10; published:NAME is an entry to DAWNBench
docs/experiments.md explains the intervals and verdicts.

Exit status: 0 none is less accurate, 1 one is, 2 unreadable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..lab.options import read_options
from ..lab.report import Cells, accuracies, compare
from ..lab.results import Results, each_campaign, find_file, names_of, read_results
from ..lab.statistics import in_columns, mean_and_std


def list_campaigns(campaigns: Sequence[Results]) -> Cells:
    """Return a table of campaigns, with their results so far."""
    lines: Cells = [("campaign", "runs", "accuracy, %")]
    for each in campaigns:
        lines.append((each.campaign, str(len(each.runs) + each.diverged), mean_and_std(accuracies(each))))
    return lines


@dataclass(frozen=True)
class Command:
    """What to compare, and how."""

    campaigns: tuple[str, ...]  # sources of results, see above
    markdown: bool = False  # print tables as Markdown


def main(arguments: Sequence[str]) -> int:
    options = read_options(Command, __doc__, arguments)
    sources = [name for source in options.campaigns for name in each_campaign(source)]
    if len(sources) == 1:
        table, campaign = find_file(sources[0])
        found = [read_results(name) for name in each_campaign(f"{table}:{campaign or '*'}")]
        print(in_columns(list_campaigns(found)))
        return 0
    found = [read_results(source) for source in sources]
    names = names_of(found)
    report = compare(dict(zip(names, found, strict=True)), names[-1], options.markdown)
    print(report.text)
    return int("worse" in [verdict.word for verdict in report.verdicts.values()])
