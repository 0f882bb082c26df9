"""Pictures: the data, names that tell campaigns apart, and runs that are not finished."""

import errno

import numpy as np
import pandas as pd
import pytest
from conftest import REPO
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from test_results import write_epochs, write_runs

from large_batch_cifar_10_fast import ConfigError
from large_batch_cifar_10_fast.commands import plot

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


def legend(drawn: dict[str, Axes]) -> list[str]:
    (found,) = next(iter(drawn.values())).figure.legends
    return [text.get_text() for text in found.get_texts()]


def write_table(folder, campaigns) -> str:
    """Write a table of campaigns of two runs with three epochs, which end at these accuracies; return its path."""
    tables = []
    rows = []
    for number, (name, end) in enumerate(campaigns.items()):
        counts = [10_000 * end, 10_000 * end + 10]
        path = write_runs(folder / name, counts, name, 10 * number)
        tables.append(pd.read_csv(path, sep="\t"))
        curve = [end - 0.3, end - 0.1, end]
        rows += [(name, run, epoch, epoch, curve[epoch - 1] + run / 1000) for run in (0, 1) for epoch in (1, 2, 3)]
    write_epochs(folder, rows)
    pd.concat(tables).to_csv(folder / "runs.tsv", sep="\t", index=False)
    return str(folder / "runs.tsv")


def test_a_picture_has_the_data(tmp_path, panels):
    for kept, runs in (("1", [(0.2, 0.25), (0.1, 0.15), (0.3, 0.35)]), ("0.5", [(0.2, 0.3)])):
        write_runs(tmp_path / kept / "runs.tsv", [10_000 * b for _, b in runs], pflop=kept)
        rows = [("b", i, e, e, a) for i, run in enumerate(runs) for e, a in enumerate(run, 1)]
        write_epochs(tmp_path / kept, rows)
    sources = [f"{tmp_path}/1/runs.tsv", f"{tmp_path}/0.5/runs.tsv"]
    drawn = panels(*sources)
    curves, work = drawn.values()
    np.testing.assert_allclose([line.get_ydata() for line in curves.lines[:2]], [[20, 25], [20, 30]])
    np.testing.assert_allclose(curves.collections[0].get_paths()[0].get_extents().intervaly, [10, 35])
    assert legend(drawn) == [f"1: {sources[0]}, n = 3", f"2: {sources[1]}, n = 1"]
    np.testing.assert_allclose([line.get_xydata()[0] for line in work.lines[:2]], [[1, 25], [0.5, 30]])
    assert work.get_xscale() == "log"


def test_the_line_at_94_percent_is_for_test_images(panels):
    """A single value at the last epoch is known of the published runs."""
    drawn = panels("published", CURVE)
    assert legend(drawn) == ["published, n = 50", "apple_resnet9_8v100_pytorch, n = 1"]
    epochs = drawn["Accuracy by epoch"]
    assert epochs.lines[0].get_xydata().tolist() == [[18, pytest.approx(94.2)]]
    assert epochs.lines[-1].get_ydata() == [94, 94]
    assert epochs.get_ylabel() == "accuracy on test images, %"
    held_out = panels(f"{REPO}/results/runs.tsv:muon-h200-held-out")["Final accuracy against work"]
    assert held_out.get_ylabel() == "accuracy on images that were held out, %"
    assert len(held_out.lines) == 1


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
    assert [line.get_ydata()[-1] for line in drawn["Accuracy by epoch"].lines] == pytest.approx([60.05, 70.05, 94])
    assert legend(drawn) == ["before, n = 2", "after, n = 2"]
    assert legend(panels(source, "--labels", "ours,theirs")) == ["ours, n = 2", "theirs, n = 2"]
    with pytest.raises(ConfigError, match="--labels has 1, but 2 campaigns are drawn: give one for each"):
        panels(source, "--labels", "ours")
