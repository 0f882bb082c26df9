"""From a folder of photos to a prediction: photos become a file, which is trained on, evaluated and exported."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import python, run_here
from PIL import Image

from large_batch_cifar_10_fast import ConfigError, api
from large_batch_cifar_10_fast.commands import evaluate, export, photos, predict
from large_batch_cifar_10_fast.lab.program import load_program, read_command, sets_of

pytestmark = pytest.mark.slow

CLASSES = ["dunkel", "weiß"]
KINDS = ("CMYK.jpeg", "turned.JPG", "P.png", "RGBA.png", "L.png", "16 bits.png", "RGB.webp")


def save_photo(photo: Image.Image, path: Path) -> Path:
    mode = path.stem.partition(" ")[2]
    if mode == "turned":
        exif = Image.Exif()
        exif[0x112] = 6  # to be turned clockwise
        photo.rotate(90, expand=True).save(path, exif=exif)
    elif mode == "16 bits":
        Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 256).save(path)
    else:
        photo.convert(mode).save(path)
    return path


def make_photos(folder: Path, count: int) -> Path:
    """Save dark and bright photos in all formats: `count` of each class."""
    random = np.random.default_rng(0)
    for name, darkest in zip(CLASSES, (0, 150), strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(darkest, darkest + 100, (40, 60, 3), np.uint8)
            save_photo(Image.fromarray(pixels), folder / name / f"{number} {KINDS[number % len(KINDS)]}")
    return folder


def call(command, *words: object) -> int | None:
    return command.main([*map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), 90)


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("file") / "photos.npz"
    call(photos, folder, file)
    return file


@pytest.fixture(scope="module")
def weights(file, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    run_here("--recipe", "muon", "--data", file, "--width", 8, "--out", out, "--save", out / "weights.pt")
    return out / "weights.pt"


# ---- Photos to a file


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_each_format_is_turned_cropped_and_scaled(kind, tmp_path):
    """Although a large JPEG is decoded at a fraction of its size."""
    smooth = np.random.default_rng(0).integers(0, 256, (4, 8, 3), np.uint8)
    photo = Image.fromarray(smooth).resize((1600, 800), Image.Resampling.BICUBIC)
    expected = photo.crop((400, 0, 1200, 800)).resize((32, 32), Image.Resampling.BILINEAR)
    if kind in ("L.png", "16 bits.png"):
        expected = expected.convert("L").convert("RGB")
    found = api.read_picture(save_photo(photo, tmp_path / f"photo {kind}"))
    assert np.abs(found.astype(int) - np.asarray(expected)).mean() < 1


def test_transparent_parts_become_white(tmp_path):
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (api.read_picture(tmp_path / "a.png") == 255).all()


def test_a_folder_becomes_the_arrays_of_the_first_release_whatever_else_is_in_it(tmp_path, capsys):
    """The digest is that of commit e0fec08 without such files. A pipe would wait for ever."""
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for name, count in (("b", 4), ("a", 12)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / name / f"{number}.png")
    for name in ("__MACOSX", "a/.thumbnails", "a/@eaDir"):
        shutil.copytree(folder / "b", folder / name)
    (folder / "a" / "again").symlink_to(folder / "b")
    os.mkfifo(folder / "a" / "pipe.jpg")
    (folder / "a" / "cut.png").write_bytes((folder / "a" / "1.png").read_bytes()[:1000])
    (folder / "a" / "notes.xml").write_text("<annotation/>")
    (folder / "a" / "nowhere.jpg").symlink_to(tmp_path / "absent")
    call(photos, folder, tmp_path / "photos.npz")
    said = capsys.readouterr()
    assert said.out.endswith(
        "photos.npz: 13 training and 3 test images of 2 classes: a, b\n"
        "left out: 3 files or folders whose names begin with . @ __ lost+found\n"
    )
    assert re.fullmatch(
        r"Warning: 3 of 15 files .+ photos of class a: \S+/cut.png \(.+notes.xml \(Uniden.+\n", said.err
    )
    found = dict(np.load(tmp_path / "photos.npz"))
    content = b"".join(found[name].tobytes() for name in sorted(found))
    assert hashlib.sha256(content).hexdigest()[:12] == "86e28553bb2b"


def test_photos_of_one_subfolder_are_all_for_training_or_all_for_testing(tmp_path):
    """Of each class ten videos with three frames. Two forms of é are one name."""
    for number in range(10):
        for place, name in enumerate(("plage", "cafe\u0301", "caf\u00e9")):
            (video := tmp_path / "photos" / name / f"v{number}").mkdir(parents=True)
            for frame in range(3):
                Image.new("RGB", (32, 32), (20 * number, 80 * place, 0)).save(video / f"{frame}.png")
    call(photos, tmp_path / "photos", tmp_path / "photos.npz")
    found = dict(np.load(tmp_path / "photos.npz"))
    assert found["class_names"].tolist() == ["caf\u00e9", "plage"]
    train, test = ({*map(tuple, found[f"{part}_images"][:, 0, 0])} for part in ("train", "test"))
    assert not train & test
    assert (len(found["train_labels"]), len(found["test_labels"])) == (54, 36)


def test_test_photos_may_have_their_own_folder_whose_classes_may_be_links(folder, tmp_path):
    for name in CLASSES:
        (tmp_path / name).symlink_to(folder / name)
    call(photos, folder, tmp_path / "x.npz", "--test", tmp_path)
    found = np.load(tmp_path / "x.npz")
    np.testing.assert_array_equal(found["test_images"], found["train_images"])
    assert np.bincount(found["test_labels"]).tolist() == [90, 90]


def test_a_folder_that_is_no_data_set_is_refused(folder, tmp_path, error_line):
    few = make_photos(tmp_path / "few", 1)
    words = (photos, few, tmp_path / "x.npz")
    assert "class 'dunkel' has 1 photos that can be read: give 2" in error_line(call, *words)
    (few / "empty").mkdir()
    assert "class 'dunkel' has 1 photos that can be read" in error_line(call, *words)
    two = make_photos(tmp_path / "two", 2)
    shutil.copytree(two / "dunkel", two / "third")
    assert "only one of the folders has a class 'third'" in error_line(call, photos, folder, words[2], "--test", two)
    assert "has 0 folders: it needs 2" in error_line(call, photos, two / "third", words[2])
    assert not (tmp_path / "x.npz").exists()


# ---- Few photos


@pytest.mark.parametrize("recipe", ["apple2019", "muon", "muon95", "muon_first"])
def test_with_few_images_there_are_as_many_steps_as_on_cifar_10(recipe):
    """There are at least eight steps an epoch. What is given stays, and images that are held out are not lacking."""
    program = load_program(recipe)
    words = ["--recipe", recipe]
    for count, *given in ((1024,), (10_000,), (1024, "--batch_size=16")):
        hyp = read_command(program, [*words, *given], count)[2]
        steps = count // hyp.images_of_step
        assert steps >= 8
        unfitted = read_command(program, [*words, *given])[2]
        published = unfitted.epochs * (50_000 // unfitted.images_of_step)
        assert published <= hyp.epochs * steps < published + steps
        if recipe == "apple2019":
            ratio = unfitted.lr_scaler / unfitted.images_of_step
            assert (hyp.lr_scaler / hyp.images_of_step, hyp.ghost_batch) == (ratio, unfitted.actual_ghost_batch)
    assert read_command(program, [*words, "--epochs=3"], 1024)[2].epochs == 3
    assert read_command(program, [*words, "--holdout=10000"], 40_000)[2] == sets_of(program)[recipe]()


# ---- Use


def test_pictures_become_lines_and_a_table_of_their_most_probable_classes(weights, folder, tmp_path):
    """One that cannot be read hides no other, and names that a terminal lacks are escaped."""
    bright, *_ = sorted((folder / "weiß").iterdir())
    files = [bright, *sorted((folder / "dunkel").iterdir())]
    (tmp_path / "text.jpg").write_text("no picture")
    command = ["-m", "large_batch_cifar_10_fast", "predict", weights, "text.jpg", bright, folder / "dunkel"]
    said = python(*command, "--csv", "table.csv", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert said.returncode == 1
    assert re.fullmatch(r"Warning: 1 of 92 files cannot be read as pictures: text.jpg \(.*\)\n", said.stderr)
    found = api.load(weights).predict(np.stack([*map(api.read_picture, files)])).amax(1)
    table = pd.read_csv(tmp_path / "table.csv")
    assert table.file.tolist() == [*map(str, files)]
    assert table.class_1.tolist() == ["weiß"] + 90 * ["dunkel"]
    np.testing.assert_allclose(table.probability_1, found, atol=1e-4)
    lines = said.stdout.replace(r"\xdf", "ß").splitlines()
    assert len(lines) == 91
    assert lines[0] == f"{bright}: weiß {found[0]:.3f}, dunkel {1 - found[0]:.3f}"
    with pytest.raises(ConfigError, match="no picture can be read"):
        call(predict, weights, tmp_path / "text.jpg")


def test_evaluation_says_what_is_taken_for_what(weights, file, tmp_path, capsys):
    parts = dict(np.load(file))
    parts["test_labels"][:5] = 1  # of dark photos
    np.savez(tmp_path / "mine.npz", **parts)
    call(evaluate, weights, "--data", tmp_path / "mine.npz")
    printed = capsys.readouterr().out
    assert "accuracy 0.8611 (31 of 36 images)" in printed
    assert re.search(r"\ndunkel +13 +1.0000 +\[.*\nweiß +23 +0.7826 +\[.*\nweiß taken for dunkel: 5 of 23\n$", printed)


def test_classes_are_matched_by_their_names_or_else_by_their_numbers(weights, file, tmp_path):
    parts = dict(np.load(file))
    del parts["class_names"]
    own = parts["test_labels"].tolist()

    def labels_of(model, **names):
        np.savez(tmp_path / "some.npz", **parts, **names)
        return api.test_images(model, str(tmp_path / "some.npz"))[1].tolist()

    model = api.load(weights)

    assert labels_of(model, class_names=CLASSES[::-1]) == [1 - label for label in own]
    assert labels_of(model) == own
    with pytest.raises(ConfigError, match="has classes that the weights do not know: bunt"):
        labels_of(model, class_names=["bunt", "dunkel"])
    model.classes = ["0", "1"]
    assert labels_of(model, class_names=CLASSES) == own


def test_an_onnx_file_predicts_as_the_model(weights, file, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = api.load(weights)
    some = np.load(file)["test_images"][::7]  # of both classes
    call(export, weights, tmp_path / "w.onnx")
    session = runtime.InferenceSession(tmp_path / "w.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == CLASSES
    (found,) = session.run(["probabilities"], {"images": some})
    assert np.allclose(found, model.predict(some), atol=1e-4)
