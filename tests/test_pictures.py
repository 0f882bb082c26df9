"""Pictures of one's own: from a folder of photos to a prediction."""

import io
import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import launch, python, run_here, write_npz
from PIL import Image, ImageDraw, ImageOps

from large_batch_cifar_10_fast import ConfigError, api
from large_batch_cifar_10_fast.images import load as images
from large_batch_cifar_10_fast.images import photos as pictures
from large_batch_cifar_10_fast.images.load import load_images
from large_batch_cifar_10_fast.lab import evaluate, experiment, export, predict
from large_batch_cifar_10_fast.lab.program import hyp_class, warn_of_few_steps

SHAPES = ("circles", "große Quadrate", "stripes")
KINDS = ("RGB.jpg", "L.jpg", "CMYK.jpeg", "turned.JPG", "RGB.png", "P.png", "RGBA.png", "16 bits.png", "RGB.webp")


def draw_photo(shape: str, random: np.random.Generator) -> Image.Image:
    """Draw one dark shape on a bright ground, of any size."""
    width, height = map(int, random.integers(40, 500, 2))
    photo = Image.new("RGB", (width, height), tuple(map(int, random.integers(150, 256, 3))))
    draw = ImageDraw.Draw(photo)
    color = tuple(map(int, random.integers(0, 90, 3)))
    middle = np.array([width, height]) / 2
    half = min(width, height) * random.uniform(0.25, 0.45)
    box = [*(middle - half), *(middle + half)]
    if shape == "circles":
        draw.ellipse(box, fill=color)
    elif shape == "stripes":
        for place in np.linspace(box[1], box[3], 5):
            draw.line([box[0], place, box[2], place], fill=color, width=max(1, int(half / 6)))
    else:
        draw.rectangle(box, fill=color)
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
    elif mode == "RGBA":
        photo.putalpha(255)
        photo.save(path)
    else:
        photo.convert(mode).save(path)
    return path


def make_photos(folder: Path, counts: dict[str, int], kinds=KINDS) -> Path:
    random = np.random.default_rng(0)
    for shape, count in counts.items():
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save_photo(draw_photo(shape, random), folder / shape / f"{number:03d}", kinds[number % len(kinds)])
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A small folder of all formats, which nothing may change."""
    folder = make_photos(tmp_path_factory.mktemp("photos"), dict.fromkeys(SHAPES, 20))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as error:
        load_images(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_each_format_is_scaled_cropped_and_turned(kind, tmp_path):
    """A wide picture with a red left, a green middle and a blue right: its middle square is left, upright."""
    photo = Image.new("RGB", (640, 320), "green")
    photo.paste("red", (0, 0, 160, 320))
    photo.paste("blue", (480, 0, 640, 320))
    photo.paste("black", (160, 0, 480, 20))  # above
    expected = Image.new("RGB", (32, 32), "green")
    expected.paste("black", (0, 0, 32, 2))
    if kind[0] in "L1":
        expected = expected.convert("L").convert("RGB")
    found = pictures.read_picture(save_photo(photo, tmp_path / "photo", kind))
    assert (found.dtype, found.shape) == (np.uint8, (32, 32, 3))
    rows = np.abs(found.astype(int) - np.asarray(expected)).mean((1, 2))
    assert rows.max() < 12
    assert np.delete(rows, [1, 2, 3], 0).mean() < 4


def test_transparent_parts_are_white(tmp_path):
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (pictures.read_picture(tmp_path / "a.png") == 255).all()


def test_a_large_picture_is_scaled_as_by_pillow_alone(tmp_path):
    """Although a JPEG is decoded at a fraction of its size."""
    smooth = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    photo = Image.fromarray(smooth).resize((2000, 1600), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.jpg", quality=95)
    expected = ImageOps.fit(photo, (32, 32), Image.Resampling.BILINEAR)
    assert np.abs(pictures.read_picture(tmp_path / "a.jpg").astype(int) - np.asarray(expected)).mean() < 2


def test_a_fifth_of_each_class_are_test_images_and_always_the_same(photos, tmp_path):
    found = load_images(str(photos), cache=tmp_path)
    assert found.class_names == list(SHAPES)
    assert np.bincount(found.train_labels).tolist() == [16, 16, 16]
    assert np.bincount(found.test_labels).tolist() == [4, 4, 4]
    assert found.name == f"{photos.name}/"
    assert not found.doubts()
    assert load_images(str(photos)).digest == found.digest
    assert found.normalization != images.CIFAR_10_NORMALIZATION


@pytest.mark.parametrize("name", ["CIFAR-10", "CIFAR-100", "synthetic"])
def test_a_folder_is_not_taken_for_the_data_set_of_its_name(name, tmp_path):
    """Whose images keep their order: pictures are in that of their classes, and the last are of one class."""
    folder = make_photos(tmp_path / name, dict.fromkeys(SHAPES, 20), ("RGB.png",))
    found = load_images(str(folder), holdout=15)
    assert set(found.test_labels) == {0, 1, 2}
    assert found.normalization != images.CIFAR_10_NORMALIZATION


def test_a_new_picture_makes_test_pictures_of_few_that_were_trained_on(tmp_path):
    folder = make_photos(tmp_path, dict.fromkeys(SHAPES, 50), ("RGB.png",))
    trained_on = {path for path, _ in pictures.find_pictures(folder).train}
    for number in range(5):
        draw_photo("stripes", np.random.default_rng(number)).save(folder / "stripes" / f"new {number}.png")
        moved = {path for path, _ in pictures.find_pictures(folder).test} & trained_on
        assert len(moved) <= 1  # the share of 51 to 55 pictures is one more than that of 50


def test_what_is_no_picture_file_is_not_read(tmp_path):
    """Hidden folders, links to folders and pipes, which would wait for ever; classes may be links."""
    folder = make_photos(tmp_path / "photos", dict.fromkeys(SHAPES, 5), ("RGB.png",))
    make_photos(folder / "circles", {".thumbnails": 3}, ("RGB.png",))
    (folder / "circles" / "again").symlink_to(folder / "stripes")
    os.mkfifo(folder / "circles" / "pipe.jpg")
    (tmp_path / "links").mkdir()
    for shape in SHAPES:
        (tmp_path / "links" / shape).symlink_to(folder / shape)
    for data in (folder, tmp_path / "links"):
        found = load_images(str(data))
        assert len(found.train_images) + len(found.test_images) == 15


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "TEST")])
def test_folders_train_and_test_are_kept_apart(names, photos, tmp_path):
    for part, first in zip(names, (0, 15), strict=True):
        for shape in SHAPES:
            (tmp_path / part / shape / "deeper").mkdir(parents=True)
            for path in sorted((photos / shape).iterdir())[first : first + 5]:
                (tmp_path / part / shape / "deeper" / path.name).write_bytes(path.read_bytes())
    found = load_images(str(tmp_path))
    assert (len(found.train_images), len(found.test_images), found.class_names) == (15, 15, list(SHAPES))
    (last, *_) = sorted((photos / SHAPES[0]).iterdir())[15:]
    np.testing.assert_array_equal(found.test_images[0], pictures.read_picture(last))


def test_pictures_are_decoded_once_and_again_if_one_changes(tmp_path, monkeypatch, capsys):
    folder = make_photos(tmp_path / "photos", dict.fromkeys(SHAPES, 5))
    before = load_images(str(folder), cache=tmp_path / "out").digest
    (stored,) = (tmp_path / "out").iterdir()
    assert load_images(str(stored)).class_names == list(SHAPES)  # it is a data set of its own
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "read_picture", lambda path: pytest.fail("decoded"))
        assert load_images(str(folder), cache=tmp_path / "out").digest == before
    stored.write_bytes(stored.read_bytes()[:1000])  # it is damaged
    assert load_images(str(folder), cache=tmp_path / "out").digest == before
    draw_photo("circles", np.random.default_rng(9)).save(next((folder / SHAPES[0]).glob("*.png")))
    assert load_images(str(folder), cache=tmp_path / "out").digest != before
    assert capsys.readouterr() == ("", "")


def test_pictures_that_cannot_be_read_are_named_and_counted(tmp_path, capsys):
    folder = make_photos(tmp_path / "photos", dict.fromkeys(SHAPES, 10), ("RGB.jpg",))
    whole = sorted((folder / "circles").iterdir())[0].read_bytes()
    (folder / "circles" / "text.jpg").write_text("no picture")
    (folder / "circles" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "circles" / "nowhere.jpg").symlink_to(tmp_path / "absent")
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    huge = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (folder / "circles" / "huge.png").write_bytes(huge)
    (folder / "circles" / "notes.txt").write_text("no picture")
    (folder / "circles" / "._hidden.jpg").write_text("ignored")
    found = load_images(str(folder))
    assert len(found.train_images) + len(found.test_images) == 30
    warned = capsys.readouterr().err
    assert sum(map(int, re.findall(r"Warning: (\d) of \d+ \w+ pictures cannot be read: /", warned))) == 5
    first_three = [f"circles/{name}" in warned for name in ("cut.jpg", "huge.png", "notes.txt")]
    assert first_three == [True, True, True]
    assert warned.endswith(", and 2 more\n")


BROKEN = {  # what is done to a folder, and the line that it gives
    "empty class": (
        lambda folder: (folder / "empty").mkdir(),
        "/empty has no pictures: add some, or remove the folder",
    ),
    "only text": (
        lambda folder: [path.write_text("no") for path in (folder / "stripes").iterdir()],
        "no train picture of class 'stripes' can be read: give others, JPEG",
    ),
    "one class": (
        lambda folder: [path.rename(folder.parent / path.name) for path in list(folder.iterdir())[1:]],
        "has 1 folder with pictures of a class: give 2 to 1000",
    ),
    "no folders": (
        lambda folder: (
            [path.rename(folder / path.name) for path in list(folder.glob("*/*"))]
            and [path.rmdir() for path in folder.iterdir() if path.is_dir()]
        ),
        "has 0 folders with pictures of a class",
    ),
    "one picture": (
        lambda folder: [path.unlink() for path in list((folder / "circles").iterdir())[1:]],
        "circles has one picture: give at least two",
    ),
    "only train": (
        lambda folder: (
            [(folder / "train").mkdir()]
            and [path.rename(folder / "train" / path.name) for path in folder.iterdir() if path.name != "train"]
        ),
        "has a folder train and no test: give both",
    ),
    "5,000 classes": (
        lambda folder: [(folder / f"class {number}").mkdir() for number in range(5000)],
        "has 5003 folders with pictures of a class: give 2 to 1000",
    ),
    "a name": (lambda folder: (folder / "circles").rename(folder / "a\nb"), r"has a class 'a\\nb': rename it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_no_data_set_is_refused(name, tmp_path, capsys):
    folder = make_photos(tmp_path / "photos", dict.fromkeys(SHAPES, 3), ("RGB.png",))
    change, line = BROKEN[name]
    change(folder)
    assert re.search(line, refusal(folder))


def test_classes_of_training_and_test_pictures_are_the_same(tmp_path):
    make_photos(tmp_path / "train", dict.fromkeys(SHAPES, 2), ("RGB.png",))
    make_photos(tmp_path / "test", dict.fromkeys(SHAPES[:2], 2), ("RGB.png",))
    assert "test has no class 'stripes', which train has: give it test pictures" in refusal(tmp_path)
    make_photos(tmp_path / "test", {"stripes": 2, "dots": 2}, ("RGB.png",))
    assert "test has a class 'dots' that train lacks" in refusal(tmp_path)


def test_a_folder_that_may_not_be_read_is_named(photos, monkeypatch):
    """Root may read everything, so the system is asked for a refusal."""

    def refuse_stripes(path):
        if Path(path).name == "stripes":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse_stripes)
    assert f"--data {photos}/stripes cannot be read (Permission denied): make it readable" in refusal(photos)


def test_nothing_is_downloaded_or_written_to_a_folder_of_pictures(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "download", lambda *_: pytest.fail("downloaded"))
    monkeypatch.chdir(photos)
    muon = ["--recipe", "muon", "--batch_size", "10"]
    for words in (["--data", "."], ["--data", photos, "--out", "out"]):
        with pytest.raises(ConfigError, match=r"^--out \S+ lies in the folder of pictures"):
            run_here(*muon, *words)
    with pytest.raises(ConfigError, match=r"^--save circles/w\.pt lies in the folder of pictures"):
        run_here(*muon, "--data", photos, "--out", tmp_path, "--save", "circles/w.pt")
    with pytest.raises(SystemExit, match="2"):
        experiment.main([*muon, "--data", ".", "--try", "width=8"])
    for path in ("circles", "circles/x.png"):
        with pytest.raises(ConfigError, match="lies in the folder of pictures"):
            evaluate.check_picture(Path(path), ".", "--confusion")
    monkeypatch.setattr(images, "DATA", photos)  # as in an installed package, beside one's pictures
    with pytest.raises(ConfigError, match="has pictures, and nothing is downloaded to it: name another folder"):
        load_images("cifar10")
    (tmp_path / "empty" / "cats").mkdir(parents=True)
    assert "has folders and no JPEG, PNG or WebP pictures in them" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("recipe", ["apple2019", "muon", "fastai"])
def test_too_few_pictures_for_a_step_are_refused_before_they_are_decoded(recipe, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "read_picture", lambda path: pytest.fail("decoded"))
    hints = {"apple2019": "--workers 1 --batch_size 16 --epochs 144 --lr_scaler 0.0117 ", "fastai": "a smaller batch"}
    hint = hints.get(recipe, "--workers 1 --batch_size 6 --epochs 29 ")
    with pytest.raises(ConfigError, match=rf"more than the training set's 48: (try|use) {hint}"):
        run_here("--recipe", recipe, "--data", photos, "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="--holdout leaves -52 training images: keep out fewer"):
        run_here("--recipe", recipe, "--data", photos, "--out", tmp_path / "out", "--holdout", "100")


@pytest.mark.parametrize(
    ("count", "batch_size", "line"),
    [
        (4000, 2000, "4000 training images make 2 steps an epoch, which teach little: try --workers 1 "),
        (4000, 500, ""),
        (48, 16, ""),  # there is no smaller step to try
    ],
)
def test_few_steps_of_an_epoch_are_warned_of(count, batch_size, line):
    warned = []
    team = SimpleNamespace(total_workers=1, warn=warned.append)
    warn_of_few_steps(count, team, hyp_class("muon")(batch_size=batch_size))
    assert [text[: len(line)] for text in warned] == [line] * bool(line)


def test_pictures_that_make_few_steps_train_with_a_warning(photos, tmp_path, capsys):
    run_here("--recipe", "muon", "--data", photos, "--width", 4, "--batch_size", 24, "--epochs", 1, "--pixels", 32,
             "--kept", 1, "--out", tmp_path, "--no_warmup", "--no_compile")  # fmt: skip
    assert "48 training images make 2 steps an epoch" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["apple2019", "muon", "muon2024"])
@pytest.mark.parametrize("count", [128, 480, 1999, 2500, 10_000])
def test_the_options_for_few_images_fit(recipe, count):
    """There are at least eight steps an epoch and as many steps as on CIFAR-10, rounded to epochs."""
    kind = hyp_class(recipe)
    words = kind().fit_to(count).replace("--", "").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    types = {"lr_scaler": float}
    hyp = kind(**{name: types.get(name, int)(value) for name, value in given.items()})
    steps = count // hyp.batch_size
    published = {"apple2019": 432, "muon": 225, "muon2024": 200}[recipe]
    assert hyp.workers == 1
    assert steps >= 8
    assert published <= hyp.epochs * steps < published + steps
    if recipe == "apple2019":
        assert hyp.lr_scaler / hyp.batch_size == pytest.approx(1.5 / 2048, rel=0.01)
    else:
        hyp.check_images(count)


# ---- Predictions


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """Weights of a short training, and their folder."""
    out = tmp_path_factory.mktemp("trained")
    run_here("--recipe", "muon", "--data", photos, "--width", 8, "--batch_size", 16, "--epochs", 12, "--out", out,
             "--save", out / "weights.pt", "--precision", "fp32", "--no_compile")  # fmt: skip
    return out / "weights.pt"


def test_the_classes_names_lead_from_the_folder_to_a_prediction(trained, photos, capsys):
    files = [next((photos / shape).glob("*RGB.png")) for shape in SHAPES]
    predict.main([str(trained), *map(str, files)])
    lines = capsys.readouterr().out.splitlines()
    model = api.load(trained)
    for file, line in zip(files, lines, strict=True):
        probabilities = model.predict(api.read_picture(file))[0]
        best = SHAPES[int(probabilities.argmax())]
        assert line.startswith(f"{file}: {best} {probabilities.max():.3f}, ")
        assert sorted(SHAPES) == sorted(re.findall(r"(?:: |, )(\D+?) [\d.]+(?=,|$)", line))


@pytest.mark.slow
def test_two_commands_lead_from_600_photos_to_predictions(tmp_path):
    """The options are those that the line for too few images names."""
    folder = make_photos(tmp_path / "my photos", dict(zip(SHAPES, (280, 200, 120), strict=True)))
    muon = ["--recipe", "muon", "--data", "my photos", "--width", "8", "--out", "run", "--save", "w.pt"]
    refused = launch(*muon, cwd=tmp_path)
    options = re.search(r"the training set's 480: try (.*) \(", refused.stderr)[1].split()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert launch(*muon, *options, cwd=tmp_path).returncode == 0
    files = [path for shape in SHAPES for path in sorted((folder / shape).iterdir())[::40]]
    said = python("-m", "large_batch_cifar_10_fast.predict", "w.pt", *files, cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    right = [
        line.startswith(f"{path}: {path.parent.name} ")
        for path, line in zip(files, said.stdout.splitlines(), strict=True)
    ]
    assert len(right) == 15
    assert sum(right) >= 13


def test_a_picture_that_cannot_be_read_does_not_hide_the_others(trained, photos, tmp_path, capsys):
    (tmp_path / "text.jpg").write_text("no picture")
    file = next((photos / "circles").glob("*.png"))
    with pytest.raises(SystemExit) as ended:
        predict.main([str(trained), str(tmp_path / "text.jpg"), str(file)])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out.startswith(f"{file}: ")
    assert re.fullmatch(r"Warning: 1 of 2 .*text.jpg \(.*\)\npredict: 1 of 2 pictures cannot be read.*\n", printed.err)


def test_names_that_a_terminal_cannot_show_are_escaped(trained, photos, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    predict.main([str(trained), *map(str, sorted((photos / SHAPES[1]).iterdir()))])
    assert rb"gro\xdfe Quadrate" in terminal.buffer.getvalue()


def test_evaluation_says_what_is_taken_for_what(trained, photos, tmp_path, capsys):
    out = tmp_path / "confusion.png"
    errors = tmp_path / "errors.svg"
    evaluate.main([str(trained), "--data", str(photos), "--confusion", str(out), "--errors", str(errors)])
    printed = capsys.readouterr().out
    model = api.load(trained)
    given = load_images(str(photos))
    answers = model.predict(given.test_images).argmax(1).numpy()
    correct = int((answers == given.test_labels).sum())
    assert f"accuracy {correct / 12:.4f} ({correct} of 12 images)" in printed
    for label, shape in enumerate(SHAPES):
        share = (answers[given.test_labels == label] == label).mean()
        assert re.search(rf"(?m)^{shape} +4 +{share:.4f} +\[", printed)
    confused = sum(map(int, re.findall(r"taken for [^:]+: (\d+) of", printed)))
    assert confused == 12 - correct
    assert Image.open(out).width > 500
    assert errors.read_text().startswith("<?xml")
    broken = (
        ("x.nothing", "has none of the endings"),
        ("no/x.png", "no is no folder, make it first"),
        ("x.pgf", "cannot be written"),  # which needs LaTeX
    )
    for name, line in broken[: 2 if shutil.which("xelatex") else 3]:
        with pytest.raises(SystemExit, match="2"):
            evaluate.main([str(trained), "--data", str(photos), "--confusion", str(tmp_path / name)])
        assert line in capsys.readouterr().err


def test_confusions_are_counted_and_the_largest_come_first():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    answers = torch.tensor([0, 1, 1, 1, 2, 2])
    counts = evaluate.count_confusions(labels, answers, 3)
    assert counts.tolist() == [[1, 2, 0], [0, 1, 1], [0, 0, 1]]
    assert evaluate.largest_confusions(counts, "abc") == ["a taken for b: 2 of 3", "b taken for c: 1 of 2"]
    assert evaluate.largest_confusions(torch.eye(3, dtype=torch.int64), "abc") == []


def test_classes_are_matched_by_their_names(trained, photos, tmp_path, capsys):
    """Also if a folder has only some of them; another class is refused."""
    for shape in SHAPES[1:]:
        (tmp_path / "some" / shape).mkdir(parents=True)
        for path in (photos / shape).iterdir():
            (tmp_path / "some" / shape / path.name).write_bytes(path.read_bytes())
    _, labels = api.test_images(api.load(trained), str(tmp_path / "some"))
    assert labels.unique().tolist() == [1, 2]
    (tmp_path / "some" / "stripes").rename(tmp_path / "some" / "dots")
    with pytest.raises(ConfigError, match="has a class 'dots', and the weights know circles"):
        api.evaluate(trained, str(tmp_path / "some"))
    assert not capsys.readouterr().err
    digits = api.load(trained)
    digits.classes = ["0", "1", "2"]
    (tmp_path / "some" / "dots").rename(tmp_path / "some" / "2")
    (tmp_path / "some" / SHAPES[1]).rename(tmp_path / "some" / "1")
    assert api.test_images(digits, str(tmp_path / "some"))[1].unique().tolist() == [1, 2]
    assert not capsys.readouterr().err
    given = load_images(str(photos))
    write_npz(tmp_path / "numbers.npz", *given.arrays)
    assert api.test_images(api.load(trained), str(tmp_path / "numbers.npz"))[1].tolist() == given.test_labels.tolist()
    assert "do not name their classes: the numbers of classes are taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["a", "b"], None),
        (["a"], "class_names are <U1 [1], not 2 different texts"),
        (["a", "a"], "class_names are <U1 [2], not 2 different texts"),
        ([1, 2], "not 2 different texts"),
        (["a", "b\n"], "cannot be printed"),
    ],
)
def test_an_npz_file_may_name_its_classes(names, line, tmp_path):
    some = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = np.array([0, 1, 0, 1])
    path = tmp_path / "some.npz"
    np.savez(path, train_images=some, train_labels=labels, test_images=some, test_labels=labels, class_names=names)
    if line:
        assert line in refusal(path)
        return
    loaded = load_images(str(path))
    assert loaded.class_names == names
    assert loaded.shuffled().class_names == loaded.held_out(1).class_names == names


def test_an_array_of_another_size_is_refused_in_one_line(trained):
    with pytest.raises(ConfigError, match=r"^images are uint8 \[1, 480, 640, 3\]: give [^\n]*api.read_picture"):
        api.load(trained).predict(np.zeros((480, 640, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"^these are no images \(setting an array element[^\n]*: give uint8"):
        api.as_images([np.zeros((32, 32, 3), np.uint8), np.zeros((10, 10, 3), np.uint8)])


def test_an_export_takes_the_place_of_no_other_file(trained, capsys):
    before = trained.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        export.main([str(trained), str(trained)])
    assert "does not end with .onnx" in capsys.readouterr().err
    assert trained.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("logits", [False, True])
def test_an_onnx_file_predicts_as_the_model(logits, trained, photos, tmp_path):
    """It is one file, with named inputs and outputs and the classes' names."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    export.main([str(trained), str(tmp_path / "model.onnx"), *["--logits"] * logits])
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["images"]
    assert [each.name for each in session.get_outputs()] == ["logits" if logits else "probabilities"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(SHAPES)
    model = api.load(trained)
    for count in (1, 12):
        some = load_images(str(photos)).test_images[:count]
        (found,) = session.run(None, {"images": some})
        expected = model(torch.from_numpy(some)).detach() if logits else model.predict(some)
        assert np.allclose(found, expected, atol=1e-4)
