"""Write a trained network as one ONNX file, for other programs and languages.

    cifar10-fast export weights.pt model.onnx

It needs `pip install onnx onnxscript`. The input `images` is uint8 [n, 32, 32, 3] (RGB) for any n. The output
`probabilities` is float32 [n, classes], with the recipe's test-time augmentation. The file's metadata are `classes`
(class names as JSON) and `recipe`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..files import write_atomically
from ..lab.model import Classifier, load
from ..lab.options import read_options


def export_onnx(model: Classifier, path: Path) -> None:
    """Write a network to an ONNX file."""
    import onnx

    some = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    any_number = {0: torch.export.Dim("images", max=100_000)}
    with write_atomically(path.resolve()) as unfinished:
        program = torch.onnx.export(
            model,
            (some,),
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes=(any_number,),
            dynamo=True,
        )
        assert program is not None
        written = program.model_proto
        about = {"classes": json.dumps(model.classes), "recipe": str(model.about["recipe"])}
        onnx.helper.set_model_props(written, about)
        onnx.save(written, unfinished)


@dataclass(frozen=True)
class Command:
    """What to write."""

    weights: str  # file that --save wrote
    onnx: Path  # FILE.onnx
    program: str = ""  # FILE.py of a program of your own


def main(arguments: Sequence[str]) -> None:
    options = read_options(Command, __doc__, arguments)
    export_onnx(load(options.weights, options.program), options.onnx)
    print(options.onnx)
