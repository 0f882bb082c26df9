"""From a folder of photos to a prediction: photos become a file, which is trained on, evaluated and exported."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ALONE, python, run_here
from PIL import Image, ImageDraw, ImageOps

from large_batch_cifar_10_fast import ConfigError, api
from large_batch_cifar_10_fast.images import photos as pictures
from large_batch_cifar_10_fast.images.load import ARRAYS, load_images
from large_batch_cifar_10_fast.lab import evaluate, export, predict
from large_batch_cifar_10_fast.lab.options import Options
from large_batch_cifar_10_fast.lab.photos import main
from large_batch_cifar_10_fast.lab.program import load_and_check, load_program, sets_of

pytestmark = pytest.mark.slow

SHAPES = ["circles", "große Quadrate"]
KINDS = ("CMYK.jpeg", "turned.JPG", "P.png", "RGBA.png", "16 bits.png", "RGB.webp")


def draw_photo(shape: str, random: np.random.Generator) -> Image.Image:
    """Draw one dark shape on a bright ground, of any size."""
    width, height = map(int, random.integers(40, 300, 2))
    photo = Image.new("RGB", (width, height), tuple(map(int, random.integers(150, 256, 3))))
    middle = np.array([width, height]) / 2
    half = min(width, height) * random.uniform(0.25, 0.45)
    draw = ImageDraw.Draw(photo)
    draw_shape = draw.ellipse if shape == "circles" else draw.rectangle
    draw_shape([*(middle - half), *(middle + half)], fill=tuple(map(int, random.integers(0, 90, 3))))
    return photo


def save_photo(photo: Image.Image, path: Path, kind: str) -> Path:
    path = path.with_name(f"{path.name} {kind}")
    mode = kind.partition(".")[0]
    if mode == "turned":
        exif = Image.Exif()
        exif[0x112] = 6  # to be turned clockwise
        photo.rotate(90, expand=True).save(path, exif=exif)
    elif mode == "16 bits":
        Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257).save(path)
    else:
        photo.convert(mode).save(path)
    return path


def save_noise(folder: Path, names: Sequence[str]) -> None:
    """Save pictures of 32x32 pixels, no two alike, as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name in names:
        Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / f"{name}.png")


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    return pictures.read_photos(pictures.find_photos(folder), {})


def make_photos(folder: Path, count: int, kinds=("RGB.png",), shapes=SHAPES) -> Path:
    random = np.random.default_rng(0)
    for shape in shapes:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save_photo(draw_photo(shape, random), folder / shape / f"{number:03d}", kinds[number % len(kinds)])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of photos in all formats, which nothing may change."""
    folder = make_photos(tmp_path_factory.mktemp("photos"), 90, KINDS)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("file") / "photos.npz"
    main([str(folder), str(file)])
    return file


@pytest.fixture(scope="module")
def weights(file, tmp_path_factory):
    """Weights of a training by the options that the line for too few images names."""
    out = tmp_path_factory.mktemp("trained")
    with (out / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        run_here("--recipe", "muon", "--data", file, "--width", 8, "--workers", 1, "--batch_size", 18, "--epochs", 57,
                 "--out", out, "--save", out / "weights.pt", "--precision", "fp32", "--no_compile")  # fmt: skip
    return out / "weights.pt"


# ---- Photos to a file


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_each_format_is_scaled_cropped_and_turned(kind, tmp_path):
    """A wide picture with a red left, a green middle and a blue right: its middle square is left, upright."""
    photo = Image.new("RGB", (640, 320), "green")
    photo.paste("red", (0, 0, 160, 320))
    photo.paste("blue", (480, 0, 640, 320))
    photo.paste("black", (160, 0, 480, 20))  # above
    expected = Image.new("RGB", (32, 32), "green")
    expected.paste("black", (0, 0, 32, 2))
    if kind == "16 bits.png":
        expected = expected.convert("L").convert("RGB")
    found = pictures.read_picture(save_photo(photo, tmp_path / "photo", kind))
    rows = np.abs(found.astype(int) - np.asarray(expected)).mean((1, 2))
    assert rows.max() < 12
    assert np.delete(rows, [1, 2, 3], 0).mean() < 4


def test_a_large_picture_is_scaled_as_by_pillow_alone_and_transparent_parts_are_white(tmp_path):
    """Although a JPEG is decoded at a fraction of its size."""
    smooth = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    photo = Image.fromarray(smooth).resize((2000, 1600), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.jpg", quality=95)
    expected = ImageOps.fit(photo, (32, 32), Image.Resampling.BILINEAR)
    assert np.abs(pictures.read_picture(tmp_path / "a.jpg").astype(int) - np.asarray(expected)).mean() < 2
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (pictures.read_picture(tmp_path / "a.png") == 255).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_gray_pictures_of_16_bits_are_scaled(dtype):
    """Pillow opens such a file in mode I or I;16, by its version."""
    values = np.arange(32 * 32).reshape(32, 32) * (2**16 - 1) // (32 * 32 - 1)
    found = np.asarray(pictures.as_rgb(Image.fromarray(values.astype(dtype))))
    np.testing.assert_array_equal(found, np.repeat(values[..., None] >> 8, 3, 2))


def test_a_fifth_of_each_class_are_test_images_and_always_the_same(folder, file, tmp_path, capsys):
    found = load_images(str(file))
    assert found.class_names == SHAPES
    assert np.bincount(found.train_labels).tolist() == [72, 72]
    assert np.bincount(found.test_labels).tolist() == [18, 18]
    main([str(folder), str(tmp_path / "again.npz")])
    counts = "144 training and 36 test images of 2 classes: circles, große Quadrate"
    assert capsys.readouterr() == (f"{tmp_path}/again.npz: {counts}\n", "")
    assert load_images(str(tmp_path / "again.npz")).digest == found.digest


def test_the_split_and_the_arrays_are_those_of_the_first_release(tmp_path):
    """A folder in which all files can be read: digest and test images are those of 5aca97c."""
    random = np.random.default_rng(0)
    for name, count in (("b", 4), ("a", 12)):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for number in range(count):
            place = tmp_path / name / ("." if number % 3 else "deeper")
            Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(place / f"{number}.png")
    found = read_folder(tmp_path)
    total = hashlib.sha256()
    for _, array in sorted(found.items()):
        total.update(array.tobytes())
    assert total.hexdigest()[:12] == "fe06875ae3c0"
    tests = [tmp_path / name for name in ("a/deeper/0.png", "a/deeper/6.png", "b/deeper/0.png")]
    np.testing.assert_array_equal(found["test_images"], [pictures.read_picture(path) for path in tests])


def test_files_that_are_no_photos_leave_the_split_as_it_is(tmp_path, capsys):
    for name in ("clean", "mixed"):
        for shape in "ab":
            save_noise(tmp_path / name / shape, [f"{shape}{number}" for number in range(6)])
    for number in range(40):
        (tmp_path / "mixed" / "a" / f"a{number}.xml").write_text("<annotation/>")
    clean = read_folder(tmp_path / "clean")
    assert not capsys.readouterr().err
    mixed = read_folder(tmp_path / "mixed")
    for array in clean:
        np.testing.assert_array_equal(mixed[array], clean[array])
    three = r"(\S+/a\d+.xml \(not JPEG, PNG or WebP\)(, )?){3}"
    said = rf"Warning: 40 of 52 files cannot be read as photos: {three} and 37 more\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_class_has_all_files_below_its_folder_but_hidden_ones_links_to_folders_and_pipes(folder, tmp_path, capsys):
    """A pipe would wait for ever. A class may be a link."""
    make_photos(tmp_path / "train", 5)
    make_photos(tmp_path / "train" / "circles", 3, shapes=[".thumbnails", "@eaDir", "deeper"])
    (tmp_path / "train" / "__MACOSX").mkdir()
    (tmp_path / "train" / "circles" / "again").symlink_to(folder)
    os.mkfifo(tmp_path / "train" / "circles" / "pipe.jpg")
    (tmp_path / "test").mkdir()
    for shape in SHAPES:
        (tmp_path / "test" / shape).symlink_to(folder / shape)
    main([str(tmp_path / "train"), str(tmp_path / "x.npz"), "--test", str(tmp_path / "test")])
    assert capsys.readouterr().out.endswith("left out: 3 files or folders whose names begin with . @ __\n")
    found = np.load(tmp_path / "x.npz")
    assert np.bincount(found["train_labels"]).tolist() == [5 + 3, 5]
    (first, *_) = sorted((folder / "circles").iterdir())
    np.testing.assert_array_equal(found["test_images"][0], pictures.read_picture(first))


def test_photos_that_cannot_be_read_are_named_and_counted(tmp_path, capsys):
    folder = make_photos(tmp_path / "photos", 10, ("RGB.jpg",))
    circles = folder / "circles"
    whole = next(circles.iterdir()).read_bytes()
    (circles / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (circles / "nowhere.jpg").symlink_to(tmp_path / "absent")
    Image.new("1", (20_000, 20_000)).save(circles / "huge.png")
    found = read_folder(folder)
    assert len(found["train_images"]) + len(found["test_images"]) == 20
    warned = capsys.readouterr().err
    assert "Warning: 3 of 23 files cannot be read as photos: /" in warned
    assert "circles/cut.jpg" in warned


BROKEN = {  # what is done to a folder, and the line that it gives
    "class 'empty' has no photos that can be read: add JPEG": lambda folder: (folder / "empty").mkdir(),
    "class 'circles' has one photo that can be read: give two or more": lambda folder: [
        path.write_text("no") for path in list((folder / "circles").iterdir())[1:]
    ],
    "has 1 folders: it needs one for each class": lambda folder: shutil.rmtree(folder / "circles"),
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_folder_that_is_no_data_set_is_refused(line, tmp_path):
    folder = make_photos(tmp_path / "photos", 3)
    BROKEN[line](folder)
    with pytest.raises(ConfigError, match=rf"^[^\n]*{line}[^\n]*$"):
        main([str(folder), str(tmp_path / "x.npz")])
    assert not (tmp_path / "x.npz").exists()


def test_test_photos_need_the_same_classes(folder, tmp_path):
    other = make_photos(tmp_path / "photos", 1, shapes=["circles", "dots"])
    with pytest.raises(ConfigError, match="only one of the folders has a class 'dots': give both the same classes"):
        main([str(folder), str(tmp_path / "x.npz"), "--test", str(other)])


# ---- Few photos


def test_too_few_photos_are_refused_or_warned_of_with_options_that_fit(file, tmp_path, capsys):
    for recipe, hint in (
        ("apple2019", "try --workers 1 --batch_size 16 --epochs 48 --lr_scaler 0.0117"),
        ("muon", "try --workers 1 --batch_size 18 --epochs 57"),
        ("fastai", "use a smaller batch"),
    ):
        with pytest.raises(ConfigError, match=rf"more than the training set's 144: {hint}"):
            run_here("--recipe", recipe, "--data", file, "--out", tmp_path)
    for batch_size, warned in ((18, False), (19, True)):
        load_and_check(Options(data=str(file)), load_program("muon").Hyp(batch_size=batch_size), ALONE)
        assert ("144 training images make 7 steps an epoch" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("recipe", "published"), [("apple2019", 432), ("muon", 450), ("muon95", 550), ("muon2024", 200)]
)
def test_the_options_for_few_images_make_as_many_steps_as_on_cifar_10(recipe, published):
    """There are at least eight steps an epoch."""
    kind = sets_of(load_program(recipe))[recipe]
    for count in (128, 10_000):
        words = kind().fit_to(count).replace("--", "").split()
        values = [float(word) if "." in word else int(word) for word in words[1::2]]
        hyp = kind(**dict(zip(words[::2], values, strict=True)))
        steps = count // hyp.images_of_step
        assert steps >= 8
        assert published <= hyp.epochs * steps < published + steps
        if recipe == "apple2019":
            assert hyp.lr_scaler / hyp.batch_size == pytest.approx(1.5 / 2048, rel=0.01)


# ---- Use


def test_photos_lead_to_predictions_with_the_names_of_their_folders(weights, folder, tmp_path):
    """One that cannot be read hides no other, and names that a terminal lacks are escaped."""
    (tmp_path / "text.jpg").write_text("no picture")
    photos = [path for shape in SHAPES for path in sorted((folder / shape).iterdir())[::5]]
    command = ["-m", "large_batch_cifar_10_fast", "predict", weights, "text.jpg", *photos]
    said = python(*command, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert said.returncode == 1
    assert re.fullmatch(r"Warning: 1 of 37 files cannot be read as pictures: text.jpg \(.*\)\n", said.stderr)
    right = 0
    for photo, line in zip(photos, said.stdout.replace(r"\xdf", "ß").splitlines(), strict=True):
        assert line.startswith(f"{photo}: ")
        assert {*re.findall(r"(?:: |, )(\D+?) [\d.]+(?=,|$)", line)} == {*SHAPES}
        right += line.startswith(f"{photo}: {photo.parent.name} ")
    assert right >= 30
    said = python(*command[: -len(photos)], cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.endswith("\npredict: no picture can be read: give JPEG, PNG or WebP\n")


def test_a_folder_of_pictures_becomes_a_table_of_their_most_probable_classes(weights, folder, tmp_path, capsys):
    (some := tmp_path / "some" / "deeper").mkdir(parents=True)
    photos = [*sorted((folder / SHAPES[0]).iterdir())[:3], *sorted((folder / SHAPES[1]).iterdir())[:3]]
    for number, photo in enumerate(photos):
        shutil.copy(photo, some / f"{number}{photo.suffix}")
    save_noise(tmp_path, ["alone"])
    words = [str(weights), str(tmp_path / "alone.png"), str(tmp_path / "some"), "--csv", str(tmp_path / "t.csv")]
    assert predict.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    table = pd.read_csv(tmp_path / "t.csv")
    assert [*table.columns] == ["file", "class_1", "probability_1", "class_2", "probability_2"]
    files = [tmp_path / "alone.png", *sorted(some.iterdir())]
    assert [*table.file] == [*map(str, files)]
    found = api.load(weights).predict(np.stack([pictures.read_picture(file) for file in files])).numpy()
    assert [*table.class_1] == [SHAPES[place] for place in found.argmax(1)]
    np.testing.assert_allclose(table.probability_1, found.max(1), atol=1e-4)
    np.testing.assert_allclose(table.probability_1 + table.probability_2, 1, atol=2e-4)
    assert [line.partition(",")[0].rpartition(" ")[0] for line in lines] == [*(table.file + ": " + table.class_1)]
    (some / "notes.txt").write_text("no picture")
    assert predict.main(words) == 1
    assert f"1 of 8 files cannot be read as pictures: {some}/notes.txt" in capsys.readouterr().err


def test_evaluation_says_what_is_taken_for_what(weights, file, tmp_path, capsys):
    parts = dict(np.load(file))
    parts["test_labels"][:5] = 1  # so that there are errors
    np.savez(tmp_path / "mine.npz", **parts)
    drawn = [tmp_path / "confusion.png", tmp_path / "errors.svg"]
    words = ["--data", tmp_path / "mine.npz", "--confusion", drawn[0], "--errors", drawn[1]]
    evaluate.main([str(weights), *map(str, words)])
    printed = capsys.readouterr().out
    labels = parts["test_labels"]
    answers = api.load(weights).predict(parts["test_images"]).argmax(1).numpy()
    correct = int((answers == labels).sum())
    assert f"accuracy {correct / 36:.4f} ({correct} of 36 images)" in printed
    for label, shape in enumerate(SHAPES):
        mine = labels == label
        assert re.search(rf"(?m)^{shape} +{mine.sum()} +{(answers[mine] == label).mean():.4f} +\[", printed)
    assert sum(map(int, re.findall(r"taken for [^:]+: (\d+) of", printed))) == 36 - correct > 0
    assert Image.open(drawn[0]).width > 500
    assert drawn[1].read_text().startswith("<?xml")


def test_confusions_are_counted_and_the_largest_come_first():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    answers = torch.tensor([0, 1, 1, 1, 2, 2])
    counts = evaluate.count_confusions(labels, answers, 3)
    assert counts.tolist() == [[1, 2, 0], [0, 1, 1], [0, 0, 1]]
    assert evaluate.largest_confusions(counts, "abc") == ["a taken for b: 2 of 3", "b taken for c: 1 of 2"]


def test_classes_are_matched_by_their_names_or_else_by_their_numbers(weights, file, tmp_path, capsys):
    parts = {name: np.load(file)[name] for name in ARRAYS}
    own = parts["test_labels"].tolist()

    def labels_of(**names: list[str]) -> list[int]:
        np.savez(tmp_path / "some.npz", **parts, **names)
        return api.test_images(api.load(weights), str(tmp_path / "some.npz"))[1].tolist()

    assert labels_of(class_names=SHAPES[::-1]) == [1 - label for label in own]
    assert not capsys.readouterr().err
    assert labels_of() == own
    assert "have no class names: classes are matched by number" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has a class 'dots', and the weights know circles"):
        labels_of(class_names=["circles", "dots"])


def test_an_onnx_file_predicts_as_the_model(weights, file, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = api.load(weights)
    for name, options in (("probabilities", []), ("logits", ["--logits"])):
        export.main([str(weights), str(tmp_path / f"{name}.onnx"), *options])
        session = runtime.InferenceSession(tmp_path / f"{name}.onnx")
        assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == SHAPES
        some = np.load(file)["test_images"][:5]
        (found,) = session.run([name], {"images": some})
        expected = model(torch.from_numpy(some)).detach() if options else model.predict(some)
        assert np.allclose(found, expected, atol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"probabilities.onnx", "logits.onnx"}
