"""Python's door: train, load, predict, evaluate; and weights that earlier versions or other programs saved."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ALONE, CPU, REPO, TINY, run_here, write_npz
from torchvision.io import write_png

from large_batch_cifar_10_fast import ConfigError, api, apple2019
from large_batch_cifar_10_fast.core import fast
from large_batch_cifar_10_fast.core.devices import out_of_memory_hint
from large_batch_cifar_10_fast.images.shapes import draw_shapes
from large_batch_cifar_10_fast.lab import evaluate, log

pytestmark = pytest.mark.slow

MUON = ["--recipe", "muon", "--width", 4, "--batch_size", 100, "--epochs", 2, "--pixels", "24,32", "--kept", "1,0.5"]
SMALL = {
    "apple2019": ["--demo", *TINY[:-1], "--eval_stats", "average"],
    "muon": MUON,
    "page": ["--recipe", "page", "--width", 16, "--batch_size", 100, "--epochs", 1],
}


@pytest.fixture(scope="module", params=SMALL)
def saved(request, tiny_npz, tmp_path_factory):
    """Weights of a run, the options they were trained with, and the run's row."""
    folder = tmp_path_factory.mktemp("saved")
    options = [*SMALL[request.param], "--data", tiny_npz, "--no_compile", "--precision", "fp32"]
    run_here(*options, "--seed", 6, "--save", folder / "w.pt", "--out", folder)
    return folder / "w.pt", options, pd.read_csv(folder / "runs.tsv", sep="\t").iloc[0]


def test_saved_weights_alone_make_a_model_with_the_result_of_their_run(saved, tiny_npz, capsys):
    weights, _, row = saved
    score = api.evaluate(weights, tiny_npz)
    assert score.accuracy == row["validation_accuracy"]
    assert score.loss == pytest.approx(row["validation_loss"], rel=1e-6)
    evaluate.main([str(weights), "--data", str(tiny_npz)])
    assert f"accuracy {score.accuracy:.4f} ({score.correct} of {score.images} images)" in capsys.readouterr().out
    model = api.load(weights)
    images = torch.from_numpy(np.load(tiny_npz)["test_images"])
    assert (model.training, model.classes[3], model.about["recipe"]) == (False, "3", row["recipe"])
    probabilities = model.predict(images)
    assert torch.allclose(probabilities.sum(1), torch.ones(len(images)))
    right = (probabilities.argmax(1).numpy() == np.load(tiny_npz)["test_labels"]).sum()
    assert right == row["validation_count"]
    assert model(images).shape == (len(images), 10)


def test_the_page_on_use_of_the_model_is_right(saved, tmp_path, monkeypatch, capsys):
    """Its program predicts as our own code does, and exports a program for any number of images."""
    (program,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "use_the_model.md").read_text(), re.S)
    shutil.copy(saved[0], tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, image in zip(("one.png", "two.png"), images, strict=True):
        write_png(image, name)
    names = {}
    exec(program, names)
    model, images = api.load(saved[0]), images.permute(0, 2, 3, 1)
    shown = [f"{model.classes[p.argmax()]} {p.max():.3f}" for p in model.predict(images)]
    assert capsys.readouterr().out.splitlines() == shown
    exported = torch.export.load("model.pt2").module()
    for count in (2, 5):
        some = images[torch.arange(count) % 2]
        assert torch.allclose(exported(some), model(some), atol=1e-5)


def test_other_files_than_saved_weights_are_refused_in_one_line(saved, tmp_path):
    weights, _, _ = saved
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK" + weights.read_bytes()[:500])
    (tmp_path / "changed.pt").write_bytes(weights.read_bytes().replace(b"ctorch", b"cos\nys"))
    for name in ("absent.pt", "text.pt", "cut.pt", "changed.pt", "list.pt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be loaded \([^\n]*$"):
            api.load(tmp_path / name)
    content = torch.load(weights, weights_only=True)
    torch.save(content["weights"], tmp_path / "old.pt")
    with pytest.raises(ConfigError, match=r"old\.pt has weights alone, as earlier versions wrote them: read"):
        api.load(tmp_path / "old.pt")


def test_weights_of_a_program_of_ones_own_are_loaded_by_its_file(tiny_npz, tmp_path, capsys):
    """Stored texts are never executed: without the file nothing is loaded."""
    text = (REPO / "large_batch_cifar_10_fast" / "muon.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("nn.GELU()", "nn.SiLU()"))
    run_here("--recipe", tmp_path / "mine.py", *MUON[2:], "--data", tiny_npz, "--out", tmp_path, "--no_compile",
             "--precision", "fp32", "--save", tmp_path / "w.pt")  # fmt: skip
    with pytest.raises(ConfigError, match=r"is of a program mine: give its file, program='mine.py' \(--program\)"):
        api.load(tmp_path / "w.pt")
    capsys.readouterr()
    score = api.evaluate(tmp_path / "w.pt", tiny_npz, program=tmp_path / "mine.py")
    assert capsys.readouterr().err == ""
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert score.correct == row["validation_count"]
    assert score.loss == pytest.approx(row["validation_loss"], rel=1e-6)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("SiLU", "ELU"))
    api.load(tmp_path / "w.pt", program=tmp_path / "mine.py")
    assert re.search(r"^Warning: .*w.pt is of another version of mine.py or core/: .*\n$", capsys.readouterr().err)


def test_weights_of_the_third_edition_which_stored_lists_as_texts_are_loaded(tiny_npz, tmp_path):
    run_here(*MUON, "--data", tiny_npz, "--out", tmp_path, "--save", tmp_path / "w.pt", "--no_compile")
    content = torch.load(tmp_path / "w.pt", weights_only=True)
    content["options"] |= {"pixels": "24,32", "kept": "1,0.5"}
    torch.save(content, tmp_path / "old.pt")
    images = torch.from_numpy(np.load(tiny_npz)["test_images"])
    new = api.load(tmp_path / "w.pt")
    old = api.load(tmp_path / "old.pt")
    assert old.hyp == new.hyp
    assert torch.equal(old.predict(images), new.predict(images))


def test_images_of_twelve_classes_train_a_network_of_twelve_and_name_their_normalization(tmp_path, capsys):
    parts = draw_shapes(400, 20)
    parts[1][:] = np.arange(400) % 12
    parts[2][:3] = parts[0][:3]
    data = write_npz(tmp_path / "twelve.npz", *parts)
    weights = tmp_path / "w.pt"
    run_here(*MUON, "--data", data, "--out", tmp_path, "--save", weights, "--precision", "fp32")
    output = capsys.readouterr()
    assert re.search(r"# 12 classes, normalized by .* mean \(12\d\.", output.out)
    assert output.err.count("Warning: ") == output.err.count("3 of 20 test images are also training images") == 1
    assert api.load(weights)(torch.zeros(2, 32, 32, 3, dtype=torch.uint8)).shape == (2, 12)
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert api.evaluate(weights, data).loss == pytest.approx(row["validation_loss"], rel=1e-6)
    others = write_npz(data, *(part if part.ndim > 1 else part + 3 for part in draw_shapes(400, 20)))
    with pytest.raises(ConfigError, match=r"the weights know 12 classes, and .* has 13: give images of"):
        api.evaluate(weights, others)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        api.evaluate(tmp_path / "absent.pt", "/absent")  # no image is looked for before


def test_python_trains_as_the_command_line_does(tiny_npz, tmp_path):
    options = {"data": tiny_npz, "out": tmp_path, "precision": "fp32", "no_warmup": True, "no_compile": True}
    small = apple2019.DEMO | {"width": 4, "epochs": 1, "ema_ep": 0.5}
    rows = api.train(runs=2, campaign="one", resume=False, **small | options)
    assert rows[["run", "recipe"]].to_numpy().tolist() == [[0, "apple2019"], [1, "apple2019"]]
    again = tmp_path / "again.py"
    again.write_text((REPO / "large_batch_cifar_10_fast" / "apple2019.py").read_text())
    more = api.train(str(again), seed=1, campaign="two", **small | options)
    assert more["recipe"].tolist() == ["again"]
    assert more["validation_loss"][0] == rows["validation_loss"][1], "the same options and seed"
    muon = api.train("muon", width=4, batch_size=100, epochs=2, pixels=(24, 32), kept=(1, 0.5), **options)
    assert "pixels=24,32 kept=1,0.5 " in muon["options"][0]
    assert api.train(profile=1, **small | options).empty
    with pytest.raises(ConfigError, match="--runs 0 must lie in 1 to 100000"):
        api.train(**options, runs=0)


def test_weights_are_trained_and_saved_in_half_precision(tiny_npz, tmp_path):
    small = ["--demo", *TINY, "--epochs", 1, "--data", tiny_npz, "--precision", "fp16"]
    run_here(*small, "--out", tmp_path, "--save", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)["weights"]
    assert weights["prep.0.weight"].dtype == torch.float16
    row = pd.read_csv(tmp_path / "runs.tsv", sep="\t").iloc[0]
    assert (row["precision"], np.isfinite(row["train_loss"])) == ("fp16", True)


@pytest.mark.parametrize("words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", ""])
def test_running_out_of_memory_gives_a_hint_that_fits_what_was_done(words):
    error = RuntimeError(words) if words else torch.OutOfMemoryError()
    training = r"^training ran out of memory: raise --micro_batches"
    with pytest.raises(ConfigError, match=training), out_of_memory_hint("training"):
        raise error
    network = apple2019.Network(apple2019.Hyp(width=4), 10)
    evaluating = fast.evaluating(network, fast.Precision("fp32", CPU, half_weights=False), ALONE)
    hint = r"^evaluation ran out of memory: (?!.*--micro_batches).*--precision"
    with pytest.raises(ConfigError, match=hint), out_of_memory_hint("training"), evaluating:
        raise error


def test_what_an_evaluation_takes_leaves_room_on_small_gpus(monkeypatch):
    """An uncompiled fastai takes 1.6 MiB an image in fp32, the most of all recipes."""
    for gib in (2, 7.6, 15.8, 79):
        properties = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=properties: it)
        largest = fast.evaluation_chunks(10_000, torch.device("cuda", 0))[0]
        assert largest * 1.6 * 2**20 < 0.45 * properties.total_memory


def test_clocks_are_read_after_the_warm_up(tiny_npz, tmp_path, capsys, monkeypatch):
    asked = []
    found = {"driver": "550.54", "clocks": "SM 1980 MHz"}
    step = apple2019.NesterovSGD.step
    monkeypatch.setattr(apple2019.NesterovSGD, "step", lambda self: asked.append("step") or step(self))
    monkeypatch.setattr(log, "driver_and_clocks", lambda _: asked.append("clocks") or found)
    run_here(*SMALL["apple2019"], "--no_compile", "--data", tiny_npz, "--out", tmp_path)
    assert asked[:2] == ["step", "clocks"]
    assert "\n# driver 550.54, clocks SM 1980 MHz\nUploaded" in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "runs.tsv", sep="\t")["clocks"].tolist() == ["SM 1980 MHz"]
