"""CIFAR-10 to 94% with eight workers of 256 images: the method of December 2019, in one file.

    python minimal/apple2019.py                         # one process computes all eight workers
    torchrun --nproc_per_node 8 minimal/apple2019.py    # 2, 4 or 8 processes, each with a GPU

Published: 41 of 50 runs reach 94% (lowest 93.74%, median 94.19%), in 7.885 seconds on average on eight V100s. Sections
are those of docs/method.md. To train without trick X, edit the line with `# without X: ...` as it says: delete it, or
write the code after the colon instead.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

hyp = SimpleNamespace(
    workers=8,  # replicas of the network, each with its own training images
    batch_size=256,  # images of a worker in a step
    ghost_groups=16,  # parts of a worker's batch, each with its own norm statistics
    width=64,  # channels of the first block
    epochs=18,  # passes over the training images
    warmup=1 / 5,  # part of the epochs before the learning rate peaks
    constant=1 / 9,  # part of the epochs at the end with a constant rate: the last two
    peak_rate=1.5,  # learning rate; divided by batch_size, since the loss is a sum over a worker's batch
    end_rate=0.15,
    momentum=0.9,
    weight_decay=5e-4 * 1.5,  # multiplied by batch_size, since the rate is divided by it
    bias_factor=64,  # multiplies the rate of biases, and divides their decay
    label_smoothing=0.2,  # part of a label that is spread over all classes
)

# torchrun sets these variables. Process p of P has workers p, p + P, p + 2P, ... and computes them as one larger batch.
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORKERS = range(RANK, hyp.workers, PROCESSES)
assert hyp.workers % PROCESSES == 0, f"{hyp.workers} workers cannot be split over {PROCESSES} processes"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")


def load(path: str) -> list[np.ndarray]:
    """Return training images uint8 [N, 32, 32, 3] and labels [N], test images and labels. 8 divides both numbers."""
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            arrays = [file[name] for name in ("train_images", "train_labels", "test_images", "test_labels")]
    else:
        if RANK == 0:
            CIFAR10(path, download=True)
        now()  # the other processes wait for the download
        sets = [CIFAR10(path, train) for train in (True, False)]
        arrays = [np.ascontiguousarray(array) for part in sets for array in (part.data, part.targets)]
    return [array[: len(array) // hyp.workers * hyp.workers] for array in arrays]


def prepare(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """Upload, normalize and pad this process's images. Return training images [n, 40, 40, 3] and labels, test images
    [m, 32, 32, 3] and labels, and whitening filters; and the seconds of the three parts, which count (section 6)."""
    start = now()
    # Worker r has training images r, r + 8, r + 16, ... in all epochs (section 2), so process p of P has every Pth.
    images, labels, test_images, test_labels = (torch.tensor(a[RANK::PROCESSES], device=DEVICE) for a in arrays)
    uploaded = now()
    mean, std = torch.tensor([(125.31, 122.95, 113.87), (62.99, 62.09, 66.70)], dtype=dtype, device=DEVICE)
    images, test_images = ((x.to(dtype) - mean) / std for x in (images, test_images))
    padded = F.pad(images.permute(0, 3, 1, 2), [4] * 4, mode="reflect").permute(0, 2, 3, 1).contiguous()
    preprocessed = now()
    filters = whitening_filters(images[:: len(WORKERS)][:10_000])
    if PROCESSES > 1:
        dist.broadcast(filters, src=0)  # those of worker 0
    seconds = [uploaded - start, preprocessed - uploaded, now() - preprocessed]
    return [padded, labels.long(), test_images, test_labels.long(), filters], seconds


def whitening_filters(images: Tensor) -> Tensor:
    """Return filters [27, 3, 3, 3] whose outputs on images [n, 32, 32, 3] are uncorrelated, with variance near 1."""
    patches = images.unfold(1, 3, 1).unfold(2, 3, 1).reshape(-1, 27)  # pixels of a patch by channel, row, column
    patches = patches.to(torch.promote_types(images.dtype, torch.float32))
    eigenvalues, eigenvectors = torch.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    return (eigenvectors / (eigenvalues + 0.01).sqrt()).T.flip(0).reshape(27, 3, 3, 3)  # largest eigenvalue first


class GhostNorm(nn.BatchNorm2d):
    """Batch norm over each 16th of a worker's batch, with trained bias; the weight is not used (section 3).

    Statistics of few images are noisy. Large batches lack that noise, and generalize worse without it. Evaluation uses
    the running statistics of worker 0's first group alone, as published (section 5): those of rank 0's first group.
    """

    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        size = hyp.batch_size // hyp.ghost_groups  # without ghost batch norm: size = hyp.batch_size
        groups = x.to(self.bias.dtype).unflatten(0, (-1, size))  # [G, size, C, H, W]; none crosses workers
        var, mean = torch.var_mean(groups, (1, 3, 4), correction=0, keepdim=True)  # [G, 1, C, 1, 1]
        values = groups[0, :, 0].numel()
        self.running_mean.lerp_(mean[0].detach().flatten(), 0.1)
        self.running_var.lerp_(var[0].detach().flatten() * values / (values - 1), 0.1)
        scale = torch.rsqrt(var + self.eps)
        return torch.addcmul(self.bias[:, None, None] - mean * scale, groups, scale).to(x.dtype).flatten(0, 1)


def conv_norm(channels_in: int, channels_out: int, size: int = 3, pool: bool = False) -> nn.Sequential:
    """Return convolution, pooling, norm and CELU. Pooling before the norm leaves it a quarter of the work."""
    conv = nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.MaxPool2d(2) if pool else nn.Identity(), GhostNorm(channels_out), nn.CELU(0.3))


class Network(nn.Module):
    """Map images [B, 3, 32, 32] to logits [B, 10]; 6,570,880 trained parameters (section 3)."""

    def __init__(self) -> None:
        super().__init__()
        w = hyp.width
        self.layer1 = nn.Sequential(conv_norm(27, w, size=1), conv_norm(w, 2 * w, pool=True))  # 128 x 16 x 16
        self.residual1 = nn.Sequential(conv_norm(2 * w, 2 * w), conv_norm(2 * w, 2 * w))
        self.layer2 = conv_norm(2 * w, 4 * w, pool=True)  # 256 x 8 x 8
        self.layer3 = conv_norm(4 * w, 8 * w, pool=True)  # 512 x 4 x 4
        self.residual3 = nn.Sequential(conv_norm(8 * w, 8 * w), conv_norm(8 * w, 8 * w))
        self.head = nn.Linear(8 * w, 10, bias=False)
        self.whitening = nn.Conv2d(3, 27, 3, padding=1, bias=False)  # last: other initial weights do not depend on it

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer1(self.whitening(images))
        x = self.layer3(self.layer2(x + self.residual1(x)))
        logits = self.head(F.max_pool2d(x + self.residual3(x), 4).flatten(1)) / 16
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # half-precision logits would often tie


def balanced(count: int, options: int, g: torch.Generator) -> Tensor:
    """Assign one of the options to each of `count` images, int64 [count]: each equally often, up to one image.
    Independent draws favour some crops, and one side, in each epoch (section 2)."""
    shuffled = torch.randperm(options, generator=g, device=DEVICE)
    images = torch.randperm(count, generator=g, device=DEVICE)
    assigned = torch.empty_like(images)
    assigned[images] = shuffled[torch.arange(count, device=DEVICE) * options // count]
    return assigned  # without balanced crops: return torch.randint(options, (count,), generator=g, device=DEVICE)


def batches(images: Tensor, labels: Tensor, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an epoch's augmented batches (section 2): images [B, 3, 32, 32], channels last, and labels [B]; those of
    this process's workers one after the other. Each worker has its own random numbers, whatever its process."""
    count, plans, pixels = len(images) // len(WORKERS), [], torch.arange(32, device=DEVICE)
    steps = count // hyp.batch_size  # the remaining images are dropped
    for first, worker in enumerate(WORKERS):
        key = np.random.SeedSequence((seed, worker, epoch)).generate_state(1, np.uint64)[0]
        g = torch.Generator(DEVICE).manual_seed(int(key >> 1))
        rows = torch.arange(first, len(images), len(WORKERS), device=DEVICE)
        plan = torch.stack([rows, balanced(count, 81, g), balanced(count, 2, g)])
        order = torch.randperm(count, generator=g, device=DEVICE)[: steps * hyp.batch_size]
        plans.append(plan[:, order].unflatten(1, (steps, hyp.batch_size)))
    for rows, crops, flips in torch.cat(plans, 2).unbind(1):
        y = (crops // 9)[:, None] + pixels
        x = (crops % 9)[:, None] + torch.where(flips[:, None] == 1, 31 - pixels, pixels)
        yield images[rows[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2), labels[rows]


def learning_rate(epoch: float) -> float:
    """Return the rate at a time in epochs: linear from 0 to the peak and down, then constant (section 4)."""
    # The constant rate at the end replaces an average of the weights over the last epochs.
    end = hyp.epochs * (1 - hyp.constant)  # without constant rate at the end: end = hyp.epochs
    return float(np.interp(epoch, [0, hyp.epochs * hyp.warmup, end], [0, hyp.peak_rate, hyp.end_rate]))


def loss_and_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, summed over the images (section 4), and the sums of correct images, loss and images, [3]."""
    # 0.8 x cross-entropy + 0.2 x the mean over classes of -log p: certainty does not pay, which limits overfitting.
    smoothing = hyp.label_smoothing  # without label smoothing: smoothing = 0.0
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    correct = (logits.argmax(1) == labels).sum()
    return loss, torch.stack([correct, loss.detach(), torch.full_like(correct, len(labels))])


@torch.no_grad()
def update(weights: list[Tensor], velocities: list[Tensor], rate: float, decay: float) -> None:
    """Average the gradients g over all workers, then d = -rate (g + decay w), v = 0.9 v + d, w = w + d + 0.9 v.
    The rate is inside the velocity v; torch.optim.SGD multiplies all of v by the current rate (section 4)."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    torch._foreach_div_(gradients, hyp.workers)  # before the sum, which could overflow in half precision
    if PROCESSES > 1:
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message)
        parts = message.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
    d = torch._foreach_add(gradients, weights, alpha=decay)
    torch._foreach_mul_(d, -rate)
    torch._foreach_mul_(velocities, hyp.momentum)
    torch._foreach_add_(velocities, d)
    torch._foreach_add_(weights, d)
    torch._foreach_add_(weights, velocities, alpha=hyp.momentum)


@torch.no_grad()
def evaluate(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the sums over this process's test images. Averaging over mirror images reduces errors (section 5)."""
    network.eval()
    for buffer in network.buffers() if PROCESSES > 1 else ():
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    for x, y in zip(images.permute(0, 3, 1, 2).split(1000), labels.split(1000), strict=True):
        logits = (network(x) + network(x.flip(3))) / 2  # without test-time augmentation: logits = network(x)
        sums += loss_and_sums(logits, y)[1]
    network.train()
    return sums


def train(seed: int, epochs: int, data: Sequence[Tensor], seconds: float) -> tuple[nn.Module, list[list[float]]]:
    """Return a trained network, and for each epoch: seconds until then, from those given; training accuracy and loss,
    over all workers (section 9); test accuracy and loss."""
    images, labels, test_images, test_labels, filters = data
    torch.manual_seed(seed)
    network = Network()  # with PyTorch's default initial weights
    # Neighbouring pixels are alike. Filters that decorrelate them let all directions be learned at one rate, and spare
    # the first layer its training (section 3). Without this line it is an ordinary layer.
    network.whitening.weight = nn.Parameter(filters, requires_grad=False)  # without whitening: delete this line
    network.to(DEVICE, images.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    norms = [module for module in network.modules() if isinstance(module, GhostNorm)]
    for norm in norms:
        norm.to(torch.promote_types(images.dtype, torch.float32))
    weights: list[Tensor] = [w for w in network.parameters() if w.requires_grad and w.ndim > 1]
    biases: list[Tensor] = [norm.bias for norm in norms]
    velocities, bias_velocities = ([torch.zeros_like(w) for w in group] for group in (weights, biases))
    decay, steps = hyp.weight_decay * hyp.batch_size, len(images) // len(WORKERS) // hyp.batch_size
    log = []
    for epoch in range(epochs):
        start, sums = now(), torch.zeros(3, dtype=torch.float64, device=DEVICE)
        for step, (x, y) in enumerate(batches(images, labels, seed, epoch + 1), 1):
            loss, of_batch = loss_and_sums(network(x), y)
            loss.backward()
            rate = learning_rate(epoch + step / steps) / hyp.batch_size
            update(weights, velocities, rate, decay)
            update(biases, bias_velocities, rate * hyp.bias_factor, decay / hyp.bias_factor)
            network.zero_grad()
            sums += of_batch
        seconds += now() - start
        sums = torch.stack([sums, evaluate(network, test_images, test_labels)])
        if PROCESSES > 1:
            dist.all_reduce(sums)
        log.append([seconds, *(sums[:, :2] / sums[:, 2:]).flatten().tolist()])
    return network, log


def now() -> float:
    """Return the time in seconds, when the devices of all processes have finished (section 6)."""
    torch.get_device_module(DEVICE).synchronize()
    if PROCESSES > 1:
        dist.barrier()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data", help="folder of CIFAR-10, or FILE.npz")
    parser.add_argument("--out", default=".", type=Path, help="folder for timing_log.tsv")
    parser.add_argument("--runs", default=1, type=int)
    parser.add_argument("--seed", default=0, type=int, help="of the first run; the next has the next")
    parser.add_argument("--precision", default="fp16" if GPU else "fp32", choices=["fp16", "fp32", "fp64"])
    args = parser.parse_args()
    dtype = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[args.precision]
    torch.backends.cudnn.benchmark = True
    torch.get_device_module(DEVICE).set_device(DEVICE)
    if PROCESSES > 1:
        dist.init_process_group("nccl" if GPU else "gloo")
    arrays = load(args.data)
    black = [np.zeros_like(array[: hyp.workers * hyp.batch_size]) for array in arrays]
    train(0, 1, prepare(black, dtype)[0], 0)  # one step, so that kernels are chosen before the clock starts
    data, seconds = prepare(arrays, dtype)
    if RANK == 0:
        print(f"Uploaded data to GPUs {seconds[0]:.3f}s\n# Preprocessed it {seconds[1]:.3f}s")
        print(f"Compute patch whitening statistics:     {seconds[2]:.3f}s", flush=True)
    runs = []
    for run in range(args.runs):
        epochs = train(args.seed + run, hyp.epochs, data, sum(seconds))[1]
        runs.append(epochs[-1])
        if RANK == 0:
            line = "Train acc {1:.4f} loss {2:.3f}, validation acc {3:.4f} loss {4:.3f} wall time {0:.3f}s"
            print(line.format(*epochs[-1]), flush=True)
            if run == 0:
                rows = [f"{n}\t{epoch[0] / 3600}\t{100 * epoch[3]:.6g}\n" for n, epoch in enumerate(epochs, 1)]
                (args.out / "timing_log.tsv").write_text("epoch\thours\ttop1Accuracy\n" + "".join(rows))
    if RANK == 0:
        times, accuracies = ([epoch[column] for epoch in runs] for column in (0, 3))
        print(f"Maximum training time {max(times)} median {np.median(times)}")
        print(f"Lowest accuracy {min(accuracies)} median {round(np.median(accuracies), 6)}")
        print(f"{sum(accuracy >= 0.94 for accuracy in accuracies)} runs reached 0.94 out of {args.runs}")
    if PROCESSES > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
