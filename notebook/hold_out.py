"""Write a data set whose test images are training images that are kept out, so that recipes can be compared on many.

    python notebook/hold_out.py cifar10.npz hold_out.npz --images 10000

The last so many training images become the test images; the test images of the first file are not used.
"""

import argparse

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source")
parser.add_argument("target")
parser.add_argument("--images", type=int, default=10_000)
args = parser.parse_args()
with np.load(args.source, allow_pickle=False) as archive:
    images = archive["train_images"]
    labels = archive["train_labels"]
split = len(images) - args.images
arrays = {"train_images": images[:split], "train_labels": labels[:split]}
np.savez(args.target, **arrays, test_images=images[split:], test_labels=labels[split:])
