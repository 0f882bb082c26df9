"""The picture: every format and suffix, and labels that do not cover each other."""

import errno
import os

import numpy as np
import pytest
from conftest import REPO
from matplotlib.figure import Figure
from test_read_logs import two_campaigns, written

from large_batch_cifar_10_fast.plot import ENTRIES, main, spread
from large_batch_cifar_10_fast.read_logs import PUBLISHED

CURVE = PUBLISHED / "dawnbench" / "apple_resnet9_8v100_pytorch.tsv"
CAMPAIGN = PUBLISHED / "apple_8xv100_50_runs.tsv"
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_pictures_of_every_suffix_are_written(tmp_path, suffix):
    out = tmp_path / f"picture{suffix}"
    main([str(CURVE), str(CAMPAIGN), "--out", str(out)])
    assert out.read_bytes().startswith(MAGIC[suffix])


def test_every_line_is_named_at_the_line(tmp_path):
    slow = tmp_path / "slow.tsv"
    slow.write_text("epoch\thours\ttop1Accuracy\n1\t1\t60\n2\t2\t94.3\n")
    main([str(slow), "--out", str(tmp_path / "p.svg")])
    text = (tmp_path / "p.svg").read_text()
    for label in (*ENTRIES.values(), "mine", "94%"):
        assert f">{label}<" in text.replace("> ", ">"), label


def test_labels_are_spread_in_order_with_a_gap():
    places = np.array([1.0, 1.02, 3.0, 0.0, 1.01])
    moved = spread(places, 0.2, -0.5, 3.5)
    assert np.argsort(moved).tolist() == np.argsort(places).tolist()
    assert np.diff(np.sort(moved)).min() > 0.2 - 1e-6
    assert moved[3] == 0.0
    assert moved[2] == 3.0


def test_a_campaigns_runs_are_drawn_beside_the_reference(tmp_path):
    main([str(CAMPAIGN), "--out", str(tmp_path / "p.svg")])
    text = (tmp_path / "p.svg").read_text().replace("> ", ">")
    for label in ("mine", "published", "final test accuracy, %", "seconds", "share of runs"):
        assert f">{label}<" in text, label


def test_the_name_of_a_file_is_no_formula(tmp_path):
    path = tmp_path / "a$\\b$.tsv"
    path.write_text(CAMPAIGN.read_text())
    main([str(path), str(CURVE), "--out", str(tmp_path / "p.svg")])
    text = (tmp_path / "p.svg").read_text().replace("> ", ">")
    assert text.count(">a$\\b$.tsv<") == 3, "at its line, and over each of two distributions"


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    err = capsys.readouterr().err
    assert (end.value.code, err.count("\n")) == (2, 1)
    return err


@pytest.mark.parametrize(("out", "message"), [("p.jpg", "must end in"), ("no/p.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, capsys, out, message):
    assert message in refused(capsys, CURVE, "--out", tmp_path / out)


def test_an_unreadable_log_writes_no_picture(tmp_path, capsys):
    assert "absent.tsv: cannot be read" in refused(capsys, "absent.tsv", "--out", tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_a_folder_or_a_device_is_no_picture(tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "device.png").symlink_to("/dev/full")
    for name in ("folder.png", "device.png"):
        assert f"{name} exists and is not a file" in refused(capsys, CURVE, "--out", tmp_path / name)
    assert (tmp_path / "device.png").is_symlink()


def test_on_a_full_disk_the_picture_before_stays(tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.png"
    out.write_bytes(b"before")

    def fill_the_disk(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    assert f"{out} cannot be written (No space left on device)" in refused(capsys, CURVE, "--out", out)
    assert out.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.png"]


def test_a_picture_replaces_what_a_link_leads_to(tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "p.png")
    main([str(CURVE), "--out", str(tmp_path / "link.png")])
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "p.png").read_bytes().startswith(MAGIC[".png"])


def test_a_campaign_on_other_images_says_so_beside_curves_of_cifar10(tmp_path):
    main([str(REPO / "logs" / "demo" / "runs.tsv"), "--out", str(tmp_path / "p.svg")])
    assert "mine, on synthetic<" in (tmp_path / "p.svg").read_text()


def test_shares_are_drawn_as_one_campaign(tmp_path):
    for i in range(2):
        rows = [row | {"share": f"{i}/2", "campaign": f"c{i}"} for row in two_campaigns()[1:][i::2]]
        written(tmp_path / f"share{i}.tsv", rows)
    main([f"{tmp_path}/share0.tsv,{tmp_path}/share1.tsv", "--out", str(tmp_path / "p.svg")])
    assert (tmp_path / "p.svg").read_text().replace("> ", ">").count(">mine<") == 3, "the curves, two distributions"
