"""From an idea to a verdict: make runs of a baseline and of variants in turn, and say which are better.

    cifar10-fast experiment --recipe muon --width 16 --runs 6 --try "filter_rate=0.12" --try "my_muon.py epochs=8"

The baseline is a recipe with options, as for `train`. A variant is options that change it, or a program FILE.py, with
options if need be. All are tested on training images that are kept out (--holdout), so that the test images are still
new at the end. The same command continues an experiment that was interrupted; more --runs or --try add to it, which is
a second look. --out gets the tables and logs of the runs, and a picture.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import ConfigError
from ..files import write_atomically
from .compare import MARGIN, Verdict, accuracies, compare
from .figures import write_picture
from .options import command_parser
from .program import load_program, read_command, recipe_of
from .results import Log, read_log
from .table import read
from .train import launch

HOLDOUT = 10_000  # images of CIFAR-10's 50,000: a mean over them is exact to a third of what 1,000 allow
OWN = ("campaign", "resume", "save", "profile")  # options of a run that an experiment sets or cannot use
ALIKE = ("data", "holdout", "seed", "runs", "out", "teams", "nproc", "device")  # of all its campaigns
BASELINE = "baseline"
ORDINALS = {2: "Second", 3: "Third", 4: "Fourth", 5: "Fifth"}
COLORS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2"}


@dataclass
class Plan:
    """What is compared, as experiment.json keeps it."""

    baseline: list[str]  # words of a command line
    variants: dict[str, list[str]]  # words that are added to it, by campaign
    looks: list[dict[str, int]]  # runs and variants of each, which were chosen before it

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
    words = []
    for number, part in enumerate(text.split()):
        if number == 0 and part.endswith(".py"):
            words.append(f"--recipe={part}")
        elif re.fullmatch(r"\w+(=.*)?", part):
            words.append(f"--{part}")
        else:
            raise ConfigError(f'--try "{text}": {part} is no option like name=value; FILE.py comes first')
    if not words:
        raise ConfigError('--try "": give name=value, or FILE.py')
    stems = [Path(part).stem if part.endswith(".py") else part for part in text.split()]
    return re.sub(r"[^\w.:+=-]", "-", "+".join(stems))[:100], words


def make_plan(baseline: Sequence[str], texts: Sequence[str], runs: int, out: Path) -> Plan:
    """Return the plan of an experiment, new or continued. Raise ConfigError if it cannot be one."""
    variants: dict[str, list[str]] = {}
    for text in texts:
        name, words = words_of_variant(text)
        if name in variants or name == BASELINE:
            raise ConfigError(f'--try "{text}" has the name {name}, as another has: leave it out, or rename the file')
        variants[name] = words
    begun = read_plan(out) if read(out / "runs.tsv") else None  # without a run there is nothing to continue
    plan = begun or Plan(list(baseline), {}, [])
    if plan.baseline != list(baseline):
        before = " ".join(plan.baseline)
        raise ConfigError(f"{out} has an experiment with the baseline {before}: give the same, or another --out")
    changed = [name for name in variants if plan.variants.get(name, variants[name]) != variants[name]]
    if changed:
        raise ConfigError(f"{out} has another variant {changed[0]}: choose another --out")
    plan.variants |= variants
    if not plan.variants:
        raise ConfigError('there is nothing to compare: give a variant, like --try "filter_rate=0.12"')
    if plan.looks and runs < plan.runs:
        raise ConfigError(f"--runs {runs} is less than the {plan.runs} that were planned: give as many or more")
    look = {"runs": runs, "variants": len(plan.variants)}
    if look not in plan.looks:
        plan.looks.append(look)
    return plan


def read_plan(out: Path) -> Plan | None:
    """Return the plan of an experiment; None if there is none. Raise ConfigError if it cannot be read."""
    path = out / "experiment.json"
    try:
        return Plan(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): choose another --out") from error


def write_plan(plan: Plan, out: Path) -> None:
    """Write a plan before its first run. Raise ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with write_atomically(out / "experiment.json") as unfinished:
            unfinished.write_text(json.dumps(asdict(plan), indent=1))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): choose another --out") from error


def check_commands(plan: Plan) -> int:
    """Return the teams of each launch. Raise ConfigError for a command line that a program would refuse."""
    for name in OWN + ALIKE:
        given = plan.campaigns if name in OWN else plan.variants
        if any(re.fullmatch(f"--{name}(=.*)?", word) for words in given.values() for word in words):
            whose = "experiments" if name in OWN else "variants"
            raise ConfigError(f"--{name} is not for {whose}: leave it out")
    for words in plan.campaigns.values():
        read_options(words)
    return read_options(plan.baseline)[0].teams


def read_options(words: Sequence[str]) -> tuple[Any, Any]:
    """Return the options and hyper-parameters of a command line. Raise ConfigError."""
    recipe = recipe_of(words)
    return read_command(load_program(recipe), words)[1:]


# ---- The runs


def make_runs(plan: Plan, out: Path, teams: int) -> tuple[dict[str, str], int]:
    """Make the missing runs, the campaigns in turn, so that all meet the same machine.

    A turn is one run of each team; or as many as take the time of a start, but at most half of all. A variant that
    fails is left out from then on, and nothing is made without the baseline. Return how campaigns failed, and the exit
    status of a launch that a signal ended, or 0.
    """
    failed: dict[str, str] = {}
    turn = teams
    done = 0
    while done < plan.runs:
        done = min(done + turn, plan.runs)
        for name, words in plan.campaigns.items():
            finished = seconds_of_runs(out, name)
            if len(finished) >= done or name in failed:
                continue
            options = [*precision_of(out), *words, f"--campaign={name}", f"--runs={done}", f"--out={out}"]
            first = len(finished) + 1
            runs = f"run {done}" if first == done else f"runs {first} to {done}"
            print(f"{name}: {runs} of {plan.runs}", file=sys.stderr)
            start = time.monotonic()
            failure, status = launch_into(out / f"{name}.log", options)
            if status > 128:
                return failed, status
            made = seconds_of_runs(out, name)[len(finished) :]
            if status or not made:
                failed[name] = failure or "another launch is making its runs"
                if name == BASELINE:
                    return failed, 0
                continue
            training = sum(made) / teams
            around = time.monotonic() - start - training  # start, compilation and end
            turn = max(teams, min((plan.runs + 1) // 2, round(around * len(made) / training)))
    return failed, 0


def launch_into(log: Path, options: Sequence[str]) -> tuple[str, int]:
    """Make runs, and append their log to a file. Return how that failed, and the exit status."""
    try:
        with log.open("ab") as file:
            ended = launch(options, file)
    except ConfigError as error:
        return str(error), 1
    return ended.failure, ended.status


def seconds_of_runs(out: Path, campaign: str) -> list[float]:
    return [float(row["seconds"]) for row in read(out / "runs.tsv") if row["campaign"] == campaign]


def precision_of(out: Path) -> list[str]:
    """Return the option that gives all runs the precision of the first: a CPU might choose another when it is busy."""
    return [f"--precision={row['precision']}" for row in read(out / "runs.tsv")[:1]]


# ---- The verdicts


def read_logs(plan: Plan, out: Path) -> dict[str, Log]:
    """Return the results of all campaigns that have runs, best first. Raise ConfigError without any of the baseline."""
    made = {row["campaign"] for row in read(out / "runs.tsv")}
    if BASELINE not in made:
        raise ConfigError(f"{out} has no finished run of the baseline: start without --report")
    logs = {name: read_log(f"{out}/runs.tsv:{name}") for name in plan.campaigns if name in made}
    return dict(sorted(logs.items(), key=lambda pair: -accuracies(pair[1]).mean()))


def notes_on(plan: Plan, logs: Mapping[str, Log], verdicts: Mapping[str, Verdict]) -> str:
    """Return what is known of the looks, and what is to be done last."""
    notes = []
    if len(logs) < len(plan.campaigns) or any(log.count < plan.runs for log in logs.values()):
        notes.append(f"Not finished: {plan.runs} runs of each are planned.")
    if len(plan.looks) > 1:
        look = ORDINALS.get(len(plan.looks), f"{len(plan.looks)}th")
        texts = ["{runs} runs of {variants} variant(s)".format(**look) for look in plan.looks]
        notes.append(f"{look} look: planned {', then '.join(texts[:-1])}, now {texts[-1]}.")
        notes.append("Each look finds chance differences; the intervals hold for a single one.")
    better = [name for name, verdict in verdicts.items() if verdict.word == "better"][:1]
    notes.append("The test images come last, once:")
    for name in (BASELINE, *better):
        words = [word for word in plan.campaigns[name] if not word.startswith("--holdout")]
        words += [f"--campaign={name}", f"--runs={plan.runs}"]
        notes.append(f"  cifar10-fast train {shlex.join(words)}")
    return "\n".join(notes)


# ---- The picture


def swept_option(plan: Plan) -> tuple[str, dict[str, float]]:
    """Return the option of which two or more variants are values, and its value by campaign; or "" and nothing."""
    pairs = {}
    for name, words in plan.variants.items():
        option, _, value = words[0].removeprefix("--").partition("=")
        if len(words) == 1 and re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", value):
            pairs[name] = option, float(value)
    options = [option for option, _ in pairs.values()]
    option = max(options, key=options.count, default="")
    own = getattr(read_options(plan.baseline)[1], option, None)
    if options.count(option) < 2 or not isinstance(own, int | float):
        return "", {}
    values = {name: value for name, (owner, value) in pairs.items() if owner == option}
    return option, values | {BASELINE: float(own)}


def draw(plan: Plan, logs: Mapping[str, Log], verdicts: Mapping[str, Verdict], margin: float) -> Figure:
    """Draw the differences with their intervals; beside them accuracy against the option, if the variants are a sweep.

    The picture is as wide as README shows it.
    """
    option, values = swept_option(plan)
    compared = {name: verdict for name, verdict in verdicts.items() if verdict.found}
    figure = Figure(figsize=(8.5, 1.6 + 0.45 * len(compared) + (2.2 if option else 0)), dpi=200, layout="constrained")
    panels: Any = figure.subplots(2 if option else 1, 1, squeeze=False)[:, 0]
    draw_differences(panels[0], compared, margin)
    if option:
        draw_sweep(panels[1], option, {name: value for name, value in values.items() if name in logs}, logs)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_differences(axes: Axes, compared: Mapping[str, Verdict], margin: float) -> None:
    axes.axvspan(-margin, margin, color="0.92", lw=0)
    axes.axvline(0, color="black", lw=0.8)
    for place, verdict in enumerate(compared.values()):
        found: Any = verdict.found
        color = COLORS.get(verdict.word, "0.35")
        axes.plot([found.low, found.high], [place, place], color=color, lw=2)
        axes.plot(found.difference, place, "o", color=color)
        axes.annotate(verdict.word, (1.01, place), xycoords=("axes fraction", "data"), color=color, va="center")
    axes.set_yticks(range(len(compared)), [name[:40] for name in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    tests = "" if len(compared) == 1 else " that hold together"
    axes.set_xlabel(
        f"accuracy minus baseline's, points: mean over pairs, 99% intervals{tests} (grey: {margin:g} points)"
    )
    axes.set_title("Difference from the baseline", loc="left", weight="bold")


def draw_sweep(axes: Axes, option: str, values: Mapping[str, float], logs: Mapping[str, Log]) -> None:
    """Draw each run's accuracy against the option's value, and the means."""
    ordered = dict(sorted(values.items(), key=lambda pair: pair[1]))
    for name, value in ordered.items():
        runs = accuracies(logs[name])
        axes.plot([value] * len(runs), runs, "o", color="0.6", ms=4)
    numbers = np.array([*ordered.values()])
    axes.plot(numbers, [accuracies(logs[name]).mean() for name in ordered], "o-", color="#0072B2")
    if numbers.min() > 0 and numbers.max() > 5 * numbers.min():
        axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axes.minorticks_off()
    axes.set(xlabel=option, ylabel="accuracy, %")
    axes.set_title("Accuracy of each run, and means", loc="left", weight="bold")


# ---- The command


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--try", dest="variants", action="append", default=[], metavar="CHANGE", help="a variant")
    parser.add_argument("--runs", type=int, default=6, help="runs of each, chosen before looking (6)")
    parser.add_argument("--out", type=Path, default=Path("experiment"), help="folder of the experiment (experiment)")
    parser.add_argument("--holdout", type=int, default=HOLDOUT, help="training images to test on (10000)")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points of accuracy that are equivalent (0.1)")
    parser.add_argument("--report", action="store_true", help="make no runs: show those that are there")
    options, baseline = parser.parse_known_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    out = options.out.expanduser()
    failed: dict[str, str] = {}
    if options.report:
        if baseline or options.variants:
            raise ConfigError("--report shows what is there: give it no more than --out and --margin")
        plan = read_plan(out)
        if not plan:
            raise ConfigError(f"--report: there is no experiment in {out}: name its folder by --out")
    else:
        if options.runs < 3:
            raise ConfigError(f"--runs {options.runs}: so few say nothing of their spread, give at least 3")
        if options.holdout < 1:
            raise ConfigError(
                f"--holdout {options.holdout}: keep out at least one training image, or test images decide"
            )
        plan = make_plan([*baseline, f"--holdout={options.holdout}"], options.variants, options.runs, out)
        teams = check_commands(plan)
        write_plan(plan, out)
        failed, status = make_runs(plan, out, teams)
        if status:
            print("Not finished: the same command continues.", file=sys.stderr)
            return status
        for name, failure in failed.items():
            print(f"{name} failed ({failure}); its log is {out / name}.log", file=sys.stderr)
        if BASELINE in failed:
            return 1
    logs = read_logs(plan, out)
    report = compare(logs, BASELINE, options.margin, len(plan.variants))
    print(f"Baseline: {' '.join(plan.baseline)}\n\n{report.text}\n\n{notes_on(plan, logs, report.accuracy)}")
    if any(verdict.found for verdict in report.accuracy.values()):
        picture = out / "experiment.png"
        write_picture(draw(plan, logs, report.accuracy, options.margin), picture, "--out")
        print(f"Picture: {picture}")
    return int(bool(failed))
