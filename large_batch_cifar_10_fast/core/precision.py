"""Precision: in which types a network computes, by --precision, and TF32."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ConfigError
from .devices import text_of_file
from .layers import GhostBatchNorm

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """The data types of a network on a device, by --precision.

    With `half_weights`, fp16 uses fp16 weights. Without, and for bf16, autocast casts float32 weights.
    """

    name: str
    device: torch.device
    half_weights: bool

    @property
    def compute(self) -> torch.dtype:
        """The type in which convolutions and matrix products are computed."""
        return DTYPES[self.name]

    @property
    def weights(self) -> torch.dtype:
        mixed = self.name == "bf16" or (self.name == "fp16" and not self.half_weights)
        return torch.float32 if mixed else self.compute

    @property
    def images(self) -> torch.dtype:
        """The type of images: on a GPU that of computation, on a CPU that of the weights."""
        return self.compute if self.device.type == "cuda" else self.weights

    def autocast(self) -> torch.autocast:
        """Return a context in which operations compute in this precision, whatever the type of the weights."""
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != self.weights)


def choose_precision(asked: str, preferred: str, device: torch.device) -> str:
    """Return the requested precision, or by default the program's `preferred` one on a GPU, or a CPU's fastest.

    Raise ConfigError for bf16 or tf32 if the device lacks it.
    """
    if device.type != "cuda":
        if asked == "tf32":
            raise ConfigError("--precision tf32 is for GPUs: use --precision fp32")
        return asked or ("bf16" if is_fast_in_bf16() else "fp32")
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)  # and TF32
    if asked in ("bf16", "tf32") and not has_bf16:
        instead = "fp16" if asked == "bf16" else "fp32"
        raise ConfigError(f"--precision {asked} needs GPUs of compute capability 8.0 or later: use {instead}")
    return asked or (preferred if has_bf16 else "fp16")


def is_fast_in_bf16() -> bool:
    """Return whether this CPU multiplies faster in bfloat16: with AMX, or as an AMD CPU with AVX-512 bf16.

    On an Intel Xeon with AVX-512 alone, `muon_first` takes 1.4 times as long in bf16 (docs/performance.md).
    """
    facts = text_of_file("/proc/cpuinfo")
    return "amx_bf16" in facts or ("avx512_bf16" in facts and "AuthenticAMD" in facts)


def move(network: nn.Module, precision: Precision) -> None:
    """Move a network to the device, channels-last, in the type of weights. Norms stay in float32 at least."""
    allow_tf32(precision.name == "tf32")
    network.to(precision.device, precision.weights, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision.weights == torch.float16:
        for module in network.modules():
            if isinstance(module, GhostBatchNorm | nn.BatchNorm2d):
                module.float()


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32: sums and comparisons of half-precision logits often tie."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def allow_tf32(allowed: bool) -> None:
    """Set whether float32 convolutions and matrix products on a GPU use TF32. By default only convolutions do."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # torch.compile recommends them
