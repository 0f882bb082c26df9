"""Today's recipe for CIFAR-10: a small network trained with Muon, in one file for one GPU or a CPU.

    python minimal/muon.py                                # downloads CIFAR-10 to ./data
    python minimal/muon.py --data cifar10.npz --runs 5    # train_images, train_labels, test_images, test_labels

A run takes 0.174 PFLOP; the method of 2019 (apple2019.py) takes 2.01. On JPEG-compressed images, which cost about three
points, it reaches 90.83% (the package's runs on CPUs: 95% confidence interval [90.74, 90.91], n = 12, bf16). On the
original images the recipe that it started from (airbench94, 2024) reaches 94.01% in 2.59 s on an A100 (n = 200); this
one has not been measured on them. STDOUT has the published log's lines, timing_log.tsv the first run.

References are to docs/recipes.md and docs/method.md. A line that ends with `# without X: ...` says how to train without
trick X: delete the line, or put the code after the colon in its place.
"""

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

hyp = SimpleNamespace(
    epochs=9,  # passes over the training images
    batch_size=2000,  # images in a step
    width=64,  # channels of the first group of convolutions; the others have four times as many
    filter_rate=0.24,  # Muon's learning rate in the first step
    filter_momentum=0.6,  # Muon's momentum
    bias_rate=0.053,  # SGD's learning rates in the first step, for the sum of a batch's losses
    head_rate=0.67,
    momentum=0.85,  # SGD's momentum
    weight_decay=2e-6,  # SGD's, multiplied by batch_size and divided by the rate
    norm_momentum=0.4,  # weight of a new batch in the running statistics
    padding=2,  # pixels by which a crop is shifted, at most
    # Once the bias is frozen, the backward pass ends before the first layer: 4% less work (recipes.md, muon).
    whitening_epochs=1,  # that train the whitening's bias  # without freezing: whitening_epochs=9,
    # Weights stop growing once the right class is likely, which limits overfitting (method.md, section 4).
    label_smoothing=0.2,  # part of a label spread over all classes  # without label smoothing: label_smoothing=0.0,
    # Coarse features are learned first and need few pixels; a step at 24 has half of the work (recipes.md, muon).
    resolution=4 * [24] + 5 * [32],  # pixels a side, by epoch  # without low resolution first: resolution=9 * [32],
    # Late epochs skip the easiest third: images whose loss was lowest when last seen teach little (recipes.md, muon).
    keep_fraction=5 * [1.0] + 4 * [0.68],  # of the images, by epoch  # without hard examples: keep_fraction=9 * [1.0],
)
MEAN, STD = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # of red, green and blue in CIFAR-10, 0 to 255
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def load(path: str) -> list[np.ndarray]:
    """Return training images uint8 [N, 32, 32, 3] and labels [N], test images and labels."""
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in ("train_images", "train_labels", "test_images", "test_labels")]
    sets = [CIFAR10(path, train, download=True) for train in (True, False)]
    return [np.ascontiguousarray(array) for part in sets for array in (part.data, part.targets)]


def prepare(arrays: list[np.ndarray], dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """Return training images [N, 36, 36, 3] and labels, test images [M, 32, 32, 3] and labels, and whitening filters;
    and the seconds of upload, preprocessing and whitening. They count as training time (method.md, section 6)."""
    start = now()
    images, labels, test_images, test_labels = (torch.from_numpy(array).to(DEVICE) for array in arrays)
    uploaded = now()
    weight_dtype = torch.promote_types(dtype, torch.float32)
    mean, std = (torch.tensor(values, dtype=weight_dtype, device=DEVICE) for values in (MEAN, STD))
    images, test_images = (x.to(weight_dtype).sub_(mean).div_(std).to(dtype) for x in (images, test_images))
    reflected = torch.arange(-hyp.padding, 32 + hyp.padding, device=DEVICE).abs()
    reflected = 31 - (31 - reflected).abs()
    padded = images[:, reflected[:, None], reflected]
    preprocessed = now()
    filters = whitening_filters(images[:5000].to(weight_dtype))
    seconds = [uploaded - start, preprocessed - uploaded, now() - preprocessed]
    return [padded, labels.long(), test_images, test_labels.long(), filters], seconds


def whitening_filters(images: Tensor) -> Tensor:
    """Return filters [24, 3, 2, 2] whose outputs on images [n, 32, 32, 3] are uncorrelated, with variance near 1."""
    patches = images.unfold(1, 2, 1).unfold(2, 2, 1).reshape(-1, 12)  # 961 of an image; channel, row, column
    values, vectors = torch.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    filters = (vectors.T / (values[:, None] + 5e-4).sqrt()).flip(0).view(12, 3, 2, 2)  # largest eigenvalue first
    return torch.cat([filters, -filters])  # both signs, since GELU suppresses negative values


class Group(nn.Module):
    """Two 3x3 convolutions with norms and GELU, from [B, C, S, S] to [B, D, S // 2, S // 2]."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out, eps=1e-12, momentum=hyp.norm_momentum)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, bias=False, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out, eps=1e-12, momentum=hyp.norm_momentum)
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            norm.weight.requires_grad_(False)  # the scale stays 1
            # The first filters are the identity, so that the image reaches the head from the first step on.
            nn.init.dirac_(conv.weight.data[: conv.in_channels])  # without identity filters: pass

    def forward(self, x: Tensor) -> Tensor:
        # Pooling drops the last row and column of an odd side: 11% of the work at 32 pixels (recipes.md, muon).
        end = 1 - x.shape[-1] % 2  # without skipping rows: end = 1
        x = self.conv1(F.pad(x, (1, end, 1, end)))
        x = F.gelu(self.norm1(F.max_pool2d(x, 2)))  # pooling before the norm leaves it a quarter of the work
        return F.gelu(self.norm2(self.conv2(x)))


class Network(nn.Module):
    """Map images [B, 3, H, W] to logits [B, 10]; 1,971,352 trained parameters, 0.211 GFLOP forward at 32x32."""

    def __init__(self) -> None:
        super().__init__()
        w = hyp.width
        self.whitening = nn.Conv2d(3, 24, 2)
        self.groups = nn.Sequential(Group(24, w), Group(w, 4 * w), Group(4 * w, 4 * w))
        self.head = nn.Linear(4 * w, 10, bias=False)
        self.head.weight.data /= self.head.weight.data.std()

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whitening(images)))
        logits = self.head(F.adaptive_max_pool2d(x, 1).flatten(1)) / 256
        return logits.to(self.head.weight.dtype)  # half-precision logits would tie


def plan_epoch(last_losses: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows of images, crop offsets (0..24) and flips (0, 1) of each step: int64 [steps, 3, B].

    `last_losses` [N] are the images' losses when last seen, at first infinite. Epochs count from 1.
    """
    count, keep = len(last_losses), hyp.keep_fraction[epoch - 1]
    keys = (seed, 0, epoch), (seed, 0, 0)  # seed, worker (there is one), epoch; epoch 0 is for draws of the whole run
    states = [np.random.SeedSequence(key).generate_state(1, np.uint64)[0] for key in keys]
    draws, run_draws = (torch.Generator(DEVICE).manual_seed(int(state >> 1)) for state in states)
    crops = torch.randint((2 * hyp.padding + 1) ** 2, (count,), generator=draws, device=DEVICE)
    flips = torch.randint(2, (count,), generator=draws, device=DEVICE)
    # An image is mirrored at random in the first epoch, then in every other one: two epochs show both of its sides.
    # Independent flips show one side of half of the images twice (recipes.md, muon2024).
    alternating = torch.randint(2, (count,), generator=run_draws, device=DEVICE)
    flips = (alternating + epoch) % 2  # without alternating flip: delete this line
    order = torch.randperm(count, generator=draws, device=DEVICE)
    used = round(count * keep) // hyp.batch_size * hyp.batch_size  # the remaining images are dropped
    if keep < 1:
        order = order[last_losses[order].topk(used, sorted=False).indices.sort().values]  # the hardest, still shuffled
    plan = torch.stack([order, crops[order], flips[order]])[:, :used]
    return plan.unflatten(1, (-1, hyp.batch_size)).transpose(0, 1)


def crop_and_flip(images: Tensor, rows: Tensor, crops: Tensor, flips: Tensor, resolution: int) -> Tensor:
    """Gather rows of images [N, 36, 36, 3] as a batch [B, 3, resolution, resolution], channels last."""
    offsets, pixels = 2 * hyp.padding + 1, torch.arange(32, device=DEVICE)
    y = (crops // offsets)[:, None] + pixels
    x = (crops % offsets)[:, None] + torch.where(flips[:, None] == 1, pixels.flip(0), pixels)
    batch = images[rows[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)
    return batch if resolution == 32 else F.interpolate(batch, (resolution, resolution), mode="bilinear")


@torch.no_grad()
def muon(filters: list[Tensor], momenta: list[Tensor], rate: float, dtype: torch.dtype) -> None:
    """Update filters [out, in, h, w] and their momenta: Nesterov momentum with orthogonalized updates,

        m = 0.6 m + g;  w = w * sqrt(out) / |w|;  w = w - rate * orthogonalize(g + 0.6 m)

    All directions of an update have about the same size, so that rare ones are learned, too (recipes.md, muon2024).
    """
    for w, m in zip(filters, momenta, strict=True):
        m.mul_(hyp.filter_momentum).add_(w.grad)  # type: ignore[arg-type]
        update = orthogonalize((w.grad + hyp.filter_momentum * m).flatten(1), dtype).view_as(w)
        # With a fixed norm the rate alone decides how far a step turns a filter. It takes the place of weight decay.
        w.mul_(len(w) ** 0.5 / w.norm())  # without the filters' norm: delete this line
        w.sub_(rate * update)


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V' of a matrix [out, rest] = U S V' (singular values), by Newton-Schulz iteration in `dtype`."""
    x = (matrix / matrix.norm()).to(dtype)
    for _ in range(3):  # moves singular values in (0, 1] towards 1, until most lie between 0.7 and 1.2
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.to(matrix.dtype)


def make_sgd(network: Network) -> torch.optim.SGD:
    """Return SGD for biases and head. The rate of a group falls from `first_rate` to 0 over its `epochs`."""
    trained = [w for w in network.parameters() if w.requires_grad and w is not network.whitening.bias]
    biases, head = ([w for w in trained if w.ndim == ndim] for ndim in (1, 2))
    groups = [
        {"params": biases, "first_rate": hyp.bias_rate, "epochs": hyp.epochs},
        {"params": [network.whitening.bias], "first_rate": hyp.bias_rate, "epochs": hyp.whitening_epochs},
        {"params": head, "first_rate": hyp.head_rate, "epochs": hyp.epochs},
    ]
    groups = [g | {"weight_decay": hyp.weight_decay * hyp.batch_size / g["first_rate"]} for g in groups]
    return torch.optim.SGD(groups, momentum=hyp.momentum, nesterov=True)


def losses_and_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each image [B], and on the device the number of correct images and the sum of losses [2]."""
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=hyp.label_smoothing)
    return losses, torch.stack([(logits.argmax(1) == labels).sum(), losses.detach().sum()])


@torch.no_grad()
def evaluate(network: Network, images: Tensor, labels: Tensor, last: bool) -> list[float]:
    """Return accuracy and mean loss on test images [M, 32, 32, 3]."""
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for x, y in zip(images.permute(0, 3, 1, 2).split(1000), labels.split(1000), strict=True):
        views = [(x, 1.0)]
        if last:  # without six views: if False:
            # These views have the same class, and their mean is wrong less often: by 1.1 points (recipes.md, muon).
            up_left = F.pad(x, (0, 1, 0, 1), "reflect")[:, :, 1:, 1:]
            down_right = F.pad(x, (1, 0, 1, 0), "reflect")[:, :, :-1, :-1]
            views = [(x, 1 / 4), (up_left, 1 / 8), (down_right, 1 / 8)]
            views += [(view.flip(3), weight) for view, weight in views]
        sums += losses_and_sums(sum(weight * network(view) for view, weight in views), y)[1]
    network.train()
    return (sums / len(labels)).tolist()


def train(seed: int, data: list[Tensor], dtype: torch.dtype, seconds: float) -> tuple[nn.Module, list[list[float]]]:
    """Return a trained network, and for each epoch: seconds until then, from those given; training accuracy and loss;
    test accuracy and loss."""
    images, labels, test_images, test_labels, whitening = data
    autocast = torch.autocast(DEVICE.type, dtype, enabled=dtype != whitening.dtype)
    torch.manual_seed(seed)
    network = Network()
    network.to(DEVICE, whitening.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Neighbouring pixels are alike. Filters that decorrelate them let all directions be learned at one rate, and spare
    # the first layer its training (recipes.md, muon2024). Without this line Muon trains it.
    network.whitening.weight.requires_grad_(False).copy_(whitening)  # without whitening: delete this line
    filters: list[Tensor] = [w for w in network.parameters() if w.requires_grad and w.ndim == 4]
    momenta, sgd = [torch.zeros_like(w) for w in filters], make_sgd(network)
    last_losses, log = torch.full((len(images),), torch.inf, device=DEVICE), []
    for epoch in range(1, hyp.epochs + 1):
        start, sums = now(), torch.zeros(2, dtype=torch.float64, device=DEVICE)
        network.whitening.bias.requires_grad_(epoch <= hyp.whitening_epochs)  # type: ignore[union-attr]
        plan = plan_epoch(last_losses, seed, epoch)
        for step, (rows, crops, flips) in enumerate(plan, 1):
            x, y = crop_and_flip(images, rows, crops, flips, hyp.resolution[epoch - 1]), labels[rows]
            with autocast:
                logits = network(x)
            losses, of_step = losses_and_sums(logits, y)
            losses.sum().backward()
            elapsed = epoch - 1 + step / len(plan) - hyp.batch_size / 50_000  # epochs; 0 in the first step
            muon(filters, momenta, hyp.filter_rate * (1 - elapsed / hyp.epochs), dtype)
            for group in sgd.param_groups:
                group["lr"] = group["first_rate"] * max(0, 1 - elapsed / group["epochs"])
            sgd.step()
            network.zero_grad()
            last_losses[rows] = losses.detach().float()
            sums += of_step
        seconds += now() - start
        with autocast:
            test = evaluate(network, test_images, test_labels, last=epoch == hyp.epochs)
        log.append([seconds, *(sums / (len(plan) * hyp.batch_size)).tolist(), *test])
    return network, log


def now() -> float:
    """Return the time in seconds, when the device has finished (method.md, section 6)."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    bf16 = GPU and torch.cuda.is_bf16_supported(including_emulation=False)
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data", help="folder of CIFAR-10, or FILE.npz")
    parser.add_argument("--out", default=".", type=Path, help="folder for timing_log.tsv")
    parser.add_argument("--runs", default=1, type=int)
    parser.add_argument("--seed", default=0, type=int, help="of the first run; the next has the next")
    parser.add_argument("--precision", default="bf16" if bf16 else "fp16" if GPU else "fp32", choices=precisions)
    args = parser.parse_args()
    dtype, arrays = precisions[args.precision], load(args.data)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False
    if GPU:  # train on some images, so that kernels are chosen before the clock starts
        train(0, prepare([array[: 2 * hyp.batch_size] for array in arrays], dtype)[0], dtype, 0)
    data, seconds = prepare(arrays, dtype)
    print(f"Uploaded data to GPUs {seconds[0]:.3f}s\n# Preprocessed it {seconds[1]:.3f}s")
    print(f"Compute patch whitening statistics:     {seconds[2]:.3f}s", flush=True)
    runs = []
    for run in range(args.runs):
        epochs = train(args.seed + run, data, dtype, sum(seconds))[1]
        runs.append(epochs[-1])
        line = "Train acc {1:.4f} loss {2:.3f}, validation acc {3:.4f} loss {4:.3f} wall time {0:.3f}s"
        print(line.format(*epochs[-1]), flush=True)
        if run == 0:
            rows = [f"{n}\t{epoch[0] / 3600}\t{100 * epoch[3]:.6g}\n" for n, epoch in enumerate(epochs, 1)]
            (args.out / "timing_log.tsv").write_text("epoch\thours\ttop1Accuracy\n" + "".join(rows))
    times, accuracies = ([epoch[column] for epoch in runs] for column in (0, 3))
    print(f"Maximum training time {max(times)} median {statistics.median(times)}")
    print(f"Lowest accuracy {min(accuracies)} median {round(statistics.median(accuracies), 6)}")
    print(f"{sum(accuracy >= 0.94 for accuracy in accuracies)} runs reached 0.94 out of {args.runs}")


if __name__ == "__main__":
    main()
