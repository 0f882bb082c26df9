"""The picture: every format, every label once at its line, and never half-written."""

import errno
import os

import numpy as np
import pytest
from conftest import REPO
from matplotlib.figure import Figure

from large_batch_cifar_10_fast.plot import ENTRIES, main, separate_labels
from large_batch_cifar_10_fast.read_logs import PUBLISHED

CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"
CAMPAIGN = PUBLISHED / "apple_8xv100_50_runs.tsv"
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def drawn(tmp_path, *files: object) -> str:
    main([*map(str, files), "--out", str(tmp_path / "p.svg")])
    return (tmp_path / "p.svg").read_text().replace("> ", ">")


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_picture_replaces_what_a_link_leads_to(tmp_path, suffix):
    picture, link = tmp_path / f"picture{suffix}", tmp_path / f"link{suffix}"
    link.symlink_to(picture)
    main([str(CURVE), "--out", str(link)])
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
    assert message in error_line(main, [str(CURVE), "--out", str(tmp_path / out)])


def test_on_a_full_disk_the_picture_before_stays(tmp_path, error_line, monkeypatch):
    (out := tmp_path / "p.png").write_bytes(b"before")

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    line = error_line(main, [str(CURVE), "--out", str(out)])
    assert f"{out} cannot be written ([Errno 28] No space left on device)" in line
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("p.png", b"before")]
