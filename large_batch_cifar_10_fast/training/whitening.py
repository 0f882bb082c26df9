"""Filters that make the patches of images uncorrelated (method, section 3)."""

import torch
from torch import Tensor


def whitening_filters(images: Tensor, size: int, epsilon: float) -> Tensor:
    """Filters [3 size², 3, size, size] whose outputs on these images are uncorrelated, of variance 1 or a little less.

    `images` [n, H, W, 3] are normalised and unpadded. The rows X are all their 3 x size x size patches; eigenvectors of
    X'X / (n - 1), strongest first, are divided by sqrt(eigenvalue + epsilon), so that faint directions are not blown
    up; in float32, or float64 if the images are.
    """
    dtype = torch.promote_types(images.dtype, torch.float32)
    patches = images.unfold(1, size, 1).unfold(2, size, 1)  # [n, 30, 30, 3, 3, 3] for 3x3 of 32x32
    rows = patches.reshape(-1, 3 * size * size).to(dtype)
    eigenvalues, eigenvectors = torch.linalg.eigh(rows.T @ rows / (len(rows) - 1))
    filters = eigenvectors.T / (eigenvalues[:, None] + epsilon).sqrt()
    return filters.flip(0).view(-1, 3, size, size).to(images.dtype)
