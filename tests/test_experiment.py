"""An experiment: its plan, its runs in turn, on images that are kept out; verdicts that hold together; its picture."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import python, write_npz

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.images.load import CIFAR_10_NORMALIZATION, Images, load_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import experiment
from large_batch_cifar_10_fast.lab.experiment import Plan, Result, main
from large_batch_cifar_10_fast.lab.table import COLUMNS

SHAPES = draw_shapes(643, 101)
SIZES = (50_000, 50_000, 10_000, 10_000)  # of CIFAR-10


def write_results(out: Path, counts: dict[str, list[int]], name: str = "runs.tsv") -> None:
    """Write runs of campaigns, with so many of 10,000 images right."""
    fixed = dict.fromkeys(COLUMNS, "0") | {"validation_images": "10000", "seconds": "2", "train_loss": "1"}
    rows = [
        fixed | {"campaign": campaign, "run": str(run), "seed": str(run), "validation_count": str(count)}
        for campaign, found in counts.items()
        for run, count in enumerate(found)
    ]
    out.mkdir(exist_ok=True)
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(out / name, sep="\t", index=False)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Let the launcher write rows instead of training, and return what it was started for."""
    started = []

    def run(command, **_):
        values = dict(re.findall(r"--(\w+)=(\S+)", " ".join(command)))
        started.append((values["campaign"], int(values["runs"])))
        better = 50 if "filter_rate" in values else 0
        table = tmp_path / "out" / "runs.tsv"
        counts = {}
        if table.exists():
            found = pd.read_csv(table, sep="\t").groupby("campaign", sort=False)["validation_count"]
            counts = {name: group.tolist() for name, group in found}
        spread = np.random.default_rng(0).integers(-9, 9, 50)
        counts[values["campaign"]] = [
            9400 + better + (better > 0) * (run % 2) + int(spread[run]) for run in range(int(values["runs"]))
        ]
        write_results(tmp_path / "out", counts)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(experiment, "subprocess", SimpleNamespace(run=run))
    return started


def run_main(*arguments: object, out: Path) -> int:
    return main([*map(str, arguments), "--out", str(out)])


# ---- Images that are kept out


def test_the_last_images_are_tested_and_not_trained_on(tmp_path, monkeypatch):
    """Those of one's own are put in a random order first; the test images have no part in it."""
    path = write_npz(tmp_path / "mine.npz", *SHAPES)
    other_tests = write_npz(tmp_path / "others.npz", *SHAPES[:2], *draw_shapes(1, 50)[2:])
    plain = load_images(str(path))
    held = load_images(str(path), holdout=100)
    ordered = plain.shuffled()
    np.testing.assert_array_equal(held.train_images, ordered.train_images[:543])
    np.testing.assert_array_equal(held.test_images, ordered.train_images[543:])
    np.testing.assert_array_equal(held.test_labels, ordered.train_labels[543:])
    assert held.is_original, "they would be put in another order a second time"
    assert held.digest == load_images(str(other_tests), holdout=100).digest != plain.digest
    assert held.name == "mine.npz with the last 100 training images as test images"
    names = [str(number) for number in range(10)]
    assert held.class_names == names
    assert load_images("synthetic", 100).class_names == names
    kept = Images("CIFAR-10", *(np.resize(part, (n, *part.shape[1:])) for part, n in zip(SHAPES, SIZES, strict=True)))
    assert kept.held_out(100).normalization == CIFAR_10_NORMALIZATION
    assert kept.held_out(100).class_names[0] == "airplane"
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # as on a GPU
    assert kept.held_out(100).pinned().normalization == CIFAR_10_NORMALIZATION
    kept = Images("CIFAR-10", *SHAPES).held_out(100)
    np.testing.assert_array_equal(kept.test_images, SHAPES[0][543:])


@pytest.mark.parametrize("count", [643, 700, 640])
def test_a_class_without_a_training_image_is_refused(count):
    with pytest.raises(ConfigError, match=f"--holdout {count} of 643 training images leaves none of a class"):
        Images("", *SHAPES).held_out(count)


# ---- Runs


def test_all_campaigns_meet_the_same_machine_in_turn(launches, tmp_path, capsys):
    """A start takes no time here, so that a turn is one run of each."""
    assert run_main("--recipe", "muon", "--runs", 3, "--try", "filter_rate=0.12", out=tmp_path / "out") == 0
    campaigns = ["baseline", "filter_rate=0.12"]
    assert launches == [(name, runs) for runs in (1, 2, 3) for name in campaigns]
    shown = capsys.readouterr().out
    assert re.search(r"filter_rate=0.12 .* \+0.50 .* better\n", shown)
    assert "look" not in shown
    launches.clear()
    run_main("--recipe", "muon", "--runs", 3, "--try", "filter_rate=0.12", out=tmp_path / "out")
    assert not launches, "all runs were there"
    run_main("--recipe", "muon", "--runs", 5, "--try", "epochs=8 kept=1", out=tmp_path / "out")
    assert launches[0] == ("epochs=8+kept=1", 1)
    assert launches[-3:] == [("baseline", 5), ("filter_rate=0.12", 5), ("epochs=8+kept=1", 5)]
    assert "Second look: planned 3 runs of 1 variant(s), now 5 runs of 2 variant(s)." in capsys.readouterr().out


def test_the_plan_is_on_the_disk_before_the_first_run(monkeypatch, tmp_path):
    def run(*_, **__):
        plan = json.loads((tmp_path / "out" / "experiment.json").read_text())
        assert plan["looks"] == [{"runs": 4, "variants": 1}]
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(experiment, "subprocess", SimpleNamespace(run=run))
    assert run_main("--runs", 4, "--try", "epochs=8", out=tmp_path / "out") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--try", "filter_rate"], "argument --filter_rate: expected one argument"),
        (["--try", "epochs=8 silu.py"], "silu.py is no option like name=value; FILE.py comes first"),
        (["--try", "holdout=0"], "--holdout is not for variants"),
        (["--try", "epochs=8", "--holdout", "0"], "keep out at least one training image"),
        (["--try", "epochs=8", "--runs", "2"], "so few say nothing of their spread"),
        (["--try", "filtre_rate=1"], "no option --filtre_rate=1; did you mean --filter_rate"),
        (["--try", "absent.py"], "absent.py cannot be used"),
        (["--try", "epochs=8", "--try", "epochs=8"], "has the name epochs=8, as another has"),
        (["--try", "epochs=8", "--campaign", "x"], "--campaign is not for experiments"),
        (["--try", "epochs=8 save=w.pt"], "--save is not for experiments"),
        ([], "there is nothing to compare"),
        (["--report"], "--report shows what is there"),
    ],
)
def test_what_cannot_be_an_experiment_is_one_line_and_nothing_is_written(words, message, tmp_path, error_line):
    assert message in error_line(main, ["--recipe", "muon", *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_another_baseline_or_fewer_runs_are_refused(launches, tmp_path, error_line, capsys):
    out = tmp_path / "out"
    run_main("--recipe", "muon", "--runs", 5, "--try", "epochs=8", out=out)
    capsys.readouterr()
    for words, message in (
        (["--recipe", "muon", "--width", "16"], "with the baseline --recipe muon --holdout=10000"),
        (["--recipe", "muon", "--holdout", "9000"], "with the baseline --recipe muon --holdout=10000"),
        (["--recipe", "muon", "--runs", "4"], "--runs 4 is less than the 5 that were planned"),
    ):
        assert message in error_line(main, [*words, "--out", str(out)])


@pytest.mark.slow
def test_an_experiment_trains_and_is_continued(tmp_path):
    """Whole, with a program of one's own; the report alone says the same again."""
    write_npz(tmp_path / "mine.npz", *SHAPES)
    shutil.copy(Path(__file__).with_name("tiny.py"), tmp_path / "small.py")
    words = ["--recipe", "small.py", "--data", "mine.npz", "--holdout", 143, "--no_warmup", "--device", "cpu"]
    command = ["-m", "large_batch_cifar_10_fast.experiment", *words, "--runs", 3, "--try", "norm=no"]
    result = python(*command, cwd=tmp_path, OMP_NUM_THREADS=1)
    assert result.returncode == 0, result.stderr
    rows = pd.read_csv(tmp_path / "experiment" / "runs.tsv", sep="\t")
    assert sorted(zip(rows["campaign"], rows["seed"], strict=True)) == [
        *(("baseline", seed) for seed in (0, 1, 2)),
        *(("norm=no", seed) for seed in (0, 1, 2)),
    ]
    assert set(rows["validation_images"]) == {143}
    assert rows["precision"].nunique() == 1
    assert (tmp_path / "experiment" / "experiment.png").exists()
    assert "500 training and 143 test images" in (tmp_path / "experiment" / "baseline.log").read_text()
    report = python("-m", "large_batch_cifar_10_fast.experiment", "--report", cwd=tmp_path)
    assert report.stdout == result.stdout


def test_a_typo_before_the_first_run_is_forgotten(monkeypatch, tmp_path, launches):
    out = tmp_path / "out"
    experiment.write_plan(Plan(["--recipe", "muon", "--holdout=99999"], {"a": ["--epochs=7"]}, []), out)
    assert run_main("--recipe", "muon", "--runs", 3, "--try", "epochs=8", out=out) == 0
    assert {name for name, _ in launches} == {"baseline", "epochs=8"}


def test_a_variant_that_fails_does_not_stop_the_others(launches, tmp_path, monkeypatch, capsys):
    make = experiment.subprocess.run

    def run(command, **how):
        bad = "--epochs=7" in command
        return SimpleNamespace(returncode=1) if bad else make(command, **how)

    monkeypatch.setattr(experiment, "subprocess", SimpleNamespace(run=run))
    words = ["--recipe", "muon", "--runs", 3, "--try", "epochs=7", "--try", "filter_rate=0.12"]
    assert run_main(*words, out=tmp_path / "out") == 1
    assert {name for name, _ in launches} == {"baseline", "filter_rate=0.12"}
    output = capsys.readouterr()
    assert re.search(r"\nfilter_rate=0.12 .* better\n", output.out)
    assert "epochs=7 failed; its log is" in output.err


# ---- Verdicts


def test_without_an_effect_a_family_has_a_verdict_in_at_most_one_of_a_hundred():
    """Of five variants, with six runs each, which share a baseline; seeds have effects of their own."""
    draws = np.random.default_rng(0)
    families = 0
    for _ in range(1000):
        seeds = draws.normal(94, 0.1, 6)
        results = [Result(str(n), pd.Series(seeds + draws.normal(0, 0.2, 6)), 1.0) for n in range(6)]
        experiment.judge(results[0], results[1:], tests=5, margin=0.1)
        families += any(result.verdict in ("better", "worse") for result in results[1:])
    assert families <= 10


def test_an_effect_is_found_by_pairs_that_the_seeds_would_hide(tmp_path, capsys):
    plan = Plan(["--recipe", "muon"], {"a": ["--epochs=8"], "b": ["--epochs=7"]}, [{"runs": 4, "variants": 2}])
    experiment.write_plan(plan, tmp_path)
    baseline = [9300, 9400, 9500, 9600]
    changes = {"baseline": baseline, "a": [n + 50 + n % 7 for n in baseline], "b": [n - 50 - n % 7 for n in baseline]}
    write_results(tmp_path, changes)
    assert run_main("--report", out=tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split()[0] for line in lines if re.search(r" ± ", line)]
    assert table == ["a", "baseline", "b"], "best first"
    assert [line.split()[-1] for line in lines if re.search(r" ± ", line)] == ["better", "-", "worse"]
    last = "  bash train_cifar_parallel.sh --recipe muon"
    assert lines[lines.index("The test images come last, once:") + 1 :][:2] == [
        f"{last} --campaign=baseline --runs=4",
        f"{last} --epochs=8 --campaign=a --runs=4",
    ]


def test_an_unfinished_experiment_says_so(tmp_path, capsys):
    plan = Plan(["--recipe", "muon"], {"a": ["--epochs=8"]}, [{"runs": 4, "variants": 1}])
    experiment.write_plan(plan, tmp_path)
    write_results(tmp_path, {"baseline": [9400, 9410, 9420], "a": [9400]})
    run_main("--report", out=tmp_path)
    shown = capsys.readouterr().out
    assert "Not finished: 4 runs of each are planned." in shown
    assert re.search(r"\na +94.00 +1 .* - +no difference shown\n", shown)


def test_what_else_differs_and_what_diverged_is_said(tmp_path, capsys):
    """A program was edited, or a machine changed, between the runs of a baseline and those of a variant."""
    variants = {"a": ["--epochs=8"], "b": ["--recipe=b.py"]}
    experiment.write_plan(Plan(["--recipe", "muon"], variants, [{"runs": 3, "variants": 2}]), tmp_path)
    write_results(tmp_path, {name: [9400, 9410, 9420] for name in ("baseline", "a", "b")})
    table = pd.read_csv(tmp_path / "runs.tsv", sep="\t", dtype=str)
    table["options"] = ["epochs=9 width=64"] * 3 + ["epochs=8 width=64"] * 3 + ["epochs=9 width=32"] * 3
    table["code"] = ["c1"] * 3 + ["c2"] * 3 + ["c3"] * 3
    table.loc[5, "train_loss"] = "nan"
    table.to_csv(tmp_path / "runs.tsv", sep="\t", index=False)
    run_main("--report", out=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "a: 1 of 3 runs diverged." in lines
    differs = "differs from the baseline in more than its change:"
    assert [line for line in lines if differs in line] == [
        f"a {differs} code (c2, not c1).",
        f"b {differs} width (32, not 64).",
    ]


def test_differences_without_a_spread_are_no_verdict():
    """Three runs of a hundred images often differ by the same number of images."""
    accuracies = pd.Series([94.0, 95.0, 96.0])
    results = [Result("baseline", accuracies, 1.0), Result("a", accuracies + 1, 1.0), Result("b", accuracies, 1.0)]
    experiment.judge(results[0], results[1:], tests=2, margin=0.1)
    assert [result.verdict for result in results[1:]] == ["no difference shown", "equivalent"]


# ---- The picture


def test_the_picture_has_a_line_for_each_variant_and_the_sweep_of_an_option():
    variants = {"filter_rate=0.12": ["--filter_rate=0.12"], "filter_rate=0.48": ["--filter_rate=0.48"]}
    variants |= {"silu": ["--recipe=silu.py"]}
    plan = Plan(["--recipe", "muon"], variants, [{"runs": 4, "variants": 3}])
    draws = np.random.default_rng(0)
    results = [Result(name, pd.Series(draws.normal(94, 0.2, 4)), 1.0) for name in plan.campaigns]
    experiment.judge(results[0], results[1:], tests=3, margin=0.1)
    differences, sweep = experiment.draw(plan, results, margin=0.1).axes
    assert [label.get_text() for label in differences.get_yticklabels()] == [*variants]
    assert sweep.get_xlabel() == "filter_rate"
    np.testing.assert_allclose(sorted(sweep.get_xticks()), [0.12, 0.24, 0.48])
    for option in ("epochs=8 kept=1", "pixels=24,32", "pixels=24", "micro_batches=2", "views=two"):
        _, words = experiment.words_of_variant(option)
        assert experiment.swept_option(Plan(["--recipe", "muon"], {"a": words, "b": words}, [])) == ("", {})
