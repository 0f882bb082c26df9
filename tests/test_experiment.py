"""An experiment: images that are kept out, its plan, its runs in turn, its verdicts, its picture."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write_npz

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.commands import experiment
from large_batch_cifar_10_fast.commands.experiment import main
from large_batch_cifar_10_fast.images.load import load_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab.report import compare
from large_batch_cifar_10_fast.lab.results import read_results
from large_batch_cifar_10_fast.lab.store import write_tables

SHAPES = draw_shapes(643, 101)
WORDS = ["--recipe", "muon", "--runs", 3]


def write_results(out: Path, counts: dict[str, list[int]], rate: str = "0.24") -> None:
    """Write runs of campaigns, with so many of 10,000 images right, each run of a launch of its own."""
    fixed = {"hyp.filter_rate": rate, "validation_images": 10000, "train_loss": 1, "validation_loss": 0}
    fixed |= {"training_images": 400, "hyp.batch_size": 50}  # fitted
    for campaign, found in counts.items():
        (folder := out / "runs" / campaign).mkdir(parents=True, exist_ok=True)
        (folder / "claims").touch()
        own = fixed | {"campaign": campaign, "seconds": 2, "cpu_seconds": 0}
        for run, count in enumerate(found):
            row = own | {"run": run, "seed": run, "launch": str(run), "validation_count": count}
            (folder / f"{run:04}.json").write_text(json.dumps({"row": row, "epochs": []}))
    write_tables(out)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Let launches write rows instead of training, and return what they were asked for; epochs=7 fails."""
    started = []
    noise = np.random.default_rng(0).integers(-9, 9, 50).tolist()

    def launch(words, log):
        values = dict(re.findall(r"--(\w+)=(\S+)", " ".join(words)))
        runs = int(values["runs"])
        started.append((values["campaign"], runs))
        if values.get("epochs") == "7":
            return "process 0 ended with status 9"
        better = 50 if "filter_rate" in values else 0
        counts = [9400 + better + bool(better) * (run % 2) + noise[run] for run in range(runs)]
        write_results(tmp_path / "out", {values["campaign"]: counts}, values.get("filter_rate", "0.17"))
        return ""

    monkeypatch.setattr(experiment, "launch", launch)
    return started


def run_main(*arguments: object, out: Path) -> int:
    return main([*map(str, arguments), "--out", str(out)])


# ---- Images that are kept out


def test_the_last_images_are_tested_and_not_trained_on(tmp_path):
    """Those of one's own are put in a random order first; the test images have no part in it."""
    path = write_npz(tmp_path / "mine.npz", *SHAPES)
    plain = load_images(str(path))
    held = load_images(str(path), holdout=100)
    np.testing.assert_array_equal(held.train_images, plain.train_images[:543])
    np.testing.assert_array_equal(held.train_labels, plain.train_labels[:543])
    np.testing.assert_array_equal(held.test_images, plain.train_images[543:])
    np.testing.assert_array_equal(held.test_labels, plain.train_labels[543:])
    others = write_npz(tmp_path / "others.npz", *SHAPES[:2], *draw_shapes(1, 50)[2:])
    assert held.digest == load_images(str(others), holdout=100).digest != plain.digest
    assert held.name == "mine.npz with the last 100 training images as test images"
    with pytest.raises(ConfigError, match="--holdout 640 leaves no image of a class"):
        load_images(str(path), holdout=640)


# ---- Plan and runs


def test_all_campaigns_meet_the_same_machine_in_turn(launches, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_main(*WORDS, "--try", "filter_rate=0.12", out=out) == 0
    assert launches == [(name, runs) for runs in (1, 2, 3) for name in ("baseline", "filter_rate=0.12")]
    launches.clear()
    run_main(*WORDS, "--try", "filter_rate=0.12", out=out)
    assert not launches, "all runs were there"
    run_main("--recipe", "muon", "--runs", 5, "--try", "epochs=8 kept=1", out=out)
    assert launches[0] == ("epochs=8+kept=1", 1)
    assert launches[-2:] == [("baseline", 5), ("epochs=8+kept=1", 5)]
    assert capsys.readouterr().out.count("\nfilter_rate=0.12 ") == 3, "earlier variants are compared, too"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--try", "silu.py"], "silu.py cannot be used"),
        (["--try", "holdout=0"], "holdout=0: --data, --holdout, --seed are alike for all"),
        (["--try", "filtre_rate=1"], "unrecognized arguments: --filtre_rate=1"),
        (["--try", "filter_rate=0.1", "--try", "filter_rate=1e-1"], "filter_rate=1e-1 equals the baseline or another"),
        (["--try", "filter_rate=0.170"], "filter_rate=0.170 equals the baseline or another"),
        (["--try", "epochs=8", "--holdout", "0"], "--holdout 0 must lie in 1"),
        (["--grid", "width=16,"], "--grid width=16,: give an option and its values"),
    ],
)
def test_what_cannot_be_an_experiment_is_one_line_and_nothing_is_written(words, message, tmp_path, error_line):
    assert message in error_line(main, ["--recipe", "muon", *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_runs_of_other_settings_are_refused(tmp_path, error_line):
    """Also finished ones, for which nothing is started."""
    out = tmp_path / "out"
    write_results(out, {"baseline": [9400, 9400, 9400]})
    words = ["--recipe", "muon", "--try", "epochs=8", "--runs", "3", "--out", str(out)]
    message = f"{out} has runs of baseline with other settings: --filter_rate (0.17, not 0.24); choose another --out"
    assert error_line(main, words) == message


def test_a_grid_makes_a_variant_of_each_cell_but_the_baselines(launches, tmp_path):
    run_main(*WORDS, "--grid", "filter_rate=0.12,0.17", "--grid", "width=16,64", out=tmp_path / "out")
    cells = ["filter_rate=0.12+width=16", "filter_rate=0.12+width=64", "filter_rate=0.17+width=16"]
    assert [name for name, runs in launches if runs == 3] == ["baseline", *cells]
    assert experiment.cells_of(["mine.py", "kept=1"], ["width=16,64"]) == [
        *("mine.py width=16", "mine.py width=64"),
        *("kept=1 width=16", "kept=1 width=64"),
    ]


def test_a_variants_file_may_have_spaces_and_its_values_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = experiment.words_of_variant("'my folder/silu.py' epochs=8 'note=a b'")
    program = f"--recipe={tmp_path}/my folder/silu.py"
    assert words == ("silu+epochs=8+note=a-b", [program, "--epochs=8", "--note=a b"])


def test_a_variant_that_fails_does_not_stop_the_others(launches, tmp_path, capsys):
    assert run_main(*WORDS, "--try", "epochs=7", "--try", "filter_rate=0.12", out=tmp_path / "out") == 1
    assert [name for name, _ in launches].count("epochs=7") == 1
    output = capsys.readouterr()
    assert re.search(r"\nfilter_rate=0.12 .* better\n", output.out)
    assert "epochs=7 failed (process 0 ended with status 9); its log is" in output.err
    assert "epochs=7: waiting" not in output.out
    launches.clear()
    assert run_main(*WORDS, "--epochs=7", "--try", "filter_rate=0.12", out=tmp_path / "other") == 1
    assert launches == [("baseline", 1)], "without a baseline there is nothing to compare"


@pytest.mark.slow
def test_an_experiment_trains_continues_with_its_own_code_and_reports_alone(tmp_path, monkeypatch, capsys):
    """Two equal programs have no effect. A variant that was edited is not continued. The others are."""
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path / "mine.npz", *SHAPES)
    for name in ("small", "copy"):
        shutil.copy(Path(__file__).with_name("tiny.py"), tmp_path / f"{name}.py")
    words = ["--recipe", "small.py", "--data", "mine.npz", "--holdout", 143, "--no_warmup", "--nproc", 1]
    words += ["--try", "norm=no", "--try", "copy.py"]
    assert run_main(*words, "--runs", 3, out=tmp_path / "out") == 0
    shown = capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")
    runs = sorted(zip(rows["campaign"], rows["seed"], strict=True))
    assert runs == [(name, seed) for name in ("baseline", "copy", "norm=no") for seed in (0, 1, 2)]
    assert set(rows["validation_images"]) == {143}
    assert "\n# training_images 500\n" in (tmp_path / "out" / "baseline.log").read_text()
    assert "copy: not compared: a single run, or all differences are equal" in shown
    assert (tmp_path / "out" / "experiment.png").exists()
    assert run_main(*words, "--report", out=tmp_path / "out") == 0
    assert capsys.readouterr().out == shown.replace("--runs=3", "--runs=12")
    with (tmp_path / "copy.py").open("a") as file:
        file.write("# edited\n")
    assert run_main(*words, "--runs", 4, out=tmp_path / "out") == 1
    assert "copy failed (copy.py was changed since campaign copy began, and differs from" in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "out" / "runs.tsv", sep="\t")["campaign"].value_counts().to_dict() == {
        "baseline": 4,
        "norm=no": 4,
        "copy": 3,
    }


# ---- Verdicts and picture


def test_the_tables_are_those_of_compare_best_first_and_the_test_images_come_last(tmp_path, capsys):
    """An effect is found by pairs that the seeds would hide."""
    seeds = [9300, 9400, 9500, 9600]
    a, b = "filter_rate=0.18", "filter_rate=0.19"
    counts = {"baseline": seeds, a: [n + 50 + n % 7 for n in seeds], b: [n - 50 - n % 7 for n in seeds]}
    for (name, found), rate in zip(counts.items(), ("0.17", "0.18", "0.19"), strict=True):
        write_results(tmp_path, {name: found}, rate)
    assert run_main("--recipe", "muon", "--try", a, "--try", b, "--runs", 5, "--report", out=tmp_path) == 0
    shown = capsys.readouterr().out
    found = compare({name: read_results(f"{tmp_path}/runs.tsv:{name}") for name in (a, "baseline", b)}, "baseline")
    assert found.text in shown
    assert [found.verdicts[name].word for name in (a, b)] == ["better", "worse"]
    assert shown.partition("Last and once, the test images:\n")[2].splitlines()[:2] == [
        "  ./cifar10-fast train --recipe muon --campaign=baseline --runs=5",
        f"  ./cifar10-fast train --recipe muon --{a} --campaign={a} --runs=5",
    ]
