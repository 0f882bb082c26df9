"""Write a trained network as one ONNX file, for other programs and languages.

    cifar10-fast export weights.pt model.onnx

It needs `pip install onnx onnxscript`. The input `images` is uint8 [n, 32, 32, 3] (RGB) for any n. The output
`probabilities` is float32 [n, classes], with the recipe's test-time augmentation. With --logits, the output is `logits`
without test-time augmentation, which is faster. The file's metadata are `classes` (class names as JSON) and `recipe`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import ConfigError
from ..core import data
from ..files import write_atomically
from ..lab.model import Classifier, load
from ..lab.options import command_parser


class Probabilities(nn.Module):
    """Images uint8 [n, 32, 32, 3] to probabilities [n, C], with the test-time augmentation of the recipe."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        x = self.model.normalized(images).permute(0, 3, 1, 2)
        logits = data.average_over_views(self.model.network, x, self.model.hyp.views)
        return logits.softmax(1)


def export_onnx(model: Classifier, path: Path, logits: bool = False) -> None:
    """Write a network to an ONNX file. Raise ConfigError if packages are missing."""
    try:
        import onnx
        import onnxscript  # noqa: F401  # which torch needs
    except ImportError as error:
        raise ConfigError(f"ONNX needs a package ({error}): pip install onnx onnxscript") from error
    network = model if logits else Probabilities(model)
    some = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    any_number = {0: torch.export.Dim("images", max=100_000)}
    with write_atomically(path.resolve()) as unfinished:
        program = torch.onnx.export(
            network.eval(),
            (some,),
            input_names=["images"],
            output_names=["logits" if logits else "probabilities"],
            dynamic_shapes=(any_number,),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        written = program.model_proto
        about = {"classes": json.dumps(model.classes), "recipe": str(model.about["recipe"])}
        onnx.helper.set_model_props(written, about)
        onnx.save(written, unfinished)


def main(arguments: Sequence[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("weights", help="file that --save wrote")
    parser.add_argument("onnx", type=Path, metavar="FILE.onnx")
    parser.add_argument(
        "--logits", action="store_true", help="write logits without test-time augmentation, instead of probabilities"
    )
    parser.add_argument("--program", default="", help="FILE.py of a program of your own")
    options = parser.parse_args(arguments)
    export_onnx(load(options.weights, options.program), options.onnx, options.logits)
    print(options.onnx)
