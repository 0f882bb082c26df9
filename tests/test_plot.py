"""Pictures: the data, names that tell campaigns apart, and runs that are not finished."""

import numpy as np
import pytest
from conftest import REPO
from matplotlib.axes import Axes
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
    assert legend(panels(*sources, "--labels", "ours,theirs")) == ["ours, n = 3", "theirs, n = 1"]
    with pytest.raises(ConfigError, match="--labels has 1 names for 2 campaigns"):
        panels(*sources, "--labels", "ours")


def test_a_campaign_whose_work_is_not_known_is_drawn(tmp_path):
    plot.main(["published", "--out", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").exists()


def test_the_line_at_94_percent_is_for_test_images(panels):
    """A single value at the last epoch is known of the published runs."""
    drawn = panels("published", CURVE)
    assert legend(drawn) == ["published, n = 50", "apple_resnet9_8v100_pytorch, n = 1"]
    epochs = drawn["Accuracy by epoch"]
    assert epochs.lines[0].get_xydata().tolist() == [[18, pytest.approx(94.2)]]
    assert epochs.lines[-1].get_ydata() == [94, 94]
    assert epochs.get_ylabel() == "accuracy on test images, %"
    held_out = panels(f"{REPO}/results/runs.tsv:muon-h200-held-out")["Final accuracy against work"]
    assert held_out.get_ylabel() == "accuracy on held-out images, %"
    assert len(held_out.lines) == 1
