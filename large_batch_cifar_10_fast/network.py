"""The network of method, section 3: whitening, ghost batch norm, the small ResNet, and its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import GROUP

MOMENTUM, EPSILON = 0.1, 1e-5  # of the norms
WHITENING_FLOOR = 0.01  # added to the eigenvalues, so that faint directions are not blown up
WHITENING_IMAGES = 10_000
LABEL_SMOOTHING = 0.2
LOGIT_SCALE = 1 / 16
DTYPES = {"fp16": torch.float16, "bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Within it, bf16 keeps float32 weights and computes in bfloat16; the other precisions are their weights'."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class NormaliseGroups(torch.autograd.Function):
    """Subtract each group's mean, divide by its deviation, add the bias; x is [B, C, H, W], bias [C].

    Autograd would derive the same gradient, but keep and read the activations several times over, and memory
    traffic is half of a step's time. Here forward and backward each take one pass for sums and one for the
    result, and nothing is kept but x itself. Also returns means and variances, [groups, 1, C, 1, 1].
    """

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = x.unflatten(0, (-1, GROUP)).to(bias.dtype)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, correction=0)
        scale = torch.rsqrt(variance + EPSILON)
        ctx.save_for_backward(x, mean, scale)
        ctx.mark_non_differentiable(mean, variance)
        y = torch.addcmul(bias.view(-1, 1, 1) - mean * scale, groups, scale)
        # Flattened last, here and below: torch 2.11's compiler drops the gradient of an output whose last
        # operation is a cast that changes nothing.
        return y.to(x.dtype).flatten(0, 1), mean, variance

    @staticmethod
    def backward(ctx, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        x, mean, scale = ctx.saved_tensors
        groups, slope = (tensor.unflatten(0, (-1, GROUP)).to(mean.dtype) for tensor in (x, gradient))
        count = GROUP * x.shape[2] * x.shape[3]
        total = slope.sum((1, 3, 4), keepdim=True)
        along = ((slope * groups).sum((1, 3, 4), keepdim=True) - mean * total) * scale  # sum of slope * (y - bias)
        # scale * (slope - total / n - (y - bias) * along / n), gathered into one pass over slope and x
        by_x = -scale * scale * along / count
        constant = -scale * total / count - by_x * mean
        result = torch.addcmul(torch.addcmul(constant, slope, scale), groups, by_x)
        return result.to(x.dtype).flatten(0, 1), total.sum((0, 1, 3, 4))


class GhostNorm(nn.Module):
    """Batch norm in which every 16 images in a row are normalised by their own statistics.

    Small groups add the noise that lets large batches generalise. As no group reaches beyond a worker's
    batch, many workers can be computed as one larger batch. The scale is fixed at 1, the bias trained; bias
    and statistics are float32 (float64 if the input is). Takes and returns [B, C, H, W], B a multiple of 16.

    The running statistics follow the first `followed` groups of each batch: worker 0's. The method keeps them
    per group and averages them for evaluation; both steps are linear, so the average alone is kept.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.followed = 0
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            y, mean, variance = NormaliseGroups.apply(x, self.bias)
            if self.followed:
                self._follow(mean, variance, GROUP * x.shape[2] * x.shape[3])
            return y
        scale = torch.rsqrt(self.running_var + EPSILON)
        shift = self.bias - self.running_mean * scale
        return torch.addcmul(shift.view(-1, 1, 1), x.to(shift.dtype), scale.view(-1, 1, 1)).to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        unbiased = variance[: self.followed] * (count / (count - 1))
        self.running_mean.lerp_(mean[: self.followed].mean(0).flatten(), MOMENTUM)
        self.running_var.lerp_(unbiased.mean(0).flatten(), MOMENTUM)


def convolution(channels_in: int, channels_out: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False)


def normed(channels: int) -> nn.Sequential:
    return nn.Sequential(GhostNorm(channels), nn.CELU(0.3))


def halving(channels_in: int, channels_out: int) -> nn.Sequential:
    """Convolution, pooling, norm: pooling comes before the norm, which then has a quarter to do."""
    return nn.Sequential(convolution(channels_in, channels_out), nn.MaxPool2d(2), normed(channels_out))


class Residual(nn.Module):
    """x + f(f(x)), two blocks f of their own weights; no activation after the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            convolution(channels, channels), normed(channels), convolution(channels, channels), normed(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Network(nn.Module):
    """Images [B, 3, 32, 32] to logits [B, 10]; 6,570,880 trained parameters at width 64."""

    def __init__(self, filters: Tensor, width: int, seed: int) -> None:
        """`filters` [27, 3, 3, 3] are the whitening filters; `seed` alone determines the initial weights."""
        super().__init__()
        self.width = width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.prep = nn.Sequential(convolution(27, width, size=1), normed(width))
            self.layer1 = nn.Sequential(halving(width, 2 * width), Residual(2 * width))
            self.layer2 = halving(2 * width, 4 * width)
            self.layer3 = nn.Sequential(halving(4 * width, 8 * width), Residual(8 * width))
            self.head = nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * width, 10, bias=False))
        self.register_buffer("filters", filters.detach().clone())

    def forward(self, images: Tensor) -> Tensor:
        x = F.conv2d(images, self.filters, padding=1)
        return self.head(self.layer3(self.layer2(self.layer1(self.prep(x))))) * LOGIT_SCALE

    def restart(self, filters: Tensor, seed: int) -> None:
        """Begin again as if just made, in the same memory: what was compiled for it stays valid."""
        self.load_state_dict(Network(filters, self.width, seed).state_dict())

    def norms(self) -> list[GhostNorm]:
        return [module for module in self.modules() if isinstance(module, GhostNorm)]

    def follow(self, images: int) -> None:
        """Let the first `images` of the batches to come feed the running statistics; 0 for none."""
        for norm in self.norms():
            norm.followed = images // GROUP

    def cast(self, precision: str, device: torch.device) -> "Network":
        """Move to the device: half weights for fp16, float64 for fp64, float32 else; norms never in half."""
        dtype = DTYPES[precision]
        self.to(device, dtype, memory_format=torch.channels_last)
        if dtype == torch.float16:
            for norm in self.norms():
                norm.float()
        return self


def whitening_filters(images: Tensor) -> Tensor:
    """Filters [27, 3, 3, 3] whose outputs on these images are uncorrelated, of variance 1 or a little less.

    `images` [n, 32, 32, 3] are worker 0's, normalised and unpadded. The rows X are all their 3x3x3 patches;
    the eigenvectors of X'X / (n - 1), strongest first, are each divided by sqrt(eigenvalue + 0.01) (method,
    section 3). Computed in float32, or float64 if the images are; returned in the images' type.
    """
    dtype = torch.promote_types(images.dtype, torch.float32)
    patches = images[:WHITENING_IMAGES].unfold(1, 3, 1).unfold(2, 3, 1)  # [n, 30, 30, 3, 3, 3]
    rows = patches.reshape(-1, 27).to(dtype)
    eigenvalues, eigenvectors = torch.linalg.eigh(rows.T @ rows / (len(rows) - 1))
    filters = eigenvectors.T / (eigenvalues[:, None] + WHITENING_FLOOR).sqrt()
    return filters.flip(0).view(27, 3, 3, 3).to(images.dtype)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [B]: 0.8 x cross-entropy + 0.2 x mean over classes of -log p (method, section 4).

    Softened targets keep the network from growing ever surer of its training images. In float32 at least.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=LABEL_SMOOTHING)
