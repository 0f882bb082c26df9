"""Make runs of a baseline and of variants in turn, and say which variants are better.

    cifar10-fast experiment --recipe muon --width 16 --runs 6 --try "filter_rate=0.12" --try "my_muon.py epochs=8"

The baseline is a recipe with options, as for `train`. A variant is a list of options, a program FILE.py, or both.
--grid filter_rate=0.12,0.24 --grid width=16,24 makes a variant of each pair of values, and of each --try if there is
one. All runs are tested on training images that are kept out (--holdout), so the test images are still new at the end.
The same command continues an interrupted experiment. More --runs or --try extend it, which is a second look at results.
All campaigns in the folder --out are compared. It has the tables and logs of the runs, and a picture.
"""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from .. import ConfigError, Interrupted, check_range
from ..core.hyp import settings_of
from ..core.printing import show
from ..lab.launch import start_launch
from ..lab.options import MOST, command_parser, make, text_of
from ..lab.program import load_program, read_command, recipe_of
from ..lab.report import Report, Verdict, accuracies, compare
from ..lab.results import Results, each_campaign, read_results
from ..lab.statistics import MARGIN
from ..lab.store import rows_in, write_tables
from ..lab.table import OPTION, Row, differences

HOLDOUT = 10_000  # a mean over 10,000 images has a third of the error of one over 1,000
ALIKE = ("data", "holdout", "seed")  # options that all campaigns share
BASELINE = "baseline"


# ---- The campaigns


def words_of_variant(text: str) -> tuple[str, list[str]]:
    """Return the name of a variant's campaign, and the words that it adds to a command line. Raise ConfigError."""
    names = shlex.split(text)
    if not names:
        raise ConfigError('give a variant, like --try "filter_rate=0.12", or --try FILE.py')
    words = [f"--{option}" for option in names]
    program = Path(names[0]).expanduser().absolute()
    if program.suffix == ".py":
        words[0] = f"--recipe={program}"
        names[0] = program.stem
    return re.sub(r"[^\w.+=-]", "-", "+".join(names))[:100], words


def cells_of(variants: Sequence[str], axes: Sequence[str]) -> list[str]:
    """Return each variant with each combination of the values of a grid. Raise ConfigError."""
    columns = [[*variants]] if variants else []
    for axis in axes:
        option, sign, values = axis.partition("=")
        if not (option and sign and all(values.split(","))):
            raise ConfigError(f"--grid {axis}: give an option and its values, like width=16,24")
        columns.append([f"{option}={value}" for value in values.split(",")])
    return [" ".join(cell) for cell in itertools.product(*columns)]


def words_of_campaigns(
    baseline: list[str], variants: Sequence[str], axes: Sequence[str], out: Path
) -> dict[str, list[str]]:
    """Return the words of a command line for each campaign. A cell of a grid may be the baseline. Raise ConfigError."""
    own = read_words(baseline)
    known = {BASELINE: own}
    campaigns = {BASELINE: baseline}
    for text in cells_of(variants, axes):
        name, added = words_of_variant(text)
        words = [*baseline, *added]
        values = read_words(words)
        if any(values[option] != own[option] for option in ALIKE):
            raise ConfigError(f"{name}: --{', --'.join(ALIKE)} are alike for all")
        if axes and values == own:
            continue
        if values in known.values() or name in known:
            raise ConfigError(f"{name} equals the baseline or another variant, or has its name")
        known[name] = values
        campaigns[name] = words
    for name, words in campaigns.items():
        check_recorded(name, words, out)
    return campaigns


def read_words(words: Sequence[str], images: int = 0) -> Row:
    """Return the options and settings of a command line, as a row has them. Raise ConfigError.

    `images` is the number of training images, 0 if it is unknown.
    """
    name, options, hyp = read_command(load_program(recipe_of(words)), words, images)
    settings = {f"{OPTION}{option}": value for option, value in settings_of(hyp).items()}
    given = {**asdict(options), **settings, "recipe": name}
    return {option: text_of(value) for option, value in given.items()}


def check_recorded(name: str, words: Sequence[str], out: Path) -> None:
    """Raise ConfigError if a campaign has runs of other settings than these words ask for."""
    for row in rows_in(out / "runs" / name)[:1]:
        wanted = read_words(words, int(row["training_images"]))
        found = differences(wanted, row, [option for option in wanted if option.startswith((OPTION, "recipe"))])
        if found:
            raise ConfigError(f"{out} has runs of {name} with other settings: {found}; choose another --out")


# ---- The runs


def take_turns(campaigns: Mapping[str, list[str]], runs: int, out: Path) -> dict[str, str]:
    """Make the missing runs. Return how campaigns failed.

    The campaigns take turns: the target doubles each round, 1, 2, 4, ... runs. So all run on the machine in the same
    state, and have few starts. A variant that fails gets no more runs. If the baseline fails, the experiment
    stops. Other launches may make some of the runs meanwhile.
    """
    failed: dict[str, str] = {}
    target = 0
    finished = sum(len(rows_in(out / "runs" / name)) for name in campaigns)
    with tqdm(total=runs * len(campaigns), initial=finished, unit="runs", smoothing=0, disable=None) as bar:
        while target < runs and BASELINE not in failed:
            target = min(max(1, 2 * target), runs)
            for name, words in campaigns.items():
                folder = out / "runs" / name
                before = len(rows_in(folder))
                if before >= target or failed.keys() & {name, BASELINE}:
                    continue
                show(f"{name}: making {target} of {runs} runs")
                where = [f"--campaign={name}", f"--runs={target}", f"--out={out}"]
                try:
                    failure = launch([*words, *where], out / f"{name}.log")
                except ConfigError as error:
                    if name == BASELINE:
                        raise
                    failure = str(error)
                if failure:
                    failed[name] = failure
                bar.update(len(rows_in(folder)) - before)
    return failed


def launch(words: Sequence[str], log: Path) -> str:
    """Make the runs of a command line. Return how that failed, or "". Raise ConfigError for an invalid request."""
    with log.open("ab") as stream, start_launch(words, stream) as processes:
        return processes.wait().failure


# ---- The report


def read_campaigns(out: Path) -> dict[str, Results]:
    """Return the results of all campaigns in a folder, best first. Raise ConfigError without any of the baseline."""
    write_tables(out)
    read_results(f"{out}/runs.tsv:{BASELINE}")
    found = [read_results(source) for source in each_campaign(f"{out}/runs.tsv:*")]
    return {each.campaign: each for each in sorted(found, key=lambda each: -accuracies(each).mean())}


def next_commands(campaigns: Mapping[str, list[str]], runs: int, report: Report) -> str:
    """Return the commands of the final test: of the baseline, and of the best variant that is better."""
    better = [name for name, verdict in report.verdicts.items() if verdict.word == "better" and name in campaigns]
    lines = ["Last and once, the test images:"]
    for name in (BASELINE, *better[:1]):
        words = [word for word in campaigns[name] if not word.startswith("--holdout")]
        lines.append(f"  ./cifar10-fast train {shlex.join(words)} --campaign={name} --runs={runs}")
    return "\n".join(lines)


def draw_differences(verdicts: Mapping[str, Verdict], picture: Path) -> None:
    """Draw the differences from the baseline with their intervals, as wide as README shows a picture."""
    from ..lab.figures import new_figure, write_picture  # Matplotlib takes a third of a second, and errors come first

    compared = {f"{name}\n{each.word}": each.found for name, each in verdicts.items() if each.found}
    figure = new_figure(8.5, 1.6 + 0.45 * len(compared))
    axes = figure.subplots()
    axes.axvspan(-MARGIN, MARGIN, color="0.92", lw=0)
    axes.axvline(0, color="black", lw=0.8)
    for row, found in enumerate(compared.values()):
        errors = [[found.difference - found.low], [found.high - found.difference]]
        axes.errorbar(found.difference, row, xerr=errors, fmt="o", color="C0", lw=2)
    axes.set_yticks(range(len(compared)), [*compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"accuracy minus baseline's, points, with 99% intervals (grey: {MARGIN:g} points)")
    write_picture(figure, picture)


@dataclass(frozen=True)
class Command:
    """What to try. All other options are the baseline's."""

    runs: int = 12  # runs of each, chosen before you look
    out: Path = Path("experiment")  # folder of the experiment
    holdout: int = HOLDOUT  # training images to test on
    markdown: bool = False  # print tables as Markdown
    report: bool = False  # make no runs; compare the finished ones


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(Command, __doc__)
    parser.add_argument("--try", dest="variants", action="append", default=[], metavar="CHANGE", help="a variant")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUES", help="a variant for each value")
    given, baseline = parser.parse_known_args(arguments)
    options = make(Command, vars(given))
    check_range(options, 1, MOST, "runs", "holdout")
    out = options.out.expanduser()
    baseline = [*baseline, f"--holdout={options.holdout}"]
    campaigns = words_of_campaigns(baseline, given.variants, given.grid, out)
    failed: dict[str, str] = {}
    if not options.report:
        out.mkdir(parents=True, exist_ok=True)
        try:
            failed = take_turns(campaigns, options.runs, out)
        except Interrupted as end:
            show("Not finished: the same command continues.")
            return end.args[1]
    for name, failure in failed.items():
        show(f"{name} failed ({failure}); its log is {out / name}.log")
    if BASELINE in failed:
        return 1
    found = read_campaigns(out)
    report = compare(found, BASELINE, markdown=options.markdown)
    print(f"Baseline: {shlex.join(baseline)}\n\n{report.text}\n")
    for name in sorted(campaigns.keys() - found.keys() - failed.keys()):
        print(f"{name}: waiting")
    if any(verdict.found for verdict in report.verdicts.values()):
        picture = out / "experiment.png"
        draw_differences(report.verdicts, picture)
        print(f"Picture: {picture}")
    print(next_commands(campaigns, options.runs, report))
    return int(bool(failed))
