"""Pictures: the data, labels that can be read and told apart, and runs that are not finished."""

import errno
import itertools
import re

import numpy as np
import pandas as pd
import pytest
from conftest import REPO, run_program
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from test_results import write_epochs, write_runs

from large_batch_cifar_10_fast.lab import compare, plot
from large_batch_cifar_10_fast.lab.plot import draw_picture
from large_batch_cifar_10_fast.lab.results import PUBLISHED, read_log

CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """Return a function that draws a picture: it returns the panels by their titles."""
    drawn = []
    monkeypatch.setattr(plot, "draw_picture", lambda *what: drawn.append(draw_picture(*what)) or drawn[-1])

    def draw(*arguments: object) -> dict[str, Axes]:
        plot.main([*map(str, arguments), "--out", str(tmp_path / "p.png")])
        return {axes.get_title(loc="left"): axes for axes in drawn[-1].axes}

    return draw


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text() != "94%"]


def legend(drawn: dict[str, Axes]) -> list[str]:
    """Return the texts of the legend of a picture, and none if it has no legend."""
    legends = next(iter(drawn.values())).figure.legends
    return [text.get_text() for one in legends for text in one.get_texts()]


def labels(drawn: dict[str, Axes]) -> list[str]:
    """Return the labels of a picture, in the order of its logs."""
    return legend(drawn) or [text.partition(":")[0] for text in texts(drawn["Final accuracy of each run"])]


def write_table(folder, campaigns, **fields) -> str:
    """Write a table of campaigns of two runs with three epochs, which end at these accuracies; return its path."""
    tables = []
    rows = []
    for number, (name, end) in enumerate(campaigns.items()):
        options = fields.get("options", "epochs=3").format(i=number)
        path = write_runs(
            folder / name, [10_000 * end, 10_000 * end + 10], name, 10 * number, **fields | {"options": options}
        )
        tables.append(pd.read_csv(path, sep="\t"))
        curve = [end - 0.3, end - 0.1, end]
        rows += [(name, run, epoch, epoch, curve[epoch - 1] + run / 1000) for run in (0, 1) for epoch in (1, 2, 3)]
    write_epochs(folder, rows)
    pd.concat(tables).to_csv(folder / "runs.tsv", sep="\t", index=False)
    return str(folder / "runs.tsv")


def test_a_picture_has_the_data_and_names_recipes_and_runs(tmp_path, panels):
    for kept, runs in (("1", [(0.2, 0.25), (0.1, 0.15), (0.3, 0.35)]), ("0.5", [(0.2, 0.3)])):
        folder = tmp_path / kept
        write_runs(folder / "runs.tsv", [10_000 * b for _, b in runs], options=f"epochs=2 kept={kept}")
        rows = [(i, e, a) for i, run in enumerate(runs) for e, a in enumerate(run, 1)]
        write_epochs(folder, [("b", i, e, e, a, 1 - a, (1 - a) / 2) for i, e, a in rows])
    curves, losses, final, work = panels(tmp_path / "1" / "runs.tsv", tmp_path / "0.5" / "runs.tsv").values()
    np.testing.assert_allclose([line.get_ydata() for line in curves.lines], [[20, 25], [20, 30]])
    np.testing.assert_allclose([line.get_ydata() for line in losses.lines[:2]], [[0.8, 0.75], [0.4, 0.375]])
    assert all(isinstance(shade, PolyCollection) for shade in curves.collections)
    np.testing.assert_allclose(curves.collections[0].get_paths()[0].get_extents().intervaly, [10, 35])
    assert legend({"": curves}) == ["b kept=1, n = 3", "b kept=0.5, n = 1"], "labels would cover the shade"
    assert (texts(curves), texts(final)) == ([], ["25.00 ± 10.00%", "30.00%"])
    assert all(isinstance(bar, LineCollection) for bar in work.collections)
    assert curves.figure.get_supxlabel() == "shade: range over runs; ± is the standard deviation over runs"
    assert final.lines[0].get_xdata().tolist() == pytest.approx([15, 25, 35])
    of_all, of_half = (line.get_xdata()[0] for line in work.lines)
    assert of_half == pytest.approx(of_all / 2, rel=0.1)


def test_published_results_are_drawn_when_asked_for(panels):
    assert texts(panels("published")["Final accuracy of each run"]) == ["apple2019, n = 50: 94.19 ± 0.19%"]
    curves = panels(CURVE, "--published")["Accuracy by epoch"]
    assert curves.lines[1].get_xydata().tolist() == [[18, pytest.approx(94.2)]]
    assert curves.collections[-1].get_paths()[0].get_extents().intervaly.tolist() == pytest.approx([93.7, 94.5])


def test_readmes_picture_has_the_logs_that_it_names(panels, monkeypatch):
    monkeypatch.chdir(REPO)
    text = (REPO / "README.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"(?m)^python -m large_batch_cifar_10_fast\.plot (.*)", text)
    words = run_program("bash", "-c", f"echo {line}", cwd=REPO).stdout.split()
    tables = [pd.read_csv(word, sep="\t") for word in words if word.endswith(".tsv")]
    names = [f"{table['recipe'].iloc[-1]}, n = {len(table)}" for table in tables]
    shown = legend(panels(*words))
    assert len(names) == 3
    assert all(text.endswith(name) for text, name in zip(shown, names, strict=True))


def test_a_failed_picture_is_one_line_and_the_one_before_stays(tmp_path, error_line, monkeypatch):
    assert "Format 'xyz' is" in error_line(plot.main, [str(CURVE), "--out", "p.xyz"])

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    out = tmp_path / "p.png"
    out.write_bytes(b"before")
    assert "[Errno 28] No space" in error_line(plot.main, [str(CURVE), "--out", str(out)])
    assert (out.read_bytes(), [*tmp_path.iterdir()]) == (b"before", [out])


def test_of_an_asterisk_each_campaign_is_a_line_and_compare_takes_all_together(tmp_path, panels, error_line, capsys):
    source = write_table(tmp_path / "t", {"before": 0.6, "after": 0.7}) + ":*"
    drawn = panels(source)
    assert [line.get_ydata()[-1] for line in drawn["Accuracy by epoch"].lines] == pytest.approx([60.05, 70.05])
    assert {*texts(drawn["Accuracy by epoch"])} == {"before, n = 2", "after, n = 2"}
    capsys.readouterr()
    found = read_log(source)
    assert found.runs["accuracy"].tolist() == pytest.approx([0.6, 0.601, 0.7, 0.701])
    assert found.epochs.groupby("epoch")["accuracy"].count().tolist() == [4, 4, 4]
    other = write_table(tmp_path / "o", {"before": 0.6, "after": 0.7}, options="epochs=3 kept={i}") + ":*"
    assert "differs from" in error_line(compare.main, [other, "published"])
    assert "in kept (1, not 0): they cannot be taken together" in error_line(compare.main, [other, "published"])


def test_labels_are_names_of_campaigns_or_recipes_and_what_differs(tmp_path, panels):
    """An automatic name says nothing. Of five options that differ, three are named; recipes of one name are."""
    named = write_table(tmp_path / "a", {"night": 0.5})
    automatic = {f"20261127T06252{i}-d0b8dff{i}": 0.5 + i / 10 for i in (1, 2)}
    options = "epochs=3 a={i} b={i} c={i} d={i} e={i}"
    several = write_table(tmp_path / "b", automatic, options=options)
    found = labels(panels(named, f"{several}:*"))
    assert found == ["night, n = 2", "muon a=0 b=0 c=0, n = 2", "muon a=1 b=1 c=1, n = 2"]
    other = write_table(tmp_path / "c", {"night": 0.6}, recipe="page")
    assert labels(panels(named, other)) == ["night muon, n = 2", "night page, n = 2"]


def test_three_image_sets_are_told_apart(tmp_path, panels):
    images = ["CIFAR-10", "CIFAR-10 with the last 5000 training images as test images", "my.npz"]
    sources = [write_table(tmp_path / str(i), {"b": 0.5}, images=name) for i, name in enumerate(images)]
    found = labels(panels(*sources))
    assert found[0] == "b images=CIFAR-10, n = 2"
    assert re.fullmatch("b images=CIFAR-10 with.*….*test images, n = 2", found[1])
    assert found[2] == "b images=my.npz, n = 2"


def test_labels_may_be_given(tmp_path, panels, error_line, capsys):
    source = write_table(tmp_path / "t", {"before": 0.6, "after": 0.7}) + ":*"
    shown = labels(panels(source, "--labels", "ours", "x" * 200))
    capsys.readouterr()
    assert shown[0] == "ours, n = 2"
    assert re.fullmatch("x+…x+, n = 2", shown[1])
    assert len(shown[1]) < 100
    message = "--labels has 1, but 2 logs are drawn: give one for each"
    assert message in error_line(plot.main, [source, "--labels", "ours", "--out", str(tmp_path / "p.png")])


LONG = "epochs=3 learning_rate_of_biases=0.0{i}23456 schedule_of_resolutions=16,24,{i},32 label_smoothing=0.{i}"


@pytest.mark.parametrize("options", [LONG, "epochs=3"])
def test_ten_campaigns_have_a_legend_that_covers_no_panel(tmp_path, panels, options):
    """70 characters of options that differ, or names alone."""
    names = {f"20261127T06252{i}-d0b8dff{i}" if options == LONG else f"campaign{i}": 0.9 + i / 200 for i in range(10)}
    drawn = panels(write_table(tmp_path / "t", names, options=options) + ":*")
    (found,) = drawn["Accuracy by epoch"].figure.legends
    assert len({*legend(drawn)}) == 10
    box = found.get_window_extent()
    figure = drawn["Accuracy by epoch"].figure
    assert 0 < box.x0 < box.x1 < figure.bbox.x1
    assert box.y1 < figure.bbox.y1
    for axes in drawn.values():
        assert axes.get_tightbbox().y1 < box.y0
        assert axes.get_window_extent().height > 0.3 * 2 * 200, "a panel is not squeezed"
    final = drawn["Final accuracy of each run"]
    boxes = [text.get_window_extent() for text in final.texts[:10]]
    assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))
    assert all(box.x0 > final.bbox.x1 for box in boxes), "no text covers a dot"


@pytest.mark.parametrize("count", [4, 5])
def test_five_logs_have_a_legend(tmp_path, panels, count):
    source = write_table(tmp_path / "t", {f"c{i}": 0.4 + i / 10 for i in range(count)})
    drawn = panels(f"{source}:*", "--panels", "accuracy")
    names = [f"c{i}, n = 2" for i in range(count)]
    assert legend(drawn) == (names if count == 5 else [])
    assert sorted(texts(drawn["Accuracy by epoch"])) == ([] if count == 5 else names)


ALIKE = [0.94, 0.941, 0.939, 0.9405]
ENDS = {"alike": (ALIKE, "epochs=3"), "apart": ([0.5, 0.6, 0.9, 0.94], "epochs=3 width={i}6")}


@pytest.mark.parametrize(("ends", "options"), ENDS.values(), ids=ENDS)
def test_labels_are_near_their_lines_and_cover_no_data(tmp_path, panels, ends, options):
    drawn = panels(write_table(tmp_path / "t", {f"c{i}": end for i, end in enumerate(ends)}, options=options) + ":*")
    assert legend(drawn) == []
    for title in ("Accuracy by epoch", "Final accuracy against work"):
        if title not in drawn:
            continue
        axes = drawn[title]
        boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text() != "94%"}
        assert len(boxes) == 4
        assert not any(a.overlaps(b) for a in boxes.values() for b in boxes.values() if a is not b)
        lines = [line for line in axes.lines if len(line.get_xdata()) < 4 and line.get_marker() != "None"]
        for label, line in zip(sorted(boxes), lines, strict=True):
            box = boxes[label]
            for other in lines:
                points = axes.transData.transform(other.get_xydata())
                fine = np.linspace(0, len(points) - 1, 500)
                path = np.stack([np.interp(fine, range(len(points)), points[:, i]) for i in (0, 1)], axis=1)
                assert not box.count_contains(path)
            end = axes.transData.transform(line.get_xydata())[-1]
            distance = np.maximum([box.x0 - end[0], box.y0 - end[1]], [end[0] - box.x1, end[1] - box.y1]).max()
            assert distance < 50 * 200 / 72


@pytest.mark.parametrize("between", [True, False])
def test_a_label_is_not_put_beyond_another_line(between):
    """The first line ends at 5. The room for its label is 36 points lower, where the second may lie between."""
    axes = Figure(figsize=(4, 4), dpi=100).add_axes((0, 0, 1, 1), xlim=(0, 10), ylim=(0, 10))
    points = [(0, 5, 5), *[(1, x, 4.2) for x in range(10 if between else 0)], (1, 9, 4.2)]
    medians = pd.DataFrame(points, columns=["log", "x", "y"]).assign(label="label", color="black")
    taken = np.ones((400, 400), dtype=bool)
    taken[135:165, 204:290] = False
    taken[150:186, 290:358] = False
    assert plot.label_ends(axes, medians, taken) == (not between)


def test_unfinished_runs_count_by_epoch(tmp_path, panels):
    """Of a run that was made again, those of the last launch count, or of the one that finished it."""
    source = write_runs(tmp_path / "runs.tsv", [3000], launch="x", options="epochs=2")
    rows = [("b", 0, 1, 0.1, "w"), ("b", 0, 1, 0.2, "x"), ("b", 0, 2, 0.3, "x"), ("b", 1, 1, 0.9, "x")]
    rows += [("b", 1, 1, 0.4, "y"), ("other", 2, 1, 0.9, "y"), ("b", 0, 2, 0.9, "z")]
    names = ["campaign", "run", "epoch", "validation_accuracy", "launch"]
    pd.DataFrame(rows, columns=names).assign(seconds=1).to_csv(tmp_path / "epochs.tsv", sep="\t", index=False)
    drawn = panels(source)
    assert drawn["Accuracy by epoch"].lines[0].get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(30)]]
    assert texts(drawn["Accuracy by epoch"]) == ["b, n = 1, 1 unfinished"]
    assert read_log(source).epochs["accuracy"].tolist() == [0.2, 0.3]


def test_without_a_finished_run_epochs_are_drawn_or_a_table_is_left_out(tmp_path, panels, capsys, error_line):
    shares = [write_table(tmp_path / f"share{i}", {"night": 0.5}) for i in range(3)]
    for share in shares[1:]:
        text = (tmp_path / share).read_text()
        (tmp_path / share).write_text(text.partition("\n")[0] + "\n")
    (tmp_path / "share2" / "epochs.tsv").unlink()
    drawn = panels(*shares)
    assert capsys.readouterr().err == f"Warning: {shares[2]} has no finished run: left out\n"
    assert legend(drawn) == ["night muon, n = 2", "night, n = 0, 2 unfinished"]
    assert [len(line.get_xdata()) for line in drawn["Accuracy by epoch"].lines] == [3, 3]
    together = panels(f"{tmp_path}/share*/runs.tsv:night")
    assert capsys.readouterr().err == f"Warning: {shares[2]}:night has no finished run: left out\n"
    assert labels(together) == ["night, n = 2, 2 unfinished"]
    alone = panels(f"{shares[1]}:*", "--panels", "accuracy", "final")
    assert texts(alone["Accuracy by epoch"]) == ["night, n = 0, 2 unfinished"]
    capsys.readouterr()
    for words in ([shares[2]], [f"{shares[2]}:*"], [f"{shares[0]}:typo"], [shares[1], "--panels", "final"]):
        assert "has no finished run: wait for one" in error_line(plot.main, words)
    for mine in (shares[1], shares[2], f"{shares[0]}:typo", f"{tmp_path}/share*/runs.tsv"):
        assert error_line(compare.main, [mine, "published"])


def test_the_goal_is_named_where_it_is_drawn(tmp_path, panels):
    drawn = panels(write_table(tmp_path / "t", {"b": 0.94}))
    for title, count in (("Accuracy by epoch", 1), ("Final accuracy of each run", 1)):
        assert [text.get_text() for text in drawn[title].texts].count("94%") == count
    low = panels(write_table(tmp_path / "low", {"b": 0.5}))
    assert all(text.get_text() != "94%" for axes in low.values() for text in axes.texts)
