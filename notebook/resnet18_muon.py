"""Which rate of Muon suits torchvision's resnet18? The figures of docs/use_muon.md.

    python notebook/resnet18_muon.py FILE.npz

It trains on the first 4,000 training images, as they are, for two epochs of batches of 100. It is tested on the test
images.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.models import resnet18

from large_batch_cifar_10_fast.core.optim import Muon

SEEDS = range(1)
ARRAYS = np.load(sys.argv[1], allow_pickle=False)


def images_of(part: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(ARRAYS[f"{part}_images"][:count]).permute(0, 3, 1, 2).float()
    return (images - 120) / 64, torch.from_numpy(ARRAYS[f"{part}_labels"][:count]).long()


def accuracy(make_optimizers, seed: int) -> float:
    """Return the test accuracy of a run, in percent."""
    torch.manual_seed(seed)
    network = resnet18(num_classes=10)
    optimizers = make_optimizers(network)
    order = torch.cat([torch.randperm(4_000), torch.randperm(4_000)]).split(100)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, len(order)) for each in optimizers]
    for rows in order:
        F.cross_entropy(network(TRAIN[0][rows]), TRAIN[1][rows]).backward()
        for each in [*optimizers, *schedules]:
            each.step()
        network.zero_grad()
    with torch.no_grad():
        answers = network.eval()(TEST[0]).argmax(1)
    return 100 * float((answers == TEST[1]).float().mean())


def with_muon(rate: float):
    def make(network):
        filters = [weight for weight in network.parameters() if weight.ndim == 4]
        others = [weight for weight in network.parameters() if weight.ndim != 4]
        return [Muon(filters, lr=rate), torch.optim.AdamW(others, lr=0.001)]

    return make


def with_adamw(rate: float):
    return lambda network: [torch.optim.AdamW(network.parameters(), lr=rate)]


TRAIN = images_of("train", 4_000)
TEST = images_of("test", 10_000)
for name, make, rates in (("Muon", with_muon, (0.02, 0.05, 0.1, 0.2)), ("AdamW", with_adamw, (0.0003, 0.001))):
    for rate in rates:
        found = [accuracy(make(rate), seed) for seed in SEEDS]
        print(name, rate, " ".join(f"{each:.1f}" for each in found), flush=True)
