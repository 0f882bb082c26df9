"""The lines of a log, each from one template: what writes it also reads it back."""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

NUMBER = r"nan|inf|\d+(?:\.\d+)?(?:e[-+]?\d+)?"
WHOLE = r"\d+"


@dataclass(frozen=True)
class Line:
    """A line whose `{name}` fields hold text, those with a format or `!r` numbers (`:d` whole ones)."""

    template: str

    def write(self, **values: object) -> str:
        return self.template.format(**values)

    def read(self, line: str) -> dict[str, str] | None:
        """The fields by name, as text; None if this is another line."""
        match = self._pattern.fullmatch(line.rstrip())
        return match.groupdict() if match else None

    @cached_property
    def _pattern(self) -> re.Pattern:
        pattern = ""
        for literal, name, spec, conversion in string.Formatter().parse(self.template):
            held = WHOLE if spec == "d" else NUMBER if spec or conversion else ".*?"
            field = f"(?P<{name}>{held})" if name else ""
            pattern += re.escape(literal) + field
        return re.compile(pattern)


HEAD = Line("# large_batch_cifar_10_fast {version}, commit {commit}, code {code}, {started}")
SOFTWARE = Line("# Python {python}, torch {torch}, CUDA {cuda}, cuDNN {cudnn}{nccl}")
WORLD = Line("# {workers:d} workers on {processes:d} process{plural}, {device}")
GPU = Line("# driver {driver}, clocks {clocks}")
DATA = Line("# data {images}: {train:d} training and {test:d} test images, SHA-256 {digest}")
RECIPE = Line("# recipe {recipe} {options}")
SETTINGS = Line("# settings {settings}")
CAMPAIGN = Line("# campaign {campaign}, {made:d} of {runs:d} runs made before")
RESTART = Line("# restart {restart:d} of {most:d}: {made:d} of {runs:d} runs made before")
UPLOAD = Line("Uploaded data to GPUs {upload:.3f}s")
WHITENING = Line("Compute patch whitening statistics:     {whitening:.3f}s")
# As published, with a fourth decimal for the accuracies: with three, runs over 94% cannot be counted.
RUN = Line(
    "Train acc {train_accuracy:.4f} loss {train_loss:.3f}, validation acc {validation_accuracy:.4f} "
    "loss {validation_loss:.3f} wall time {seconds:.3f}s"
)
TIMES = Line(
    "# wall time of the first run: upload {upload:.3f}s, preprocessing {preprocessing:.3f}s, "
    "whitening {whitening:.3f}s, training {training:.3f}s"
)
ASIDE = Line(
    "# not in it: the last validation {last_validation:.3f}s (with it {with_validation:.3f}s); "
    "peak memory {gib:.2f} GiB"
)
SLOWEST = Line("Maximum training time {maximum!r} median {median!r}")
LOWEST = Line("Lowest accuracy {lowest!r} median {median!r}")
REACHED = Line("{reached:d} runs reached 0.94 out of {total:d}")

EVALUATED = Line("validation acc {accuracy:.4f} loss {loss:.5f} of {weights}, {precision}, in {seconds:.3f}s")


def as_pairs(values: Mapping[str, object]) -> str:
    """`name=value name=value`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def from_pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", text))
