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
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from matplotlib.figure import Figure
from tqdm import tqdm

from .. import ConfigError, Interrupted
from ..core.devices import count_cores, count_gpus
from ..core.printing import show
from ..files import write_atomically
from .compare import MARGIN, Verdict, accuracies, compare
from .figures import write_picture
from .options import command_parser
from .program import load_program, read_command, recipe_of
from .results import Log, read_log
from .snapshot import check_unchanged, place_of
from .store import rows_of, write_tables
from .train import Launch, Processes, plan_processes, start_launch

HOLDOUT = 10_000  # of CIFAR-10's 50,000 images: the error of a mean is a third of that over 1,000
OWN = ("campaign", "resume", "save")  # options of a run that an experiment sets or cannot use
ALIKE = ("data", "holdout", "seed", "runs", "out", "teams", "nproc", "device")  # of all its campaigns
BASELINE = "baseline"
COLORS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2"}


@dataclass
class Plan:
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
    file = re.match(r".*?\.py(?=\s|$)", text.strip())
    program = file.group() if file else ""
    try:
        options = shlex.split(text.strip()[len(program) :])
    except ValueError as error:  # an opened quotation
        raise ConfigError(f'--try "{text}": {error}') from error
    if program and not Path(program).expanduser().is_file():
        raise ConfigError(f'--try "{text}": {program} is not a file: write FILE.py first, then name=value')
    for option in options:
        if not re.match(r"\w+(=|$)", option):
            raise ConfigError(f'--try "{text}": {option} is not of the form name=value')
    words = [f"--{option}" for option in options]
    names = options
    if program:
        words = [f"--recipe={Path(program).expanduser().absolute()}", *words]
        names = [Path(program).stem, *options]
    if not words:
        raise ConfigError('--try "": give name=value, or FILE.py')
    return re.sub(r"[^\w.:+=-]", "-", "+".join(names))[:100], words


def cells_of(baseline: Sequence[str], axes: Sequence[str]) -> list[str]:
    """Return a variant for each combination of values, except the baseline's own. Raise ConfigError."""
    columns = []
    for axis in axes:
        option, sign, values = axis.partition("=")
        if not (re.fullmatch(r"\w+", option) and sign and all(values.split(","))):
            raise ConfigError(f"--grid {axis}: give an option and its values, like width=16,24")
        columns.append([f"{option}={value}" for value in values.split(",")])
    own = read_options(baseline)[1]
    cells = [" ".join(cell) for cell in itertools.product(*columns)] if columns else []
    return [cell for cell in cells if read_options([*baseline, *words_of_variant(cell)[1]])[1] != own]


def make_plan(baseline: Sequence[str], texts: Sequence[str], runs: int, out: Path) -> Plan:
    """Return the plan of an experiment, new or continued. Raise ConfigError if it cannot be one.

    Variants of an earlier plan stay if they have a run.
    """
    variants: dict[str, list[str]] = {}
    for text in texts:
        name, words = words_of_variant(text)
        if name in variants or name == BASELINE:
            raise ConfigError(
                f'--try "{text}" has the name {name} of another variant: leave it out, or rename the file'
            )
        variants[name] = words
    made = {name: len(rows) for name, rows in rows_of(out).items()}
    begun = read_plan(out) if made else None  # without a run there is nothing to continue
    before = begun or Plan(list(baseline), {}, [])
    if before.baseline != list(baseline):
        was = " ".join(before.baseline)
        raise ConfigError(f"{out} has an experiment with the baseline {was}: give the same, or another --out")
    for name, words in variants.items():
        if name in made and before.variants.get(name, words) != words:
            raise ConfigError(f"{out} has a different variant {name}: choose another --out")
    kept = {name: words for name, words in before.variants.items() if name in made}
    variants = {**kept, **variants}
    if not variants:
        raise ConfigError('there is nothing to compare: give a variant, like --try "filter_rate=0.12"')
    most = max((made.get(name, 0) for name in (BASELINE, *variants)), default=0)
    if runs < most:
        raise ConfigError(f"--runs {runs} is less than the {most} finished runs: give {most} or more")
    look = {"runs": runs, "variants": len(variants)}
    looks = before.looks if before.looks[-1:] == [look] else [*before.looks, look]
    return Plan(list(baseline), variants, looks)


def read_plan(out: Path) -> Plan | None:
    """Return the plan of an experiment; None if there is none."""
    path = out / "experiment.json"
    try:
        return Plan(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def write_plan(plan: Plan, out: Path) -> None:
    """Write a plan before its first run."""
    out.mkdir(parents=True, exist_ok=True)
    with write_atomically(out / "experiment.json") as unfinished:
        unfinished.write_text(json.dumps(asdict(plan), indent=1))


def check_commands(plan: Plan) -> None:
    """Raise ConfigError for an invalid command line."""
    for name in OWN + ALIKE:
        given = plan.campaigns if name in OWN else plan.variants
        if any(re.fullmatch(f"--{name}(=.*)?", word) for words in given.values() for word in words):
            whose = "experiments" if name in OWN else "variants"
            raise ConfigError(f"--{name} is not for {whose}: leave it out")
    for words in plan.campaigns.values():
        read_options(words)


def teams_of(plan: Plan) -> int:
    """Return the teams that share the runs: --teams, or as many as there are GPUs for."""
    options, hyp = read_options(plan.baseline)
    gpus = count_gpus(options.device)
    processes = plan_processes(options.nproc, options.teams, hyp.workers, gpus, count_cores())
    return max(options.teams, gpus // processes)


def read_options(words: Sequence[str]) -> tuple[Any, Any]:
    """Return the options and hyper-parameters of a command line. Raise ConfigError."""
    return read_command(load_program(recipe_of(words)), words)[1:]


# ---- The runs


def check_finished(plan: Plan, out: Path) -> None:
    """Raise ConfigError if a program was changed since the first run of its campaign."""
    for name, words in plan.campaigns.items():
        place = place_of(words)._replace(out=out.absolute(), campaign=name)
        check_unchanged(load_program(place.own_recipe), place)


@dataclass
class Part:
    """Some runs of a campaign, which a team is making."""

    campaign: str
    processes: Processes
    log: IO
    start: float

    def ended(self) -> Launch | None:
        """Return how it ended, if it has."""
        try:
            return self.processes.ended()
        except ConfigError as error:
            return Launch(str(error), 1)

    def end(self) -> None:
        self.processes.end()
        self.log.close()


def make_runs(plan: Plan, out: Path, teams: int) -> dict[str, str]:
    """Make the missing runs. Return how campaigns failed.

    Each team takes a part of the campaign with the fewest runs, then the next part. So the campaigns take turns, and
    all run on the machine in the same state. The runs of a part take ten times as long as its start. But a part has at
    most half of a campaign, and at most a team's share of the remaining runs. A variant that fails gets no more runs.
    If the baseline fails, the experiment stops.
    """
    failed: dict[str, str] = {}
    making: dict[int, Part] = {}
    asked = {name: len(rows_of(out).get(name, [])) for name in plan.campaigns}
    size = 1
    bar = tqdm(total=plan.runs * len(asked), initial=sum(asked.values()), unit="runs", smoothing=0, disable=None)
    try:
        while True:
            for team in [team for team in range(teams) if team not in making]:
                part_to_make = next_part(asked, failed, plan.runs, size, teams)
                if part_to_make:
                    name, target = part_to_make
                    show(f"{name}: to run {target} of {plan.runs}")
                    asked[name] = target
                    making[team] = start_part(plan, out, name, target, teams, team)
            if not making:
                return failed
            time.sleep(0.05)
            for team, part in [*making.items()]:
                ended = part.ended()
                if not ended:
                    continue
                making.pop(team).end()
                rows = rows_of(out).get(part.campaign, [])
                made = [float(row["seconds"]) for row in rows if row["launch"].startswith(part.processes.launch)]
                shared = any(other.campaign == part.campaign for other in making.values())
                if ended.failure or not (made or shared or len(rows) >= asked[part.campaign]):
                    failed[part.campaign] = ended.failure or "another launch is making its runs"
                    if part.campaign == BASELINE:
                        return failed
                bar.update(len(made))
                if made:
                    around = time.monotonic() - part.start - sum(made)  # start, compilation, validation and end
                    size = max(1, math.ceil(10 * around * len(made) / sum(made)))
    finally:
        bar.close()
        for part in making.values():
            part.end()


def next_part(
    asked: Mapping[str, int], failed: Mapping[str, str], runs: int, size: int, teams: int
) -> tuple[str, int] | None:
    """Return the campaign with the fewest runs, and how many it has after this part; None if all are assigned.

    A part has `size` runs, but at most half of a campaign, and a team's share of what is left.
    """
    left = {name: runs - count for name, count in asked.items() if count < runs and name not in failed}
    if not left:
        return None
    name = max(left, key=lambda each: left[each])
    share = -(-sum(left.values()) // teams)
    return name, min(asked[name] + min(size, (runs + 1) // 2, share), runs)


def start_part(plan: Plan, out: Path, name: str, runs: int, teams: int, team: int) -> Part:
    """Start a team on the missing runs of a campaign of `runs` runs. Raise ConfigError."""
    words = [*plan.campaigns[name], f"--campaign={name}", f"--runs={runs}", f"--out={out}"]
    log = (out / f"{name}.log").open("ab")
    return Part(name, start_launch([*words, f"--teams={teams}"], log, team), log, time.monotonic())


# ---- The verdicts


def read_logs(plan: Plan, out: Path) -> dict[str, Log]:
    """Return the results of all campaigns that have runs, best first. Raise ConfigError without any of the baseline."""
    write_tables(out)
    made = rows_of(out)
    if BASELINE not in made:
        raise ConfigError(f"{out} has no finished run of the baseline: start without --report")
    logs = {name: read_log(f"{out}/runs.tsv:{name}") for name in plan.campaigns if name in made}
    return dict(sorted(logs.items(), key=lambda pair: -accuracies(pair[1]).mean()))


def notes_on(plan: Plan, logs: Mapping[str, Log], verdicts: Mapping[str, Verdict]) -> str:
    """Return notes on the best variant, the looks, and the final test."""
    notes = []
    if len(logs) < len(plan.campaigns) or any(log.count < plan.runs for log in logs.values()):
        notes.append(f"Not finished: {plan.runs} runs of each are planned.")
    if len(plan.looks) > 1:
        texts = ["{runs} runs of {variants} variant(s)".format(**look) for look in plan.looks]
        notes.append(f"Look {len(plan.looks)}: planned {', then '.join(texts[:-1])}, now {texts[-1]}.")
        notes.append("Each look can find differences that are chance; the intervals hold for one look.")
    better = [name for name, verdict in verdicts.items() if verdict.word == "better"][:1]
    notes.append("Use the test images last, and only once:")
    for name in (BASELINE, *better):
        words = [word for word in plan.campaigns[name] if not word.startswith("--holdout")]
        words += [f"--campaign={name}", f"--runs={plan.runs}"]
        notes.append(f"  cifar10-fast train {shlex.join(words)}")
    return "\n".join(notes)


# ---- The picture


def draw_differences(verdicts: Mapping[str, Verdict], margin: float) -> Figure:
    """Draw the differences from the baseline with their intervals, as wide as README shows a picture."""
    compared = {name: verdict for name, verdict in verdicts.items() if verdict.found}
    figure = Figure(figsize=(8.5, 1.6 + 0.45 * len(compared)), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvspan(-margin, margin, color="0.92", lw=0)
    axes.axvline(0, color="black", lw=0.8)
    for place, verdict in enumerate(compared.values()):
        found: Any = verdict.found
        color = COLORS.get(verdict.word, "0.35")
        axes.plot([found.low, found.high], [place, place], color=color, lw=2)
        axes.plot(found.difference, place, "o", color=color)
        axes.annotate(verdict.word, (1.01, place), xycoords=("axes fraction", "data"), color=color, va="center")
    axes.set_yticks(range(len(compared)), [*compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"accuracy minus baseline's, points: mean over pairs, 99% intervals (grey: {margin:g} points)")
    axes.set_title("Difference from the baseline", loc="left", weight="bold")
    return figure


# ---- The command


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--try", dest="variants", action="append", default=[], metavar="CHANGE", help="a variant")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUES", help="a variant for each value")
    parser.add_argument("--runs", type=int, default=12, help="runs of each, chosen before you look (12)")
    parser.add_argument("--out", type=Path, default=Path("experiment"), help="folder of the experiment (experiment)")
    parser.add_argument("--holdout", type=int, default=HOLDOUT, help="training images to test on (10000)")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points of accuracy that are equivalent (0.1)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--report", action="store_true", help="make no runs; show the finished ones")
    options, baseline = parser.parse_known_args(arguments)
    if not options.margin > 0:
        parser.error(f"--margin {options.margin} must be greater than 0")
    out = options.out.expanduser()
    failed: dict[str, str] = {}
    if options.report:
        if baseline or options.variants or options.grid:
            raise ConfigError("--report only shows finished runs: give no options but --out, --margin and --markdown")
        plan = read_plan(out)
        if not plan:
            raise ConfigError(f"--report: there is no experiment in {out}: name its folder with --out")
    else:
        if options.runs < 3:
            raise ConfigError(f"--runs {options.runs} is too few to estimate their spread: give at least 3")
        if options.holdout < 1:
            raise ConfigError(
                f"--holdout {options.holdout} would choose variants by the test images: keep out at least one image"
            )
        words = [*baseline, f"--holdout={options.holdout}"]
        variants = [*options.variants, *cells_of(words, options.grid)]
        plan = make_plan(words, variants, options.runs, out)
        check_commands(plan)
        check_finished(plan, out)
        write_plan(plan, out)
        try:
            failed = make_runs(plan, out, teams_of(plan))
        except Interrupted as end:
            print("Not finished: the same command continues.", file=sys.stderr)
            return end.args[1]
        for name, failure in failed.items():
            print(f"{name} failed ({failure}); its log is {out / name}.log", file=sys.stderr)
        if BASELINE in failed:
            return 1
    logs = read_logs(plan, out)
    report = compare(logs, BASELINE, options.margin, len(plan.variants), options.markdown)
    print(f"Baseline: {' '.join(plan.baseline)}\n\n{report.text}\n\n{notes_on(plan, logs, report.accuracy)}")
    if any(verdict.found for verdict in report.accuracy.values()):
        picture = out / "experiment.png"
        write_picture(draw_differences(report.accuracy, options.margin), picture)
        print(f"Picture: {picture}")
    return int(bool(failed))
