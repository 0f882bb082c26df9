"""Conclusions, statuses and the choice of the reference, of any two logs; their statistics, and the picture."""

import errno
import json
import math
import os
import re
from dataclasses import asdict

import numpy as np
import pytest
from conftest import REPO, python
from large_batch_cifar_10_fast.command_line import read_request
from large_batch_cifar_10_fast.options import as_pairs
from matplotlib.figure import Figure
from scipy import stats
from test_read_logs import WITHOUT_SUMMARY, our_form, runs_rows, written

from large_batch_cifar_10_fast import compare, plot
from large_batch_cifar_10_fast import stats as ours
from large_batch_cifar_10_fast.plot import ENTRIES, separate_labels
from large_batch_cifar_10_fast.read_logs import PUBLISHED, read_log

DEMO = REPO / "logs" / "demo" / "runs.tsv"


@pytest.fixture
def conclusion(capsys):
    """Return a function that runs the command with --json. It returns the output, and verdicts with the exit status."""

    def run(*arguments) -> dict:
        status = compare.main([*map(str, arguments), "--json"])
        found = json.loads(capsys.readouterr().out)
        verdicts = {name: (found["conclusions"][name]["verdict"], status) for name in ("accuracy", "time", "goal")}
        return found | {"rows": {row["name"]: row for row in found["rows"]}} | verdicts

    return run


def log_file(path, content: str):
    path.write_text(content)
    return path


def test_published_against_itself_is_equivalent(conclusion):
    found = conclusion("published", "published")
    verdicts = [found[name] for name in ("accuracy", "time", "goal")]
    assert verdicts == [("equivalent", 0), ("equivalent", 0), ("significant", 0)]
    assert found["rows"]["reached 94%"]["mine"] == "41 of 50, 82% [69%, 90%]"
    np.testing.assert_allclose(found["rows"]["accuracy mean, %"]["interval"], [-0.073, 0.073], atol=5e-4)
    np.testing.assert_allclose(found["rows"]["seconds mean"]["interval"], [0.982, 1.019], atol=5e-4)


def test_three_tenths_of_a_point_less_is_worse_and_three_runs_are_too_few(tmp_path, conclusion):
    less = re.sub(r"(?<=validation acc )\S+", lambda accuracy: f"{float(accuracy[0]) - 0.003:.3f}", WITHOUT_SUMMARY)
    mine = log_file(tmp_path / "less.txt", less)
    few = log_file(tmp_path / "few.txt", "".join(WITHOUT_SUMMARY.splitlines(keepends=True)[:7]))
    assert conclusion(mine, "published")["accuracy"] == ("worse", 1)
    assert conclusion("published", mine)["accuracy"] == ("better", 0)
    assert conclusion(few, "published")["accuracy"] == ("open", 0)


def test_slower_counts_only_on_the_same_hardware(tmp_path, conclusion):
    fast = log_file(tmp_path / "fast", our_form(0.9410 + 0.0001 * np.arange(20)))
    slow = log_file(tmp_path / "slow", fast.read_text().replace("time 4.", "time 8."))
    other = log_file(tmp_path / "other", slow.read_text().replace("H200", "A100"))
    found = conclusion(slow, fast)
    assert (found["accuracy"], found["time"]) == (("equivalent", 1), ("worse", 1))
    assert (conclusion(other, fast)["time"], conclusion(fast, slow)["time"]) == (("worse", 0), ("better", 0))


def test_a_picture_a_folder_or_an_empty_file_ends_with_status_2_and_one_line(tmp_path, error_line):
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\n,\0")
    for path in (tmp_path / "p.png", tmp_path, log_file(tmp_path / "empty", ""), "absent.txt", "absent/*.tsv"):
        assert str(path) in error_line(compare.main, [str(path)])


def test_differing_conditions_are_listed_above_the_table(tmp_path):
    mine = log_file(tmp_path / "log.txt", our_form(0.9410 + 0.0002 * np.arange(20)).replace("H200", "A100"))
    other = our_form(0.9411 + 0.0002 * np.arange(20)).replace("0123456789ab", "ffff").replace("=18", "=20")
    result = python("-m", "large_batch_cifar_10_fast.compare", mine, log_file(tmp_path / "other.txt", other), cwd=REPO)
    head = result.stdout.partition("accuracy mean")[0]
    for part in ("digest: 0123456789ab (mine), ffff", "device: 1 x NVIDIA A100", "epochs: 18 (mine), 20"):
        assert part in head


def test_diverged_runs_are_counted_and_left_out_of_the_mean_loss(tmp_path, conclusion):
    good = our_form([0.9410, 0.9412, 0.1000])
    found = conclusion(log_file(tmp_path / "log.txt", "loss nan".join(good.rsplit("loss 0.991", 1))), "published")
    rows = found["rows"]
    assert (rows["loss mean"]["mine"], rows["accuracy lowest, %"]["mine"]) == ("0.991", "10.000")
    assert any("1 runs diverged" in note for note in found["notes"])
    path = log_file(tmp_path / "log.txt", our_form([0.1, 0.1, 0.1]).replace("loss 0.991", "loss nan"))
    assert conclusion(path, "published")["accuracy"] == ("worse", 1)
    assert conclusion("published", path)["accuracy"] == ("open", 0)


def test_the_reference_is_made_under_the_same_conditions(tmp_path, conclusion, monkeypatch):
    """For apple2019 on CIFAR-10 the published runs; else our log of the same options, images, then precision, runs."""
    demo = {"images": "synthetic", "digest": read_log(str(DEMO)).conditions["digest"]}
    for arguments, fields, reference in (([], {"images": "CIFAR-10"}, "published"), (["--demo"], demo, str(DEMO))):
        _, recipe = read_request(arguments, {})
        fields |= {"recipe": recipe.name, "options": as_pairs(asdict(recipe)), "workers": str(recipe.workers)}
        path = written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields))
        assert conclusion(path)["reference"] == reference
    path = written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields | {"digest": "another"}))
    assert conclusion(path)["reference"] == str(DEMO), "synthetic images differ in a few bits between CPUs"
    with pytest.raises(SystemExit):
        conclusion(written(tmp_path / "runs.tsv", runs_rows("c", ["9400"], **fields | {"images": "cifar10.npz"})))
    conditions = {"images": "cifar10.npz", "recipe": "muon", "precision": "bf16"}
    (tmp_path / "logs").mkdir()
    for name, runs, more in (
        *(("fp32", 9, {"precision": "fp32"}), ("few", 2, {}), ("images", 9, {"digest": "e"})),
        *(("tail", 9, {"options": "epochs=18 tail_epochs=0.5"}), ("pixels", 9, {"options": "epochs=18 pixels=24"})),
        ("more", 3, {"options": "epochs=18.0 tail_epochs=0.0 activation=gelu"}),  # removed options, inactive
    ):
        written(tmp_path / "logs" / f"runs_{name}.tsv", runs_rows(name, ["9400"] * runs, **(conditions | more)))
    monkeypatch.setattr(compare, "LOGS", tmp_path / "logs")
    mine = written(tmp_path / "mine.tsv", runs_rows("mine", ["9400"] * 2, **conditions))
    assert conclusion(mine)["reference"].endswith("runs_more.tsv"), "same precision, most runs"
    assert conclusion(tmp_path / "logs" / "runs_more.tsv")["reference"].endswith("runs_few.tsv"), "not mine itself"


def test_intervals_of_welch_wilson_and_newcombe_are_the_textbooks():
    a = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4])
    b = np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4])
    va, vb = a.var(ddof=1) / 15, b.var(ddof=1) / 15
    freedom = (va + vb) ** 2 / (va**2 / 14 + vb**2 / 14)
    assert freedom == pytest.approx(24.99, abs=0.01)  # published with this example
    half = stats.t.ppf(0.975, freedom) * math.sqrt(va + vb)
    expected = a.mean() - b.mean() - half, a.mean() - b.mean() + half
    assert ours.welch_interval(a, b) == pytest.approx(expected)
    assert ours.welch_interval(a[:1], b) is None
    assert ours.welch_interval(np.ones(3), np.ones(2)) == (0, 0)
    # Newcombe (1998), Statistics in Medicine 17: 81 of 263, and 56/70 against 48/80.
    assert ours.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert ours.newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_two_one_sided_tests_are_scipys():
    random = np.random.default_rng(0)
    for spread in (0.1, 0.2, 0.3, 0.5):
        a, b = random.normal(94.15, spread, 30), random.normal(94.2, spread, 40)
        above = stats.ttest_ind(a + 0.1, b, equal_var=False, alternative="greater").pvalue
        below = stats.ttest_ind(a - 0.1, b, equal_var=False, alternative="less").pvalue
        verdict = ours.judge(a, b, 0.1, "Accuracy", str, more_is_better=True).verdict
        assert (verdict == "equivalent") == (max(above, below) < 0.05)


def test_resampled_interval_is_scipys_and_needs_five_runs():
    random = np.random.default_rng(5)
    a, b = random.normal(5, 1, 100), random.normal(4, 1, 50)
    between = lambda x, y: np.median(x) / np.median(y)  # noqa: E731
    how = {"vectorized": False, "n_resamples": 5000, "method": "percentile", "rng": np.random.default_rng(0)}
    expected = stats.bootstrap((a, b), between, **how).confidence_interval
    assert ours.resampled_interval(a, b, between) == (expected.low, expected.high)
    assert ours.resampled_interval(a[:4], b, between) is None


def test_the_runs_needed_are_the_textbooks_and_give_the_power_they_promise():
    needed = ours.runs_needed(spread=0.16, margin=0.10)
    assert needed == 44  # 2 (0.16 (1.645 + 1.282) / 0.10)^2 = 43.9
    pairs = np.random.default_rng(2).normal(0, 0.16, (300, 2, needed))
    hits = sum(ours.judge(a, b, 0.1, "", str, more_is_better=True).verdict == "equivalent" for a, b in pairs)
    assert 0.7 < hits / 300 < 0.9
    few = 94.03 + 0.15 * np.array([-1, 0, 1])
    assert "about 251 runs" in ours.judge_goal(few, 94.0).text  # (0.15 (2.326 + 0.842) / 0.03)^2 = 250.9


def test_the_mean_at_94_percent_is_students_one_sided_test():
    """By the tables: of five runs (four degrees of freedom) t is above 3.747 with p = 0.01, above 2.132 with 0.05."""
    scattered = np.array([-1.0, -0.5, 0.0, 0.5, 1.0]) / 0.625**0.5
    for t, verdict, p in ((3.80, "significant", "0.0096"), (3.70, "open", "0.01"), (2.132, "open", "0.05")):
        conclusion = ours.judge_goal(94.0 + 0.15 * (scattered + t / 5**0.5), 94.0)
        assert conclusion.verdict == verdict
        assert re.search(rf"std 0.150, n = 5, one-sided t-test p = {p}[;.]", conclusion.text)
    below = 94.0 + 0.15 * (scattered - 0.5)
    assert [ours.judge_goal(runs, 94.0).verdict for runs in (below, below[:1])] == ["open", "open"]


CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"
CAMPAIGN = PUBLISHED / "apple_8xv100_50_runs.tsv"
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def drawn(tmp_path, *files: object) -> str:
    plot.main([*map(str, files), "--out", str(tmp_path / "p.svg")])
    return (tmp_path / "p.svg").read_text().replace("> ", ">")


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_picture_replaces_what_a_link_leads_to(tmp_path, suffix):
    picture, link = tmp_path / f"picture{suffix}", tmp_path / f"link{suffix}"
    link.symlink_to(picture)
    plot.main([str(CURVE), "--out", str(link)])
    assert link.is_symlink()
    assert picture.read_bytes().startswith(MAGIC[suffix])


def test_every_line_and_distribution_is_labelled_and_the_name_of_a_file_is_no_formula(tmp_path):
    text = drawn(tmp_path, CAMPAIGN)
    for label in (*ENTRIES.values(), "mine", "94%", "published", "final test accuracy, %", "seconds", "share of runs"):
        assert f">{label}<" in text, label
    (tmp_path / "a$\\b$.tsv").write_text(CAMPAIGN.read_text())
    text = drawn(tmp_path, tmp_path / "a$\\b$.tsv", CURVE)
    assert text.count(">a$\\b$.tsv<") == 3, "at its line, and over each of two distributions"
    assert "mine, on synthetic<" in drawn(tmp_path, REPO / "logs" / "demo" / "runs.tsv")


def test_labels_are_spread_in_order_with_a_gap():
    places = np.array([1.0, 1.02, 3.0, 0.0, 1.01])
    moved = separate_labels(places, 0.2, -0.5, 3.5)
    assert np.argsort(moved).tolist() == np.argsort(places).tolist()
    assert np.diff(np.sort(moved)).min() > 0.2 - 1e-6
    assert (moved[3], moved[2]) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("out", "message"),
    [("p.xyz", "Format 'xyz' is not supported"), ("no/p.png", "No such file"), ("full.png", "is not a file")],
)
def test_a_picture_that_cannot_be_written_ends_with_one_line(tmp_path, error_line, out, message):
    (tmp_path / "full.png").symlink_to("/dev/full")
    assert message in error_line(plot.main, [str(CURVE), "--out", str(tmp_path / out)])


def test_on_a_full_disk_the_picture_before_stays(tmp_path, error_line, monkeypatch):
    (out := tmp_path / "p.png").write_bytes(b"before")

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    line = error_line(plot.main, [str(CURVE), "--out", str(out)])
    assert f"{out} cannot be written ([Errno 28] No space left on device)" in line
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("p.png", b"before")]
