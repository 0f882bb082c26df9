"""Python's door: train, load, predict, evaluate; and weights that earlier versions or other programs saved."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REPO, run_here, write_npz
from torchvision.io import write_png

from large_batch_cifar_10_fast import ConfigError, api
from large_batch_cifar_10_fast.images.shapes import draw_shapes

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 100, "--epochs", 2, "--pixels", "24,32", "--kept", "1,0.5"]
MUON += ["--no_compile", "--precision", "fp32"]


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
    for wrong in (pixels / 255, np.zeros((2, 3, 32, 32), np.uint8)):
        with pytest.raises(ConfigError, match="give uint8"):
            model.predict(wrong)


def test_the_page_on_use_of_the_model_is_right(weights, tmp_path, monkeypatch, capsys):
    """Its program predicts as our own code does, and exports a program for any number of images."""
    program, _ = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "use_the_model.md").read_text(), re.S)
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


def test_other_files_than_saved_weights_are_refused_in_one_line_and_nothing_is_unpickled(weights, tmp_path):
    path = tmp_path / "other.pt"
    for content in (b"weights", weights.read_bytes()[:500]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"other.pt cannot be loaded \([^\n]*$"):
            api.load(path)
    torch.save({"about": print}, path)
    with pytest.raises(ConfigError, match=r"other.pt cannot be loaded \(UnpicklingError\)[^\n]*$"):
        api.load(path)


def test_weights_of_a_program_of_ones_own_are_loaded_by_its_file(tiny_npz, tmp_path, capsys):
    """Stored texts are never executed: without the file nothing is loaded."""
    mine = tmp_path / "mine.py"
    weights = tmp_path / "w.pt"
    text = (REPO / "large_batch_cifar_10_fast" / "muon.py").read_text().replace("nn.GELU()", "nn.SiLU()")
    mine.write_text(text)
    run_here("--recipe", mine, *MUON[2:], "--data", tiny_npz, "--out", tmp_path, "--save", weights)
    with pytest.raises(ConfigError, match=r"give program='mine.py'"):
        api.load(weights)
    capsys.readouterr()
    score = api.evaluate(weights, tiny_npz, program=mine)
    assert capsys.readouterr().err == ""
    assert score.loss == pytest.approx(row_of(tmp_path)["validation_loss"], rel=1e-6)
    mine.write_text(text.replace("4 * width", "3 * width"))
    with pytest.raises(ConfigError, match=r"w.pt cannot be loaded"):
        api.load(weights, program=mine)
    (stored,) = tmp_path.glob("source/*/mine.py")
    assert api.evaluate(weights, tiny_npz, program=stored) == score


def test_images_of_twelve_classes_train_a_network_of_twelve(tmp_path, capsys):
    parts = draw_shapes(400, 20)
    parts[1][:] = np.arange(400) % 12
    parts[2][:3] = parts[0][:3]
    data = write_npz(tmp_path / "twelve.npz", *parts)
    weights = tmp_path / "w.pt"
    run_here(*MUON, "--batch_size", 50, "--data", data, "--out", tmp_path, "--save", weights)
    assert capsys.readouterr().err.count("3 of 20 test images are training images") == 1
    assert len(api.load(weights).classes) == 12
    assert api.evaluate(weights, data).loss == pytest.approx(row_of(tmp_path)["validation_loss"], rel=1e-6)
    parts[1][0] = 12
    with pytest.raises(ConfigError, match=r"has 13 classes, and the weights know 12"):
        api.evaluate(weights, write_npz(data, *parts))


def test_python_trains_as_the_command_line_does(tiny_npz, tmp_path, monkeypatch):
    """None is an option that is not given. A recipe may be the path of a program."""
    monkeypatch.chdir(tmp_path)
    program = shutil.copy(REPO / "tests" / "tiny.py", tmp_path)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    rows = api.train(program, runs=2, data=tiny_npz, resume=False, save=None, campaign=None, no_warmup=True)
    assert rows[["run", "recipe"]].to_numpy().tolist() == [[0, "tiny"], [1, "tiny"]]
    assert torch.equal(torch.rand(2), expected), "training uses its own random numbers"
    assert not list(tmp_path.glob("None*"))
    run_here("--recipe", program, "--data", tiny_npz, "--no_warmup", "--seed", 1, "--out", "other")
    assert row_of(tmp_path / "other")["validation_loss"] == rows["validation_loss"][1], "the same options and seed"
    with pytest.raises(ConfigError, match="--runs 0 must lie in 1 to 100000"):
        api.train(runs=0)
