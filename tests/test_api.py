"""Python's door: train, load, predict, evaluate; and weights that earlier versions or other programs saved."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ALONE, CPU, REPO, run_here, write_npz
from torchvision.io import write_png

from large_batch_cifar_10_fast import ConfigError, api, apple2019
from large_batch_cifar_10_fast.core import fast
from large_batch_cifar_10_fast.core.devices import out_of_memory_hint
from large_batch_cifar_10_fast.images.shapes import draw_shapes

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 100, "--epochs", 2, "--pixels", "24,32", "--kept", "1,0.5"]
MUON += ["--no_compile", "--precision", "fp32"]
SMALL = {"demo": True, "width": 4, "epochs": 1, "ema_ep": 0.5, "no_warmup": True}


@pytest.fixture(scope="module")
def weights(tiny_npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_here(*MUON, "--data", tiny_npz, "--seed", 6, "--save", folder / "w.pt", "--out", folder)
    return folder / "w.pt"


def row_of(folder):
    return pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


def test_saved_weights_alone_make_a_model_with_the_result_of_their_run(weights, tiny_npz):
    row = row_of(weights.parent)
    score = api.evaluate(weights, tiny_npz)
    assert score.accuracy == row["validation_accuracy"]
    assert score.loss == pytest.approx(row["validation_loss"], rel=1e-6)
    model = api.load(weights)
    images = torch.from_numpy(np.load(tiny_npz)["test_images"])
    assert (model.training, model.classes[3], model.about["recipe"]) == (False, "3", row["recipe"])
    probabilities = model.predict(images)
    assert torch.allclose(probabilities.sum(1), torch.ones(len(images)))
    right = (probabilities.argmax(1).numpy() == np.load(tiny_npz)["test_labels"]).sum()
    assert right == row["validation_count"]


def test_a_model_takes_bytes_of_32_x_32_pixels_as_tensors_arrays_or_one_image(weights):
    model = api.load(weights)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    expected = model.predict(torch.from_numpy(pixels))
    assert torch.equal(model.predict(pixels[:, ::-1].copy()[:, ::-1]), expected)
    assert torch.allclose(model.predict(pixels[1]), expected[1:2], atol=1e-6)
    for wrong, kind in (
        (pixels / 255, r"float64 \[3, 32, 32, 3\]"),
        (np.zeros((480, 640, 3), np.uint8), r"uint8 \[1, 480, 640, 3\]"),
        (np.zeros((2, 3, 32, 32), np.uint8), r"uint8 \[2, 3, 32, 32\]"),
    ):
        for take in (model.predict, model):
            with pytest.raises(ConfigError, match=rf"^images are {kind}: give bytes \(0 to 255\), uint8 \[n, 32, 32,"):
                take(wrong)
    for nothing in (pixels[:0], "one.png", [pixels[0], pixels[0, :10]]):
        with pytest.raises(ConfigError, match=r"no images"):
            model.predict(nothing)


def test_the_page_on_use_of_the_model_is_right(weights, tmp_path, monkeypatch, capsys):
    """Its program predicts as our own code does, and exports a program for any number of images."""
    (program,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "use_the_model.md").read_text(), re.S)
    shutil.copy(weights, tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, image in zip(("one.png", "two.png"), images, strict=True):
        write_png(image, name)
    exec(program, {})
    model, images = api.load(weights), images.permute(0, 2, 3, 1)
    shown = [f"{model.classes[p.argmax()]} {p.max():.3f}" for p in model.predict(images)]
    assert capsys.readouterr().out.splitlines() == shown
    exported = torch.export.load("model.pt2").module()
    for count in (2, 5):
        some = images[torch.arange(count) % 2]
        assert torch.allclose(exported(some), model(some), atol=1e-5)


def test_other_files_than_saved_weights_are_refused_in_one_line(weights, tmp_path):
    (tmp_path / "text.pt").write_text("weights")
    (tmp_path / "cut.pt").write_bytes(weights.read_bytes()[:500])
    (tmp_path / "hostile.pt").write_bytes(weights.read_bytes().replace(b"ctorch", b"cos\nys"))
    torch.save(torch.load(weights, weights_only=True)["weights"], tmp_path / "old.pt")
    for name in ("text.pt", "cut.pt", "hostile.pt", "old.pt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be loaded \([^\n]*$"):
            api.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        api.load(tmp_path / "absent.pt")


def test_weights_that_are_not_finite_are_loaded_with_a_warning(weights, tmp_path, capsys):
    content = torch.load(weights, weights_only=True)
    content["weights"]["members.0.linear.weight"][0, 0] = torch.nan
    torch.save(content, tmp_path / "old.pt")
    assert api.load(tmp_path / "old.pt").hyp == api.load(weights).hyp
    assert re.fullmatch(r"Warning: .*old.pt has numbers that are not finite, .*\n", capsys.readouterr().err)


def test_weights_of_a_program_of_ones_own_are_loaded_by_its_file(tiny_npz, tmp_path, capsys):
    """Stored texts are never executed: without the file nothing is loaded."""
    mine = tmp_path / "mine.py"
    text = (REPO / "large_batch_cifar_10_fast" / "muon.py").read_text().replace("nn.GELU()", "nn.SiLU()")
    mine.write_text(text)
    run_here("--recipe", mine, *MUON[2:], "--data", tiny_npz, "--out", tmp_path, "--save", tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"was saved by a program mine: give program='mine.py' \(--program\)"):
        api.load(tmp_path / "w.pt")
    capsys.readouterr()
    score = api.evaluate(tmp_path / "w.pt", tiny_npz, program=mine)
    assert capsys.readouterr().err == ""
    assert score.loss == pytest.approx(row_of(tmp_path)["validation_loss"], rel=1e-6)
    mine.write_text(text.replace("SiLU", "ELU"))
    api.load(tmp_path / "w.pt", program=mine)
    assert re.search(r"^Warning: .*w.pt was saved by another version of mine.py: .*\n$", capsys.readouterr().err)
    (stored,) = tmp_path.glob("runs/*/program/mine.py")
    mine.write_text(text.replace("4 * width", "3 * width"))
    with pytest.raises(ConfigError, match=r"w.pt cannot be loaded .*, and the program that wrote it \(--program\)$"):
        api.load(tmp_path / "w.pt", program=mine)
    assert api.evaluate(tmp_path / "w.pt", tiny_npz, program=stored) == score


def test_images_of_twelve_classes_train_a_network_of_twelve_and_name_their_normalization(tmp_path, capsys):
    parts = draw_shapes(400, 20)
    parts[1][:] = np.arange(400) % 12
    parts[2][:3] = parts[0][:3]
    data = write_npz(tmp_path / "twelve.npz", *parts)
    weights = tmp_path / "w.pt"
    run_here(*MUON, "--batch_size", 50, "--data", data, "--out", tmp_path, "--save", weights)
    output = capsys.readouterr()
    assert re.search(r"\n# classes 12 \(0, 1, 2, .*\n# normalization mean \(12\d\.", output.out)
    assert output.err.count("Warning: ") == output.err.count("3 of 20 test images are training images") == 1
    assert api.load(weights)(torch.zeros(2, 32, 32, 3, dtype=torch.uint8)).shape == (2, 12)
    assert api.evaluate(weights, data).loss == pytest.approx(row_of(tmp_path)["validation_loss"], rel=1e-6)
    parts[1][0] = 12
    with pytest.raises(ConfigError, match=r"the weights know 12 classes, and .* has 13: give images of"):
        api.evaluate(weights, write_npz(data, *parts))


def test_python_trains_as_the_command_line_does(tiny_npz, tmp_path, monkeypatch):
    """None is an option that is not given."""
    monkeypatch.chdir(tmp_path)
    small = SMALL | {"data": tiny_npz}
    rows = api.train(runs=2, resume=False, save=None, campaign=None, out=None, **small)
    assert rows[["run", "recipe"]].to_numpy().tolist() == [[0, "apple2019"], [1, "apple2019"]]
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{8}", rows["campaign"][0])
    assert not list(tmp_path.glob("None*"))
    words = [f"--{name}={value}" for name, value in small.items() if value is not True]
    run_here("--recipe", "apple2019", "--demo", *words, "--no_warmup", "--seed", 1, "--out", "other")
    assert row_of(tmp_path / "other")["validation_loss"] == rows["validation_loss"][1], "the same options and seed"
    with pytest.raises(ConfigError, match="--runs 0 must lie in 1 to 100000"):
        api.train(data=tiny_npz, runs=0)


def test_python_takes_a_path_of_a_program(tiny_npz, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((REPO / "tests" / "tiny.py").read_text())
    runs = api.train(mine, data=tiny_npz, out=tmp_path, no_warmup=True)
    assert runs["recipe"].tolist() == ["mine"]


@pytest.mark.parametrize("error", [RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), torch.OutOfMemoryError()])
def test_running_out_of_memory_gives_a_hint_that_fits_what_was_done(error):
    training = r"^training ran out of memory: use --no_graph"
    with pytest.raises(ConfigError, match=training), out_of_memory_hint("training"):
        raise error
    network = apple2019.Network(apple2019.Hyp(width=4), 10)
    evaluating = fast.evaluating(network, fast.Precision("fp32", CPU, half_weights=False), ALONE)
    hint = r"^evaluation ran out of memory: (?!.*--micro_batches).*--precision"
    with pytest.raises(ConfigError, match=hint), out_of_memory_hint("training"), evaluating:
        raise error
