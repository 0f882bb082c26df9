"""Verdicts and statuses of comparisons, their statistics, and the picture."""

import errno
import itertools
import math
import os

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats
from test_read_logs import run_lines, write_runs

from large_batch_cifar_10_fast import compare, plot
from large_batch_cifar_10_fast.log import print_summary
from large_batch_cifar_10_fast.plot import draw_picture
from large_batch_cifar_10_fast.results import PUBLISHED
from large_batch_cifar_10_fast.core.table import EPOCHS
from large_batch_cifar_10_fast.results import compare_means, verdict, wilson


@pytest.fixture
def compared(capsys):
    """Return a function that runs the command, and returns its status and its lines by their first word."""

    def run(*arguments) -> tuple[int, dict[str, str]]:
        status = compare.main([*map(str, arguments)])
        lines = capsys.readouterr().out.splitlines()
        return status, {line.strip().partition(" ")[0].rstrip(":,"): line for line in lines}

    return run


def test_published_against_itself_is_equivalent(compared):
    status, lines = compared("published", "published")
    assert status == 0
    assert lines["Accuracy"].startswith("Accuracy: equivalent within 0.1 points: +0.000 points")
    assert lines["Time"].startswith("Time: equivalent within 0.394 seconds: ")
    assert "94.186 ± 0.185, n = 50" in lines["accuracy"]
    assert "[-0.073, +0.073]" in lines["accuracy"]
    assert "41 of 50, [69%, 90%]" in lines["runs"]


@pytest.mark.parametrize(
    ("counts", "found", "status"),
    [
        ([9370, 9380, 9390], "mine is worse", 1),
        ([9430, 9440, 9450], "mine is better", 0),
        ([9400, 9410, 9420], "equivalent within 0.1 points", 0),
        ([9380, 9400, 9420], "no difference shown", 0),
    ],
)
def test_each_verdict_on_accuracy(tmp_path, compared, counts, found, status):
    mine = write_runs(tmp_path / "mine", 8 * counts)
    reference = write_runs(tmp_path / "ref", 8 * [9400, 9410, 9420], seed=100)
    assert compared(mine, reference)[1]["Accuracy"].startswith(f"Accuracy: {found}: ")
    assert compared(mine, reference)[0] == status
    one_run = write_runs(tmp_path / "mine", [1000])
    assert compared(one_run, reference)[1]["Accuracy"] == "Accuracy: no difference shown: a single run has no spread."


def test_slower_counts_only_on_the_same_device_with_as_many_processes(tmp_path, compared):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.write_text(run_lines(0.9410 + 0.0001 * np.arange(20)))
    slow.write_text(fast.read_text().replace("time 4.", "time 8."))
    assert compared(slow, fast)[1]["Time"].startswith("Time: mine is worse: +4.000 seconds")
    assert (compared(slow, fast)[0], compared(fast, slow)[0]) == (1, 0)
    slow.write_text(slow.read_text().replace("H200", "A100"))
    status, lines = compared(slow, fast)
    reason = "device 1 x NVIDIA A100 (mine) and 1 x NVIDIA H200 (reference)"
    assert (status, lines["Time"]) == (0, f"Time: not compared: {reason}.")
    slow.write_text(slow.read_text().replace("H200", "A100").replace("1 process", "2 processes"))
    assert "processes 2 (mine) and 1 (reference)" in compared(slow, fast)[1]["Time"]


def test_differing_and_unknown_conditions_come_first(tmp_path, capsys):
    made = {"precision": "bf16", "options": "epochs=9", "code": "b", "torch": "2.11.0", "commit": "e-dirty"}
    mine = write_runs(tmp_path / "mine", [9400], train_loss="nan", **made)
    made = {"precision": "fp16", "images": "CIFAR-10", "code": "a", "torch": "2.10.0", "commit": "e"}
    compare.main([mine, write_runs(tmp_path / "ref", [9400], **made)])
    head = capsys.readouterr().out.partition("accuracy, %")[0]
    for part in ("precision (bf16, not fp16)", "epochs (9, not 8)", "1 runs diverged", "mine: unknown images"):
        assert part in head
    for part in ("code (b, not a): files", "torch (2.11.0, not 2.10.0)", "commit (e-dirty, not e)"):
        assert part in head


def test_times_of_diverged_runs_are_no_times(tmp_path, compared, capsys):
    """Runs that stop early are no reason to call the others slow."""
    counts, reference = 10 * [9400, 9410], write_runs(tmp_path / "ref", 10 * [9400, 9410])
    losses = [1.0] * 14 + ["nan"] * 6
    rows = pd.read_csv(reference, sep="\t").assign(train_loss=losses, seconds=[8.8, 8.9] * 7 + [0.5] * 6)
    rows.to_csv(tmp_path / "mine", sep="\t", index=False)
    lines = compared(tmp_path / "mine", reference)[1]
    assert "8.850 ± 0.052, n = 14" in lines["seconds"]
    assert "14 of 20" in lines["runs"]
    all_diverged = write_runs(tmp_path / "mine", counts, train_loss="nan")
    assert compared(all_diverged, reference)[1]["Time"] == "Time: not compared: all runs of a side diverged."
    for given, times in ((rows, "8.9 median 8.85"), (rows[14:], "nan median nan")):
        table = given.assign(validation_accuracy=given["validation_count"] / 10000).astype(str)
        print_summary(table.to_dict("records"))
        assert f"Maximum training time {times}" in capsys.readouterr().out


def test_losses_under_different_label_smoothing_are_not_compared(tmp_path, compared):
    options = "epochs=8 label_smoothing=0.1"
    mine = write_runs(tmp_path / "mine", [9400, 9410], validation_loss=0.5, options=options)
    other, same = (write_runs(tmp_path / name, [9400, 9410], recipe=name) for name in ("apple2019", "muon"))
    for reference in (other, same):  # whose options do not say that it is 0.2
        lines = compared(mine, reference)[1]
        assert "label_smoothing (0.1, not 0.2)" in lines["Loss"]
        assert lines["loss"].split()[-3:] == ["-"] * 3
    assert compared(other, same)[1]["loss"].split()[-3] != "-"


def test_times_of_a_busy_machine_are_not_compared(tmp_path, compared):
    """Runs take 5 s to 24 s; 1.9 CPU seconds a second are two threads' share of an idle machine."""
    seconds, counts = 5 + np.arange(20), 10 * [9400, 9410]
    idle, alike, busy = (
        write_runs(tmp_path / f"{share}", counts, table={"cpu_seconds": share * seconds}, device="CPU, 1 x 2 threads")
        for share in (1.9, 1.86, 1.6)
    )
    assert compared(alike, idle)[1]["Time"].startswith("Time: equivalent")
    for mine, reference, shares in ((busy, idle, "1.60 (mine) and 1.90"), (idle, busy, "1.90 (mine) and 1.60")):
        line = compared(mine, reference)[1]["Time"]
        assert line.startswith(f"Time: not compared: {shares} (reference) CPU seconds a second: the machine was busy")


def test_the_default_reference_is_the_published_one_for_apple2019_on_cifar_10_alone(tmp_path, compared, error_line):
    made = {"recipe": "apple2019", "images": "CIFAR-10"}
    assert "94.186" in compared(write_runs(tmp_path / "mine", [9400], **made))[1]["accuracy"]
    for other in ({"recipe": "muon"}, {"images": "synthetic"}):
        mine = write_runs(tmp_path / "mine", [9400], **made | other)
        assert f"{mine} needs a REFERENCE" in error_line(compare.main, [mine])
    assert "published needs a REFERENCE" in error_line(compare.main, ["published"])


def test_what_cannot_be_read_ends_with_status_2_and_one_line(tmp_path, error_line):
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\n,\0")
    for path in (tmp_path / "p.png", tmp_path, "absent.txt", "absent/*.tsv"):
        assert str(path) in error_line(compare.main, [str(path), "published"])
    mine = write_runs(tmp_path / "mine", [9400])
    assert "no campaign c, only b" in error_line(compare.main, [f"{mine}:c", "published"])


def test_welch_and_wilson_are_the_textbooks():
    a = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4])
    b = np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4])
    va, vb = a.var(ddof=1) / 15, b.var(ddof=1) / 15
    freedom = (va + vb) ** 2 / (va**2 / 14 + vb**2 / 14)
    assert freedom == pytest.approx(24.99, abs=0.01)  # published with this example
    a, b = pd.Series(a), pd.Series(b, index=range(1, 16))  # by seed
    half, found = stats.t.ppf(0.975, freedom) * math.sqrt(va + vb), compare_means(a, b, margin=4)
    assert (found.low, found.high) == pytest.approx((found.difference - half, found.difference + half))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.difference) / math.sqrt(va + vb), freedom))
    assert found.p_margin == pytest.approx(stats.t.sf((found.difference + 4) / math.sqrt(va + vb), freedom))
    assert found.p == pytest.approx(0.021, abs=5e-4), "not below 0.01, so no difference is shown"
    critical, shift = stats.t.ppf(1 - 0.01 / 2, freedom), found.detectable / math.sqrt(va + vb)
    assert stats.nct.sf(critical, freedom, shift) == pytest.approx(0.8, abs=0.01)
    words = [verdict(compare_means(a, b, margin), more_is_better=True) for margin in (1, 4)]
    assert words == ["no difference shown", "equivalent"]
    words = [verdict(compare_means(a - 2, b), better) for better in (True, False)]
    assert words == ["mine is worse", "mine is better"]
    assert compare_means(a[:1], b) is None
    ones = pd.Series(np.ones(3))
    assert verdict(compare_means(ones[:2], ones, margin=0.1), more_is_better=True) == "equivalent"
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), Statistics in Medicine 17


def test_samples_of_the_same_seeds_are_compared_in_pairs_in_any_order():
    """Differences 1, 2, 3, 4 have mean 2.5 and standard error sqrt(5/3) / 2."""
    noise = np.array([100.0, -200, 300, 50])
    a, b = pd.Series(noise + np.arange(1, 5), index=[7, 8, 9, 10]), pd.Series(noise, index=[7, 8, 9, 10])
    for reference in (b, b[::-1]):
        found = compare_means(a, reference)
        half = stats.t.ppf(0.975, 3) * math.sqrt(5 / 3) / 2
        assert (found.low, found.high) == pytest.approx((2.5 - half, 2.5 + half))
        assert found.p == pytest.approx(2 * stats.t.sf(2.5 / (math.sqrt(5 / 3) / 2), 3))
    unknown = [sample.set_axis([np.nan] * 4) for sample in (a, b)]
    others = a, b.set_axis([8, 9, 10, 11])
    assert not any(compare_means(*samples).paired for samples in (unknown, others))


CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"


def test_a_picture_replaces_what_a_link_leads_to(tmp_path):
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        picture, link = tmp_path / f"picture{suffix}", tmp_path / f"link{suffix}"
        link.symlink_to(picture)
        plot.main([str(CURVE), "--out", str(link)])
        assert (link.is_symlink(), picture.read_bytes()[: len(magic)]) == (True, magic)


@pytest.fixture
def panels(tmp_path, monkeypatch, capsys):
    """Return a function that draws a picture, and returns its panels by their title; its file is 1700 pixels wide."""
    drawn = []
    monkeypatch.setattr(plot, "draw_picture", lambda *what: drawn.append(draw_picture(*what)) or drawn[-1])

    def draw(*arguments: object) -> dict[str, Axes]:
        plot.main([*map(str, arguments), "--out", str(out := tmp_path / "p.png")])
        assert (capsys.readouterr().out, imread(out).shape[1]) == (f"{out}\n", 1700)
        return {axes.get_title(loc="left").partition(" (")[0]: axes for axes in drawn[-1].axes}

    return draw


def write_epochs(folder, accuracies, **fields) -> str:
    """Write a campaign of runs with these accuracies by epoch, losses 1 - accuracy and train losses of half of that."""
    rows = [("b", i, e, e, (1 - a) / 2, 1 - a, a) for i, run in enumerate(accuracies) for e, a in enumerate(run, 1)]
    path, names = write_runs(folder / "runs.tsv", [10_000 * run[-1] for run in accuracies], **fields), EPOCHS
    table = pd.DataFrame(rows, columns=[name for name in names if name != "train_accuracy"])
    table.to_csv(folder / "epochs.tsv", sep="\t", index=False)
    return path


def test_median_and_range_of_each_campaign_are_drawn_by_epoch_with_losses_and_final_accuracies(tmp_path, panels):
    a = write_epochs(tmp_path / "a", [(0.2, 0.25), (0.1, 0.15), (0.3, 0.35)], options="epochs=2 kept=1")
    b = write_epochs(tmp_path / "b", [(0.2, 0.3)], options="epochs=2 kept=0.5")
    drawn = panels(a, b)
    curves, losses, final, work = drawn.values()
    np.testing.assert_allclose([line.get_ydata() for line in curves.lines], [[20, 25], [20, 30]])
    np.testing.assert_allclose([line.get_ydata() for line in losses.lines[:2]], [[0.8, 0.75], [0.4, 0.375]])
    np.testing.assert_allclose(curves.collections[0].get_paths()[0].get_extents().intervaly, [10, 35])
    assert [text.get_text() for text in curves.texts] == ["muon kept=0.5, n = 1", "muon kept=1, n = 3"]
    assert [text.get_text() for text in final.texts] == [
        "muon kept=1, n = 3: 25.00 ± 10.00%",
        "muon kept=0.5, n = 1: 30.00%",
    ]
    of_all, of_half = (line.get_xdata()[0] for line in work.lines)
    assert of_half == pytest.approx(of_all / 2, rel=0.1)
    assert final.lines[0].get_xdata().tolist() == pytest.approx([15, 25, 35])
    low, high = curves.get_ylim()
    assert low < 10 < 35 < high < 94, "no line at 94%, which is far away"
    colors = {line.get_color() for line in curves.lines}
    assert len(colors) == 2, "each in its own"


def test_the_line_at_94_percent_is_drawn_where_it_is_near(tmp_path, panels):
    curves = panels(write_epochs(tmp_path / "a", [(0.5, 0.935)]))["Accuracy by epoch"]
    assert curves.lines[-1].get_ydata() == [94, 94]


def test_published_results_are_grey_and_only_drawn_when_asked_for(panels):
    final = panels("published")["Final accuracy of each run"]
    assert [text.get_text() for text in final.texts] == ["apple2019, n = 50: 94.19 ± 0.19%"]
    curves = panels(CURVE, "--published")["Accuracy by epoch"]
    median, low_and_high = curves.lines[1], curves.collections[-1].get_paths()[0].get_extents().intervaly
    assert (median.get_color(), *median.get_xydata()[0]) == ("0.5", 18, pytest.approx(94.2))
    assert low_and_high.tolist() == pytest.approx([93.7, 94.5])


def test_labels_at_ends_lie_above_them_and_apart_and_the_name_of_a_file_is_no_formula(tmp_path, panels):
    files = []
    for name in ("$a$", "$b$", "$c$"):
        (tmp_path / f"{name}.tsv").write_text(CURVE.read_text())
        files.append(tmp_path / f"{name}.tsv")
    curves = panels(*files, tmp_path / "$a$.tsv")["Accuracy by epoch"]
    heights = np.sort([text.get_position()[1] for text in curves.texts])
    assert np.diff([94.1, *heights]).min() > 0.07 * (94.1 - 38.54)
    assert "$b$, n = 1" in {text.get_text() for text in curves.texts}


def test_a_label_is_moved_up_only_where_it_would_overlap_another(tmp_path, panels):
    lengths = {"muon": 6, "muon2024": 12, "page": 36}
    files = [write_epochs(tmp_path / name, [[0.3, 0.9] * (n // 2)], recipe=name) for name, n in lengths.items()]
    labels = panels(*files)["Accuracy by epoch"].texts
    boxes = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    heights = dict(label.get_position() for label in labels)
    assert heights[36] == min(heights.values()) < max(heights[6], heights[12])


def test_a_picture_that_cannot_be_written_ends_with_one_line_and_the_one_before_stays(
    tmp_path, error_line, monkeypatch
):
    (tmp_path / "full.png").symlink_to("/dev/full")
    for out, message in (("p.xyz", "Format 'xyz' is"), ("no/p.png", "No such file"), ("full.png", "is not a file")):
        assert message in error_line(plot.main, [str(CURVE), "--out", str(tmp_path / out)])
    (out := tmp_path / "p.png").write_bytes(b"before")

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    assert "[Errno 28] No space" in error_line(plot.main, [str(CURVE), "--out", str(out)])
    assert (out.read_bytes(), len(list(tmp_path.iterdir()))) == (b"before", 2)
