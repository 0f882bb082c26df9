"""A trained network for use: saved weights with normalization, class names and test-time augmentation."""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import PROGRAMS, ConfigError, list_some
from ..core.data import normalize
from ..core.evaluation import average_over_views, predict, predict_all
from ..core.precision import Precision
from ..core.score import Score
from ..files import write_atomically, write_patiently
from ..images.load import load_images
from .options import make
from .program import load_program, sets_of
from .table import Row


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Row, for_use: Mapping[str, object]) -> None:
    """Write weights, the row of their run, and what else `Classifier` needs. If the disk is full, wait."""
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    content = io.BytesIO()  # if torch.save writes a file, its errors do not say why
    torch.save({"weights": on_cpu, "about": about, **for_use}, content)

    def write() -> None:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(content.getbuffer())

    write_patiently(write, f"{path}, the weights of run {about['run']},")


class Classifier(nn.Module):
    """A trained network: uint8 images [n, 32, 32, 3] to probabilities [n, C], with the recipe's test-time augmentation.

    `classes` are the names of the C classes; `hyp` its hyper-parameters; `about` the row of its run in runs.tsv.
    """

    def __init__(self, saved: dict[str, Any], program: ModuleType) -> None:
        super().__init__()
        self.classes = saved["classes"]
        self.normalization = saved["normalization"]
        self.about = saved["about"]
        self.hyp = make(sets_of(program).get(self.about["recipe"], program.Hyp), saved["options"])
        self.losses_of = program.losses_of
        self.network = program.Network(self.hyp, len(self.classes))
        self.network.load_state_dict(saved["weights"])
        self.network.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Compute all images at once, for other programs."""
        x = self.normalized(images).permute(0, 3, 1, 2)
        return average_over_views(self.network, x, self.hyp.views).softmax(1)

    def normalized(self, images: Tensor) -> Tensor:
        """Normalize images as for training."""
        own = images.clone()  # which is changed in place if it is float32
        return normalize(own, self.normalization, Precision("fp32", images.device, half_weights=False))

    @torch.no_grad()
    def logits(self, images: Tensor | np.ndarray) -> Tensor:
        """Return logits [n, C], with the recipe's test-time augmentation.

        Raise ConfigError unless images are uint8 [n, 32, 32, 3], or one [32, 32, 3].
        """
        images = as_images(images).to(next(self.network.parameters()).device)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # by default convolutions may use TF32
            return predict_all(partial(predict, self.network), self.normalized(images), self.hyp.views)

    def predict(self, images: Tensor | np.ndarray) -> Tensor:
        """Return probabilities [n, C] of images [n, 32, 32, 3], from the same logits."""
        return self.logits(images).softmax(1)


def as_images(images: Any) -> Tensor:
    """Return a tensor of images [n, 32, 32, 3], also from an array, a picture or a single image. Raise ConfigError."""
    tensor = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
    if tensor.ndim == 3:
        tensor = tensor[None]
    if tensor.dtype != torch.uint8 or tensor.shape[1:] != (32, 32, 3):
        raise ConfigError(f"images are {tensor.dtype} {list(tensor.shape)}: give uint8 [n, 32, 32, 3] of RGB")
    return tensor


def load(weights: Path | str, program: Path | str = "") -> Classifier:
    """Return the network that --save wrote, on the CPU, in float32 and evaluation mode.

    `program` is the file of a program of your own. Raise ConfigError if `weights` are no such file.
    """
    try:
        saved = torch.load(weights, map_location="cpu", weights_only=True)
        name = saved["about"]["recipe"]
        if not program and name not in PROGRAMS:
            raise ConfigError(f"{weights} was saved by a program {name}: give program='{name}.py' (--program)")
        code = load_program(str(program or name))
        model = Classifier(saved, code)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # torch raises nearly anything for a damaged file, or another program's weights
        how = "give a file that --save wrote, and the program that wrote it (--program)"
        raise ConfigError(f"{weights} cannot be loaded ({type(error).__name__}): {how}") from error
    return model.eval()


def test_images(model: Classifier, data: str) -> tuple[Tensor, Tensor]:
    """Return the test images of `data`, uint8 [n, 32, 32, 3], and their labels as indices of the model's classes.

    Classes are matched by name, or by number if one side has no names. Raise ConfigError if that is impossible.
    """
    images = load_images(data)
    labels = torch.from_numpy(images.test_labels)
    names = images.class_names
    if has_names(names) and has_names(model.classes):  # perhaps in another order, or only some of the model's
        unknown = [name for name in names if name not in model.classes]
        if unknown:
            raise ConfigError(f"{data} has classes that the weights do not know: {list_some(unknown, 5)}")
        labels = torch.tensor([model.classes.index(name) for name in names])[labels]
    elif len(names) > len(model.classes):
        raise ConfigError(f"{data} has {len(names)} classes, and the weights know {len(model.classes)}")
    return torch.from_numpy(images.test_images), labels


def has_names(classes: Sequence[str]) -> bool:
    """Return whether classes have other names than their numbers."""
    return list(classes) != [str(number) for number in range(len(classes))]


def score(model: Classifier, logits: Tensor, labels: Tensor) -> Score:
    """Return the score of logits [n, C] for images of these classes [n]."""
    labels = labels.to(logits.device)
    loss = model.losses_of(model.hyp, logits, labels).mean()
    correct = int((logits.argmax(1) == labels).sum())
    return Score(correct, len(labels), float(loss))
