"""Estimate the accuracy on all 10,000 test images of CIFAR-10 from the first 1,000 originals and from all copies.

    python notebook/first_thousand.py ORIGINALS.npz COPIES.npz WEIGHTS...

Weights were trained on originals. Of each image, the mean of right answers over the weights is known: of the first
1,000 originals, and of all 10,000 copies, which are JPEG-compressed. Images that are easy as copies are easy as
originals, so the copies say how easy the first 1,000 are: a regression estimate. Assumption: the first 1,000 test
images are a random sample of all, and the slope, found on them, holds for all.
"""

import sys

import numpy as np
import torch

from large_batch_cifar_10_fast import api


def right_answers(path: str, count: int, weights: list[str]) -> np.ndarray:
    """Return the share of weights that classify each of the first test images of a file rightly, [count]."""
    with np.load(path, allow_pickle=False) as archive:
        images = torch.from_numpy(archive["test_images"][:count])
        labels = torch.from_numpy(archive["test_labels"][:count])
    return np.mean([(api.load(file).predict(images).argmax(1) == labels).numpy() for file in weights], axis=0)


originals, copies, *weights = sys.argv[1:]
first = right_answers(originals, 1000, weights)
every = right_answers(copies, 10_000, weights)
print(f"n = {len(weights)}; originals, first 1,000: {first.mean():.2%}")
print(f"copies, first 1,000: {every[:1000].mean():.2%}; all 10,000: {every.mean():.2%}")
slope = np.cov(first, every[:1000])[0, 1] / every[:1000].var(ddof=1)
estimate = first.mean() + slope * (every.mean() - every[:1000].mean())
rest = np.sqrt(1 - 1000 / 10_000)  # of a sampling error, since a tenth of all images is known
for name, spread in (("", first), (" by the copies", first - slope * every[:1000])):
    center = estimate if name else first.mean()
    half = 1.96 * spread.std(ddof=1) / np.sqrt(1000) * rest
    print(f"all 10,000 originals{name}: {center:.2%}, 95% interval [{center - half:.2%}, {center + half:.2%}]")
