"""Which rates suit `Muon` and AdamW on torchvision's resnet18? docs/use_muon.md shows the results.

    python notebook/muon_rates.py originals.npz SEED > rates.tsv

Each run trains a fresh resnet18 for 4 epochs on 10,000 training images of CIFAR-10 and is tested on its last 10,000
training images. Both rates fall linearly to 0. Autocast to bfloat16.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torchvision.models import resnet18

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from large_batch_cifar_10_fast import api
from large_batch_cifar_10_fast.core.optim import Muon

EPOCHS = 4
BATCH = 250
COUNT = 10_000  # training images, and test images


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images [n, 32, 32, 3] as float32 [n, 3, 32, 32] with mean 0 and deviation 1 in each channel."""
    x = images.float()
    x = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    return x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor) -> Tensor:
    """Return images of a batch shifted by up to 2 pixels, the same for all, and mirrored one by one at random."""
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    down, right = torch.randint(-2, 3, (2,)).tolist()
    return F.pad(images, (2, 2, 2, 2), mode="reflect")[:, :, 2 + down : 34 + down, 2 + right : 34 + right]


def make_optimizers(network: nn.Module, muon_rate: float, adamw_rate: float) -> list[Optimizer]:
    """Return Muon for the filters and AdamW for the rest, or AdamW for all if `muon_rate` is 0."""
    filters = [weight for weight in network.parameters() if weight.ndim == 4]
    others = [weight for weight in network.parameters() if weight.ndim != 4]
    if not muon_rate:
        return [AdamW(filters + others, lr=adamw_rate)]
    return [Muon(filters, lr=muon_rate), AdamW(others, lr=adamw_rate)]


def accuracy_of(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        right = [(network(x).argmax(1) == y).sum() for x, y in zip(images.split(1000), labels.split(1000), strict=True)]
    return 100 * int(torch.stack(right).sum()) / len(labels)


def train(images: Tensor, labels: Tensor, muon_rate: float, adamw_rate: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = resnet18(num_classes=10).to(memory_format=torch.channels_last)
    optimizers = make_optimizers(network, muon_rate, adamw_rate)
    steps = EPOCHS * COUNT // BATCH
    schedules = [LinearLR(optimizer, 1.0, 0.0, steps) for optimizer in optimizers]
    for _ in range(EPOCHS):
        for rows in torch.randperm(COUNT).split(BATCH):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(network(augment(images[rows])), labels[rows])
            loss.backward()
            for each in (*optimizers, *schedules):
                each.step()
            network.zero_grad()
    return network


def main() -> None:
    data = api.load_images(sys.argv[1])
    seed = int(sys.argv[2])
    train_images = normalize(torch.as_tensor(data.train_images[:COUNT]))
    train_labels = torch.as_tensor(data.train_labels[:COUNT])
    test_images = normalize(torch.as_tensor(data.train_images[-COUNT:]))
    test_labels = torch.as_tensor(data.train_labels[-COUNT:])
    pairs = [(0.0, rate) for rate in (0.001, 0.002, 0.004)]
    pairs += [(rate, 0.001) for rate in (0.02, 0.05, 0.1, 0.2)]
    print("muon_rate", "adamw_rate", "seed", "accuracy", "seconds", sep="\t")
    for muon_rate, adamw_rate in pairs:
        begin = time.monotonic()
        network = train(train_images, train_labels, muon_rate, adamw_rate, seed)
        accuracy = accuracy_of(network, test_images, test_labels)
        print(muon_rate, adamw_rate, seed, accuracy, f"{time.monotonic() - begin:.0f}", sep="\t", flush=True)


if __name__ == "__main__":
    main()
