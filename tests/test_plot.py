"""Pictures: the data, names that tell campaigns apart, and runs that are not finished."""

import errno
import itertools
import logging
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from PIL import Image
from test_results import write_epochs, write_runs

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab import compare, evaluate, figures, plot
from large_batch_cifar_10_fast.lab.results import PUBLISHED, read_log

CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"


@pytest.fixture
def panels(monkeypatch):
    """Return a function that draws a picture: it returns the panels by their titles."""
    drawn = []
    monkeypatch.setattr(plot, "write_picture", lambda figure, *_: drawn.append(figure))

    def draw(*arguments: object) -> dict[str, Axes]:
        plot.main([*map(str, arguments)])
        return {axes.get_title(loc="left"): axes for axes in drawn[-1].axes}

    return draw


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(drawn: dict[str, Axes]) -> list[str]:
    (found,) = next(iter(drawn.values())).figure.legends
    return [text.get_text() for text in found.get_texts()]


def write_table(folder, campaigns, **fields) -> str:
    """Write a table of campaigns of two runs with three epochs, which end at these accuracies; return its path."""
    tables = []
    rows = []
    for number, (name, end) in enumerate(campaigns.items()):
        counts = [10_000 * end, 10_000 * end + 10]
        path = write_runs(folder / name, counts, name, 10 * number, **{"options": "epochs=3"} | fields)
        tables.append(pd.read_csv(path, sep="\t"))
        curve = [end - 0.3, end - 0.1, end]
        rows += [(name, run, epoch, epoch, curve[epoch - 1] + run / 1000) for run in (0, 1) for epoch in (1, 2, 3)]
    write_epochs(folder, rows)
    pd.concat(tables).to_csv(folder / "runs.tsv", sep="\t", index=False)
    return str(folder / "runs.tsv")


def test_a_picture_has_the_data(tmp_path, panels):
    for kept, runs in (("1", [(0.2, 0.25), (0.1, 0.15), (0.3, 0.35)]), ("0.5", [(0.2, 0.3)])):
        folder = tmp_path / kept
        write_runs(folder / "runs.tsv", [10_000 * b for _, b in runs], options="epochs=2", pflop=kept)
        rows = [(i, e, a) for i, run in enumerate(runs) for e, a in enumerate(run, 1)]
        write_epochs(folder, [("b", i, e, e, a, 1 - a, (1 - a) / 2) for i, e, a in rows])
    curves, losses, final, work = panels(tmp_path / "1" / "runs.tsv", tmp_path / "0.5" / "runs.tsv").values()
    np.testing.assert_allclose([line.get_ydata() for line in curves.lines], [[20, 25], [20, 30]])
    np.testing.assert_allclose([line.get_ydata() for line in losses.lines[:2]], [[0.8, 0.75], [0.4, 0.375]])
    assert all(isinstance(shade, PolyCollection) for shade in curves.collections)
    np.testing.assert_allclose(curves.collections[0].get_paths()[0].get_extents().intervaly, [10, 35])
    assert legend({"": curves}) == ["1, n = 3", "0.5, n = 1"]
    assert texts(final) == ["25.00 ± 10.00%", "30.00%"]
    assert all(isinstance(bar, LineCollection) for bar in work.collections)
    assert final.lines[0].get_xdata().tolist() == pytest.approx([15, 25, 35])
    assert [line.get_xdata()[0] for line in work.lines] == [1, 0.5]


def test_published_results_are_drawn_when_asked_for(panels):
    drawn = panels("published")
    assert {*texts(drawn["Final accuracy of each run"])} == {"94%", "94.19 ± 0.19%"}
    assert legend(drawn) == ["published, n = 50"]
    curves = panels(CURVE, "--published")["Accuracy by epoch"]
    assert curves.lines[1].get_xydata().tolist() == [[18, pytest.approx(94.2)]]
    assert curves.collections[-1].get_paths()[0].get_extents().intervaly.tolist() == pytest.approx([93.7, 94.5])


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


def test_of_an_asterisk_each_campaign_is_a_line_with_its_name_or_label(tmp_path, panels):
    source = write_table(tmp_path / "t", {"before": 0.6, "after": 0.7}) + ":*"
    drawn = panels(source)
    assert [line.get_ydata()[-1] for line in drawn["Accuracy by epoch"].lines] == pytest.approx([60.05, 70.05])
    assert legend(drawn) == ["before, n = 2", "after, n = 2"]
    assert read_log(source).runs["accuracy"].tolist() == pytest.approx([0.6, 0.601, 0.7, 0.701])
    first, second = legend(panels(source, "--labels", "ours", "x" * 200))
    assert first == "ours, n = 2"
    assert re.fullmatch("x{40,50}…x{40,50}, n = 2", second)
    with pytest.raises(ConfigError, match="--labels has 1, but 2 campaigns are drawn: give one for each"):
        panels(source, "--labels", "ours")


def test_ten_campaigns_have_a_legend_that_covers_no_panel(tmp_path, panels):
    names = {f"learning_rate_of_biases=0.0{i}+schedule=16-24": 0.4 + i / 100 for i in range(10)}
    drawn = panels(write_table(tmp_path / "t", names) + ":*", "--panels", "accuracy", "final")
    figure = drawn["Accuracy by epoch"].figure
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len({*legend(drawn)}) == 10
    assert 0 < box.x0 < box.x1 < figure.bbox.x1
    assert box.y1 < figure.bbox.y1
    for axes in drawn.values():
        assert axes.get_tightbbox().y1 < box.y0
        assert axes.get_window_extent().height > 2 * 200, "a panel is not squeezed"
    rows = [text.get_window_extent() for text in drawn["Final accuracy of each run"].texts]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(rows))


def test_forty_campaigns_are_drawn_and_more_are_refused(panels):
    assert len(legend(panels(*[CURVE] * 40))) == 40
    with pytest.raises(ConfigError, match=r"^41 campaigns are too many for a picture: [^\n]*$"):
        panels(*[CURVE] * 41)


def test_unfinished_runs_count_by_epoch(tmp_path, panels):
    """Of a run that was made again, those of the last launch count, or of the one that finished it."""
    source = write_runs(tmp_path / "runs.tsv", [3000], launch="x", options="epochs=2")
    rows = [("b", 0, 1, 0.1, "w"), ("b", 0, 1, 0.2, "x"), ("b", 0, 2, 0.3, "x"), ("b", 1, 1, 0.9, "x")]
    rows += [("b", 1, 1, 0.4, "y"), ("other", 2, 1, 0.9, "y"), ("b", 0, 2, 0.9, "z")]
    names = ["campaign", "run", "epoch", "validation_accuracy", "launch"]
    pd.DataFrame(rows, columns=names).assign(seconds=1).to_csv(tmp_path / "epochs.tsv", sep="\t", index=False)
    drawn = panels(source)
    assert drawn["Accuracy by epoch"].lines[0].get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(30)]]
    assert legend(drawn)[0].endswith(", n = 1, 1 unfinished")
    assert read_log(source).epochs["accuracy"].tolist() == [0.2, 0.3]


def test_without_a_finished_run_epochs_are_drawn_or_a_table_is_left_out(tmp_path, panels, capsys, error_line):
    shares = [write_table(tmp_path / f"share{i}", {"night": 0.5}) for i in range(3)]
    for share in shares[1:]:
        header = (tmp_path / share).read_text().partition("\n")[0]
        (tmp_path / share).write_text(f"{header}\n")
    (tmp_path / "share2" / "epochs.tsv").unlink()
    drawn = panels(*shares)
    assert capsys.readouterr().err == f"Warning: {shares[2]} has no finished run: left out\n"
    assert legend(drawn) == ["share0, n = 2", "share1, n = 0, 2 unfinished"]
    assert [len(line.get_xdata()) for line in drawn["Accuracy by epoch"].lines] == [3, 3]
    capsys.readouterr()
    for words in ([shares[2]], [f"{shares[0]}:typo"], [shares[1], "--panels", "final"]):
        assert "has no finished run: wait for one" in error_line(plot.main, words)
    assert error_line(compare.main, [shares[1], "published"])


def test_an_automatic_name_gives_way_to_the_recipe_and_what_differs(tmp_path, panels):
    names = ["20261127T062521-d0b8dff1", "20261127T062522-d0b8dff2"]
    paths = [write_table(tmp_path / name, {name: 0.5}, options=f"epochs={i}") for i, name in enumerate(names, 3)]
    assert legend(panels(*(f"{path}:*" for path in paths))) == ["muon epochs=3, n = 2", "muon epochs=4, n = 2"]
    header = (tmp_path / names[1] / "runs.tsv").read_text().partition("\n")[0]
    (tmp_path / names[1] / "runs.tsv").write_text(f"{header}\n")
    assert legend(panels(*(f"{path}:*" for path in paths)))[1].endswith(", n = 0, 2 unfinished")


# ---- Fonts


def make_font(path: Path, family: str, characters: str) -> str:
    """Write a font in which each character is a filled triangle."""
    names = [f"c{ord(character)}" for character in characters]
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    pen.lineTo((900, 0))
    pen.lineTo((500, 800))
    pen.closePath()
    triangle = pen.glyph()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap(dict(zip(map(ord, characters), names, strict=True)))
    builder.setupGlyf(dict.fromkeys([".notdef", *names], triangle))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names], (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(usWeightClass=500)  # Matplotlib warns that it is not 400
    builder.setupPost()
    builder.save(path)
    return str(path)


def names_drawn(names: list[str], path: Path) -> np.ndarray:
    """Return the pixels of a picture that has these names as its tick labels only."""
    with warnings.catch_warnings(action="error"):
        figures.write_picture(evaluate.draw_confusions(torch.eye(2, dtype=torch.int64), names), path, "--out")
    return np.asarray(Image.open(path))


def test_characters_that_no_font_has_are_named_in_one_line(tmp_path, monkeypatch, capsys):
    one = make_font(tmp_path / "one.ttf", "One", "狗")
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [one])
    with warnings.catch_warnings(action="error"):
        plot.main([str(CURVE), "--labels", "狗和猫", "--panels", "accuracy", "--out", str(tmp_path / "x.svg")])
    lacking = f"--out {tmp_path}/x.svg: no font of this machine has 和, 狗, 猫"
    assert capsys.readouterr().err == f"Warning: {lacking}: install one that has all, for example Noto Sans CJK\n"


def test_characters_that_the_default_font_lacks_are_drawn_in_another(tmp_path, monkeypatch, capsys, caplog):
    logging.getLogger("matplotlib.font_manager").setLevel(logging.NOTSET)
    (tmp_path / "damaged.ttf").write_text("no font")
    fonts = [str(tmp_path / "damaged.ttf")]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: fonts)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    boxes = names_drawn(["cat 猫", "dog 狗"], tmp_path / "x.png")
    capsys.readouterr()
    fonts.append(make_font(tmp_path / "both.ttf", "Both", "狗猫"))
    triangles = names_drawn(["cat 猫", "dog 狗"], tmp_path / "x.png")
    assert (triangles.shape != boxes.shape) or (triangles != boxes).any()
    assert (capsys.readouterr().err, caplog.text) == ("", "")


def test_no_fonts_are_looked_for_if_none_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(font_manager, "findSystemFonts", None)
    names_drawn(["große Katze", "hund…"], tmp_path / "x.png")
