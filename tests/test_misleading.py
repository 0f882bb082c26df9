"""What must not mislead: orders, texts, launches beside each other, inputs of a model, storage that lacks something."""

import errno
import os
import re
import tempfile
import zipfile
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TINY, run_here, write_npz
from test_programs import copy_with

from large_batch_cifar_10_fast import PACKAGE, ConfigError, api, apple2019, files
from large_batch_cifar_10_fast.images import load as images
from large_batch_cifar_10_fast.images.load import Images, load_images
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import launch, source
from large_batch_cifar_10_fast.lab.options import as_pairs, as_words
from large_batch_cifar_10_fast.lab.program import load_program
from large_batch_cifar_10_fast.lab.results import read_log
from large_batch_cifar_10_fast.lab.table import differences, new_name

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 20, "--epochs", 2, "--pixels", "24,32", "--kept", "1,0.5"]

# The order of one's own images


def test_images_of_ones_own_are_dealt_out_at_random_and_the_log_says_so(tiny_npz, tmp_path, monkeypatch, capsys):
    """Sorted by class, or in turn, each worker and the whitening would see some classes only."""
    given = {}
    monkeypatch.setattr(apple2019, "train", lambda hyp, images, machine: given.update(images=images) or 1 / 0)
    parts = draw_shapes(8000, 100)
    parts[1][:] = np.arange(8000) % 10
    with pytest.raises(ZeroDivisionError):
        run_here("--data", write_npz(tmp_path / "in_turn.npz", *parts), "--out", tmp_path)
    assert "\n# training images in a random order that is always the same" in capsys.readouterr().out
    dealt = given["images"]
    order = np.random.default_rng(0).permutation(8000)
    assert np.array_equal(dealt.train_images, parts[0][order])
    assert np.array_equal(dealt.test_images, parts[2])
    for worker in range(8):
        assert np.bincount(dealt.train_labels[worker::8], minlength=10).min() > 60
    with pytest.raises(ZeroDivisionError):
        run_here("--data", "synthetic", "--out", tmp_path)
    assert "random order" not in capsys.readouterr().out
    assert np.array_equal(given["images"].train_images, load_images("synthetic").train_images)


def test_the_originals_keep_their_order_also_in_a_file(tmp_path, monkeypatch):
    parts = draw_shapes(100, 20)
    assert Images("CIFAR-10", *parts).is_original
    assert Images("CIFAR-100", *parts).is_original
    path = write_npz(tmp_path / "mine.npz", *parts)
    assert not load_images(str(path)).is_original
    monkeypatch.setattr(images, "CIFAR_10_TRAINING", load_images(str(path)).digests[0])
    assert load_images(str(path)).is_original
    assert load_images(str(write_npz(path, parts[0], parts[1], parts[2][:7], parts[3][:7]))).is_original


def test_the_digest_of_cifar_10_is_right():
    path = os.environ.get("CIFAR10_ORIGINALS_NPZ")
    if not path:
        pytest.skip("CIFAR10_ORIGINALS_NPZ names no file with the originals")
    assert load_images(path).digests[0] == images.CIFAR_10_TRAINING


# Texts


@dataclass(frozen=True)
class Hyp:
    name: str = "a b"
    rates: tuple[float, ...] = (1.0, 1.0, 1.0)


def test_options_are_compared_whole():
    one = {"options": as_pairs(Hyp())}
    for other in (Hyp(name="a c"), Hyp(name="a  b"), Hyp(name="a%20b"), Hyp(rates=(1.0, 0.001, 1.0))):
        assert differences(one, {"options": as_pairs(other)}, ["options"])
    found = differences(one, {"options": as_pairs(Hyp(name="a c"))}, ["options"])
    assert found == "name (a%20b, not a%20c)"
    assert differences({"options": "x=(1.0, 1.0)"}, {"options": "x=(1.0, 0.1)"}, ["options"]), "of earlier versions"


def test_none_is_no_value(tiny_npz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = apple2019.DEMO | {"width": 4, "epochs": 1, "ema_ep": 0.5, "data": tiny_npz, "no_warmup": True}
    rows = api.train(**small, precision="fp32", save=None, campaign=None, resume=None, out=None)
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{8}", rows["campaign"][0])
    assert not list(tmp_path.glob("None*"))
    assert as_words({"pixels": [24, 32], "resume": False, "demo": True, "campaign": "False", "save": None}) == [
        "--pixels=24,32",
        "--demo",
        "--campaign=False",
    ]


# What decides a result


def test_every_module_of_a_program_decides_and_is_stored(tmp_path, monkeypatch):
    """Also by relative names, of packages, with equal file names, and ours where no commit holds it."""
    mine = copy_with("muon", [("import torch\n", "import pack.deep.rates\nimport torch\n")], tmp_path / "mine.py")
    modules = {
        "pack/__init__.py": "x = 1\n",
        "pack/deep/__init__.py": "from . import beside\nfrom ..above import y\n",
        "pack/deep/rates.py": "import util\n",
        "pack/deep/beside.py": "z = 3\n",
        "pack/deep/util.py": "unused = 0\n",
        "pack/above/__init__.py": "y = 2\n",
        "util.py": "w = 4\n",
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = {"mine.py", *modules} - {"pack/deep/util.py"}
    program = load_program(str(mine))
    assert {name for name in source.texts_of(program) if "core" not in name} == names
    before = source.digest(program)
    for name in names:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "# changed\n")
        assert source.digest(load_program(str(mine))) != before
        (tmp_path / name).write_text(text)
    program = load_program(str(mine))
    assert source.digest(program) == before
    monkeypatch.setattr(source, "commit", lambda: "unknown")
    source.store(program, tmp_path, "abc")
    stored = zipfile.ZipFile(tmp_path / "source-abc.zip")
    assert set(stored.namelist()) >= names - {"mine.py"}
    assert stored.read("large_batch_cifar_10_fast/core/optim.py") == (PACKAGE / "core" / "optim.py").read_bytes()
    assert (tmp_path / "source-abc.py").read_text() == mine.read_text()


# Launches beside each other


def test_launches_in_containers_have_names_of_their_own(monkeypatch, tmp_path):
    """There each is process 1, and they may start in the same second."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert len({new_name() for _ in range(100)}) == 100
    with files.write_atomically(tmp_path / "a") as one, files.write_atomically(tmp_path / "a") as two:
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert (tmp_path / "a").read_text() == "one"


# Inputs of a model


@pytest.fixture(scope="module")
def weights(tiny_npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    run_here(*MUON, "--data", tiny_npz, "--out", folder, "--save", folder / "w.pt", "--no_compile")
    return folder / "w.pt"


def test_a_model_takes_bytes_of_32_x_32_pixels_as_tensors_arrays_or_one_image(weights):
    model = api.load(weights)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    expected = model.predict(torch.from_numpy(pixels))
    assert torch.equal(model.predict(pixels), expected)
    assert torch.equal(model.predict(pixels[:, ::-1, ::-1][:, ::-1, ::-1]), expected)
    assert torch.allclose(model.predict(pixels[1]), expected[1:2], atol=1e-6)
    for wrong, kind in (
        (pixels / 255, r"float64 \[3, 32, 32, 3\]"),
        (torch.from_numpy(pixels).float(), r"float32 \[3, 32, 32, 3\]"),
        (np.zeros((2, 64, 64, 3), np.uint8), r"uint8 \[2, 64, 64, 3\]"),
        (np.zeros((2, 3, 32, 32), np.uint8), r"uint8 \[2, 3, 32, 32\]"),
        (np.zeros((32, 32), np.uint8), r"uint8 \[32, 32\]"),
        (np.zeros((32, 32, 4), np.uint8), r"uint8 \[1, 32, 32, 4\]"),
    ):
        for take in (model.predict, model.logits, model):
            with pytest.raises(
                ConfigError, match=rf"^images are {kind}: give bytes \(0 to 255\), uint8 \[n, 32, 32, 3\]"
            ):
                take(wrong)
    with pytest.raises(ConfigError, match="no images"):
        model.predict(pixels[:0])
    with pytest.raises(ConfigError, match="no images"):
        model.predict("one.png")


def test_weights_of_a_run_that_diverged_are_loaded_with_a_warning(weights, tmp_path, capsys):
    content = torch.load(weights, weights_only=True)
    content["weights"]["linear.weight"][0, 0] = torch.nan
    torch.save(content, tmp_path / "w.pt")
    api.load(tmp_path / "w.pt")
    assert capsys.readouterr().err == (
        f"Warning: {tmp_path}/w.pt has numbers that are not finite, since its run diverged: it predicts nothing\n"
    )


# Labels, channels, hints


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (
            lambda parts: (parts[1].__iadd__(1), parts[3].__iadd__(1)),
            "no training image has label 0, and 11 classes are",
        ),
        (
            lambda parts: (parts[1].__imul__(7), parts[3].__imul__(7)),
            "54 of the labels 0 to 63 have no training image, 1 am",
        ),
        (lambda parts: parts[1].__setitem__(0, 255), "245 of the labels 0 to 255 have no training image, 10 .* by 255"),
        (lambda parts: parts[0].__setitem__((..., 2), 0), "blue is the same in all pixels: was a channel lost"),
        (lambda parts: parts[0].__setitem__((..., [0, 1]), 9), "red and green is the same"),
        (
            lambda parts: parts[3].__setitem__(slice(None), 4),
            "no test image has label 0: are the test images",
        ),
        (lambda parts: None, ""),
    ],
)
def test_labels_and_channels_that_cannot_be_right_have_one_warning_each(change, doubt):
    parts = draw_shapes(400, 300)
    parts[1][:] = np.arange(400) % 10
    parts[3][:] = np.arange(300) % 10
    change(parts)
    found = Images("mine.npz", *parts).doubts()
    assert len(found) == bool(doubt)
    assert not doubt or re.match(doubt, found[0])


@pytest.mark.parametrize(("precision", "hint"), [("fp32", False), ("bf16", True)])
def test_a_hint_on_precision_is_not_for_those_who_have_it(precision, hint, tiny_npz, tmp_path, capsys):
    run_here("--demo", *TINY, "--lr_scaler", 1e5, "--data", tiny_npz, "--out", tmp_path, "--precision", precision)
    errors = capsys.readouterr().err
    assert "its loss is not finite; lower the learning rate" in errors
    assert ("or try --precision fp32" in errors) == hint


# Storage


def test_a_file_system_without_fsync_is_warned_of_once_and_a_full_one_is_an_error(tmp_path, monkeypatch, capsys):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    for text in ("one", "two"):
        with files.write_atomically(tmp_path / "a") as unfinished:
            unfinished.write_text(text)
    assert (tmp_path / "a").read_text() == "two"
    assert re.fullmatch(r"Warning: .*a is written, but when .* \(Invalid argument\)\n", capsys.readouterr().err)
    number = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"), files.write_atomically(tmp_path / "a") as unfinished:
        unfinished.touch()


def test_a_launch_without_a_temporary_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"^no temporary folder can be made \(.*\): name a folder .* in TMPDIR$"):
        launch.launch(["--demo", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="no temporary folder can be made"):
        run_here("--demo", "--out", tmp_path)


def test_a_table_that_pandas_has_saved_is_continued(tiny_npz, tmp_path):
    small = ["--demo", *TINY, "--data", tiny_npz, "--out", tmp_path, "--campaign", "night", "--runs"]
    run_here(*small, 1)
    path = tmp_path / "runs.tsv"
    rows = pd.read_csv(path, sep="\t", keep_default_na=False).astype({"run": float, "seed": float})
    rows.to_csv(path, sep="\t", index=False)
    assert "\tnight\t0.0\t0.0\t"[1:] in path.read_text()
    run_here(*small, 2)
    assert len(read_log(str(path)).runs) == 2
    path.write_text(path.read_text().replace("night\t0.0\t", "night\t0.5\t"))
    with pytest.raises(ConfigError, match=r"line 2: '0.5' is no run or seed; correct it"):
        run_here(*small, 2)
