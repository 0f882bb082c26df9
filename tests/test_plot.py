"""Pictures: the data, names that tell campaigns apart, and runs that are not finished."""

import errno

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from test_results import write_epochs, write_runs

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.lab import plot
from large_batch_cifar_10_fast.lab.results import read_log

CURVE = "published:apple_resnet9_8v100_pytorch"


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
        path = write_runs(folder / name, counts, name, 10 * number, **{"hyp.epochs": 3} | fields)
        tables.append(pd.read_csv(path, sep="\t"))
        curve = [end - 0.3, end - 0.1, end]
        rows += [(name, run, epoch, epoch, curve[epoch - 1] + run / 1000) for run in (0, 1) for epoch in (1, 2, 3)]
    write_epochs(folder, rows)
    pd.concat(tables).to_csv(folder / "runs.tsv", sep="\t", index=False)
    return str(folder / "runs.tsv")


def test_a_picture_has_the_data(tmp_path, panels):
    for kept, runs in (("1", [(0.2, 0.25), (0.1, 0.15), (0.3, 0.35)]), ("0.5", [(0.2, 0.3)])):
        folder = tmp_path / kept
        write_runs(folder / "runs.tsv", [10_000 * b for _, b in runs], pflop=kept, **{"hyp.epochs": 2})
        rows = [(i, e, a) for i, run in enumerate(runs) for e, a in enumerate(run, 1)]
        write_epochs(folder, [("b", i, e, e, a, 1 - a, (1 - a) / 2) for i, e, a in rows])
    curves, losses, final, work = panels(tmp_path / "1" / "runs.tsv", tmp_path / "0.5" / "runs.tsv").values()
    np.testing.assert_allclose([line.get_ydata() for line in curves.lines], [[20, 25], [20, 30]])
    np.testing.assert_allclose([line.get_ydata() for line in losses.lines[:2]], [[0.8, 0.75], [0.4, 0.375]])
    assert all(isinstance(shade, PolyCollection) for shade in curves.collections)
    np.testing.assert_allclose(curves.collections[0].get_paths()[0].get_extents().intervaly, [10, 35])
    sources = [f"{tmp_path}/1/runs.tsv", f"{tmp_path}/0.5/runs.tsv"]
    assert legend({"": curves}) == [f"{sources[0]}, n = 3", f"{sources[1]}, n = 1"]
    assert texts(final) == ["25.00 ± 10.00%", "30.00%"]
    assert all(isinstance(bar, LineCollection) for bar in work.collections)
    assert final.lines[0].get_xdata().tolist() == pytest.approx([15, 25, 35])
    assert [line.get_xdata()[0] for line in work.lines] == [1, 0.5]


def test_published_results_are_drawn_when_asked_for(panels):
    drawn = panels("published")
    assert {*texts(drawn["Final accuracy of each run"])} == {"94.19 ± 0.19%"}
    assert legend(drawn) == ["published, n = 50"]
    curves = panels(CURVE, "--published")["Accuracy by epoch"]
    assert curves.lines[1].get_xydata().tolist() == [[18, pytest.approx(94.2)]]
    assert curves.collections[-1].get_paths()[0].get_extents().intervaly.tolist() == pytest.approx([93.7, 94.5])


def test_a_failed_picture_is_one_error_and_the_one_before_stays(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Format 'xyz' is"):
        plot.main([CURVE, "--out", str(tmp_path / "p.xyz")])

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    out = tmp_path / "p.png"
    out.write_bytes(b"before")
    with pytest.raises(OSError, match="No space"):
        plot.main([CURVE, "--out", str(out)])
    assert (out.read_bytes(), [*tmp_path.iterdir()]) == (b"before", [out])


def test_of_an_asterisk_each_campaign_is_a_line_with_its_name_or_label(tmp_path, panels):
    source = write_table(tmp_path / "t", {"before": 0.6, "after": 0.7}) + ":*"
    drawn = panels(source)
    assert [line.get_ydata()[-1] for line in drawn["Accuracy by epoch"].lines] == pytest.approx([60.05, 70.05])
    assert legend(drawn) == ["before, n = 2", "after, n = 2"]
    assert read_log(source).runs["accuracy"].tolist() == pytest.approx([0.6, 0.601, 0.7, 0.701])
    assert legend(panels(source, "--labels", "ours", "theirs")) == ["ours, n = 2", "theirs, n = 2"]
    with pytest.raises(ConfigError, match="--labels has 1, but 2 campaigns are drawn: give one for each"):
        panels(source, "--labels", "ours")


def test_unfinished_runs_count_by_epoch(tmp_path, panels):
    """Of a run that was made again, those of the last launch count, or of the one that finished it."""
    source = write_runs(tmp_path / "runs.tsv", [3000], launch="x")
    rows = [("b", 0, 1, 0.1, "w"), ("b", 0, 1, 0.2, "x"), ("b", 0, 2, 0.3, "x"), ("b", 1, 1, 0.9, "x")]
    rows += [("b", 1, 1, 0.4, "y"), ("other", 2, 1, 0.9, "y"), ("b", 0, 2, 0.9, "z")]
    names = ["campaign", "run", "epoch", "validation_accuracy", "launch"]
    pd.DataFrame(rows, columns=names).assign(seconds=1).to_csv(tmp_path / "epochs.tsv", sep="\t", index=False)
    drawn = panels(source)
    assert drawn["Accuracy by epoch"].lines[0].get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(30)]]
    assert legend(drawn)[0].endswith(", n = 1, 1 unfinished")
    assert sorted(read_log(source).epochs["accuracy"]) == [0.2, 0.3, 0.4]


def test_without_a_finished_run_epochs_are_drawn_or_a_campaign_is_left_out(tmp_path, panels, capsys):
    shares = [write_table(tmp_path / f"share{i}", {"night": 0.5}) for i in range(2)]
    header = (tmp_path / shares[1]).read_text().partition("\n")[0]
    (tmp_path / shares[1]).write_text(f"{header}\n")
    drawn = panels(*shares)
    assert legend(drawn) == [f"{shares[0]}, n = 2", f"{shares[1]}, n = 0, 2 unfinished"]
    assert [len(line.get_xdata()) for line in drawn["Accuracy by epoch"].lines[:2]] == [3, 3]
    panels(*shares, "--panels", "final")
    assert capsys.readouterr().err == f"Warning: {shares[1]} has no finished run: left out\n"
    with pytest.raises(ConfigError, match="nothing to draw: wait for a finished run"):
        plot.main([shares[1], "--panels", "final"])
    (tmp_path / "share1" / "epochs.tsv").unlink()
    with pytest.raises(ConfigError, match="nothing to draw: wait for a finished run"):
        plot.main([shares[1]])
