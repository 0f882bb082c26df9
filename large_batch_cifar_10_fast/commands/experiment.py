"""Make runs of a baseline and of variants in turn, and say which variants are better.

    cifar10-fast experiment --recipe muon --width 16 --runs 6 --try "filter_rate=0.12" --try "my_muon.py epochs=8"

The baseline is a recipe with options, as for `train`. A variant is a list of options, a program FILE.py, or both.
--grid filter_rate=0.12,0.24 --grid width=16,24 makes a variant of each pair of values. All runs are tested on training
images that are kept out (--holdout), so the test images are still new at the end. The same command continues an
interrupted experiment. More --runs or --try extend it, which is a second look at results.
The folder --out has the tables and logs of the runs, and a picture.
"""

import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

from .. import ConfigError, Interrupted
from ..core.printing import show
from ..files import write_atomically
from ..lab.figures import new_figure, write_picture
from ..lab.launch import start_launch
from ..lab.options import Options, command_parser
from ..lab.program import load_program, read_command, recipe_of
from ..lab.report import MARGIN, Verdict, accuracies, compare
from ..lab.results import Results, read_results
from ..lab.store import rows_in, rows_of, write_tables

HOLDOUT = 10_000  # of CIFAR-10's 50,000 images: the error of a mean is a third of that over 1,000
ALIKE = ("data", "holdout", "seed")  # options that all campaigns share
BASELINE = "baseline"
COLORS = {"better": "C2", "worse": "C1", "equivalent": "C0"}


class Plan(NamedTuple):
    """What is compared, as experiment.json keeps it."""

    baseline: list[str]  # words of a command line
    variants: dict[str, list[str]]  # words that are added to it, by campaign
    looks: list[dict[str, int]]  # numbers of runs and variants, chosen before each look

    @property
    def campaigns(self) -> dict[str, list[str]]:
        """The words of each campaign's command line."""
        return {BASELINE: self.baseline} | {name: self.baseline + words for name, words in self.variants.items()}

    @property
    def runs(self) -> int:
        return self.looks[-1]["runs"]


# ---- The plan


def words_of_variant(text: str) -> tuple[str, list[str]]:
    """Return the name of a variant's campaign, and the words that it adds to a command line. Raise ConfigError."""
    names = shlex.split(text)
    if not names:
        raise ConfigError('--try "": give name=value, or FILE.py')
    words = [f"--{option}" for option in names]
    program = Path(names[0]).expanduser().absolute()
    if program.suffix == ".py":
        words[0] = f"--recipe={program}"
        names[0] = program.stem
    return re.sub(r"[^\w.:+=-]", "-", "+".join(names))[:100], words


def cells_of(axes: Sequence[str]) -> list[str]:
    """Return a variant for each combination of values. Raise ConfigError."""
    columns = []
    for axis in axes:
        option, sign, values = axis.partition("=")
        if not (option and sign and all(values.split(","))):
            raise ConfigError(f"--grid {axis}: give an option and its values, like width=16,24")
        columns.append([f"{option}={value}" for value in values.split(",")])
    return [" ".join(cell) for cell in itertools.product(*columns)] if columns else []


def make_plan(baseline: list[str], texts: Sequence[str], axes: Sequence[str], runs: int, out: Path) -> Plan:
    """Return the plan of an experiment, new or continued. Raise ConfigError if it cannot be one.

    Variants of an earlier plan stay if they have a run. A cell of a grid may be the baseline.
    """
    made = rows_of(out)
    before = read_plan(out) if made else Plan(baseline, {}, [])  # without a run there is nothing to continue
    if before.baseline != baseline:
        was = shlex.join(before.baseline)
        raise ConfigError(f"{out} has an experiment with the baseline {was}: give the same, or another --out")
    own = read_words(baseline)
    cells = cells_of(axes)
    variants = {name: words for name, words in before.variants.items() if name in made}
    known = [own]
    for text in [*texts, *cells]:
        name, words = words_of_variant(text)
        values = read_words([*baseline, *words])
        if any(getattr(values[1], option) != getattr(own[1], option) for option in ALIKE):
            raise ConfigError(f"{name}: --{', --'.join(ALIKE)} are alike for all: give them to the baseline")
        if text in cells and values == own:
            continue
        if values in known or variants.get(name, words) != words:
            raise ConfigError(f"{name} equals the baseline or another variant, or has the name of one: leave it out")
        known.append(values)
        variants[name] = words
    if not variants:
        raise ConfigError('there is nothing to compare: give a variant, like --try "filter_rate=0.12"')
    look = {"runs": runs, "variants": len(variants)}
    looks = before.looks if look in before.looks[-1:] else [*before.looks, look]
    return Plan(baseline, variants, looks)


def read_words(words: Sequence[str]) -> tuple[str, Options, dict[str, Any]]:
    """Return the recipe, the options and the hyper-parameters of a command line. Raise ConfigError."""
    recipe = recipe_of(words)
    _, options, hyp = read_command(load_program(recipe), words)
    return recipe, options, asdict(hyp)


def read_plan(out: Path) -> Plan:
    return Plan(**json.loads((out / "experiment.json").read_text()))


def write_plan(plan: Plan, out: Path) -> None:
    """Write a plan before its first run."""
    out.mkdir(parents=True, exist_ok=True)
    with write_atomically(out / "experiment.json") as unfinished:
        unfinished.write_text(json.dumps(plan._asdict(), indent=1))


# ---- The runs


def make_runs(plan: Plan, out: Path) -> dict[str, str]:
    """Make the missing runs. Return how campaigns failed.

    The campaigns take turns: in a round all get the same number of runs. So all run on the machine in the same state.
    The runs of a turn take ten times as long as its start, but are at most half of a campaign. A variant that fails
    gets no more runs. If the baseline fails, the experiment stops. Other launches may make some of the runs meanwhile.
    """
    failed: dict[str, str] = {}
    target = 0
    turn = 1
    finished = sum(len(rows_in(out / "runs" / name)) for name in plan.campaigns)
    total = plan.runs * len(plan.campaigns)
    with tqdm(total=total, initial=finished, unit="runs", smoothing=0, disable=None) as bar:
        while target < plan.runs and BASELINE not in failed:
            target = min(target + turn, plan.runs)
            for name, words in plan.campaigns.items():
                folder = out / "runs" / name
                before = len(rows_in(folder))
                if before >= target or failed.keys() & {name, BASELINE}:
                    continue
                show(f"{name}: to run {target} of {plan.runs}")
                start = time.monotonic()
                failure = launch(
                    [*words, f"--campaign={name}", f"--runs={target}", f"--out={out}"], out / f"{name}.log"
                )
                if failure:
                    failed[name] = failure
                made = rows_in(folder)[before:]
                bar.update(len(made))
                if made:
                    training = sum(float(row["seconds"]) for row in made)
                    around = time.monotonic() - start - training  # start, compilation, validation and end
                    turn = max(1, min(math.ceil(10 * around * len(made) / training), (plan.runs + 1) // 2))
    return failed


def launch(words: Sequence[str], log: Path) -> str:
    """Make the runs of a command line. Return how that failed, or ""."""
    try:
        with log.open("ab") as stream, start_launch(words, stream) as processes:
            return processes.wait().failure
    except ConfigError as error:
        return str(error)


# ---- The report


def read_campaigns(plan: Plan, out: Path) -> dict[str, Results]:
    """Return the results of all campaigns that have runs, best first. Raise ConfigError without any of the baseline."""
    write_tables(out)
    names = [name for name in plan.campaigns if name in {BASELINE, *rows_of(out)}]
    found = {name: read_results(f"{out}/runs.tsv:{name}") for name in names}
    return dict(sorted(found.items(), key=lambda pair: -accuracies(pair[1]).mean()))


def notes_on(plan: Plan, found: Mapping[str, Results], verdicts: Mapping[str, Verdict]) -> str:
    """Return notes on unfinished runs, the looks, and the final test."""
    notes = []
    if sum(each.count for each in found.values()) < plan.runs * len(plan.campaigns):
        notes.append(f"Not finished: {plan.runs} runs of each are planned.")
    if len(plan.looks) > 1:
        texts = ["{runs} runs of {variants} variant(s)".format(**look) for look in plan.looks]
        notes.append(f"Look {len(texts)}: {', then '.join(texts)}. The intervals hold for one look.")
    better = [name for name, verdict in verdicts.items() if verdict.word == "better"]
    notes.append("Use the test images last, and only once:")
    for name in (BASELINE, *better[:1]):
        words = [word for word in plan.campaigns[name] if not word.startswith("--holdout")]
        notes.append(f"  cifar10-fast train {shlex.join(words)} --campaign={name} --runs={plan.runs}")
    return "\n".join(notes)


def draw_differences(verdicts: Mapping[str, Verdict]) -> Figure:
    """Draw the differences from the baseline with their intervals, as wide as README shows a picture."""
    compared = {name: (verdict.word, verdict.found) for name, verdict in verdicts.items() if verdict.found}
    figure = new_figure(8.5, 1.6 + 0.45 * len(compared))
    axes = figure.subplots()
    axes.axvspan(-MARGIN, MARGIN, color="0.92", lw=0)
    axes.axvline(0, color="black", lw=0.8)
    for row, (word, found) in enumerate(compared.values()):
        color = COLORS.get(word, "0.35")
        axes.plot([found.low, found.high], [row, row], color=color, lw=2)
        axes.plot(found.difference, row, "o", color=color)
        axes.annotate(word, (1.01, row), xycoords=("axes fraction", "data"), color=color, va="center")
    axes.set_yticks(range(len(compared)), [*compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"accuracy minus baseline's, points: mean over pairs, 99% intervals (grey: {MARGIN:g} points)")
    axes.set_title("Difference from the baseline")
    return figure


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--try", dest="variants", action="append", default=[], metavar="CHANGE", help="a variant")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUES", help="a variant for each value")
    parser.add_argument("--runs", type=int, default=12, help="runs of each, chosen before you look (12)")
    parser.add_argument("--out", type=Path, default=Path("experiment"), help="folder of the experiment (experiment)")
    parser.add_argument("--holdout", type=int, default=HOLDOUT, help="training images to test on (10000)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--report", action="store_true", help="make no runs; show the finished ones")
    options, baseline = parser.parse_known_args(arguments)
    if options.runs < 3 or options.holdout < 1:
        raise ConfigError("use at least 3 --runs and a --holdout of at least 1 image")
    out = options.out.expanduser()
    failed: dict[str, str] = {}
    if not options.report:
        words = [*baseline, f"--holdout={options.holdout}"]
        plan = make_plan(words, options.variants, options.grid, options.runs, out)
        write_plan(plan, out)
        try:
            failed = make_runs(plan, out)
        except Interrupted as end:
            show("Not finished: the same command continues.")
            return end.args[1]
    for name, failure in failed.items():
        show(f"{name} failed ({failure}); its log is {out / name}.log")
    if BASELINE in failed:
        return 1
    plan = read_plan(out)
    found = read_campaigns(plan, out)
    report = compare(found, BASELINE, tests=len(plan.variants), markdown=options.markdown)
    print(f"Baseline: {' '.join(plan.baseline)}\n\n{report.text}\n\n{notes_on(plan, found, report.accuracy)}")
    if any(verdict.found for verdict in report.accuracy.values()):
        picture = out / "experiment.png"
        write_picture(draw_differences(report.accuracy), picture)
        print(f"Picture: {picture}")
    return int(bool(failed))
