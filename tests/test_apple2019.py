"""apple2019 against the method as docs/method.md says it, of stock layers and plain formulas, in float64.

The reference takes the ghost groups of the workers one after the other, each by itself through nn.BatchNorm2d. It crops
and mirrors with NumPy's functions. Shared with the program are the signs of the whitening filters, and which image gets
which crop and side; what is promised of that is tested below.
"""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, run_here, write_npz_as_dealt
from torch import nn

from large_batch_cifar_10_fast import apple2019
from large_batch_cifar_10_fast.core.team import Team
from large_batch_cifar_10_fast.images.shapes import draw_shapes

SEED, WORKERS, BATCH, GHOST, WIDTH, EPOCHS, STEPS = 11, 2, 32, 16, 3, 4, 3
OPTIONS = {
    "workers": WORKERS,
    "batch_size": BATCH,
    "ghost_batch": GHOST,
    "width": WIDTH,
    "epochs": EPOCHS,
    "ema_ep": 1.0,
}
MEAN, STD = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)


def conv_norm(channels_in: int, channels_out: int, size: int = 3, pool: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.MaxPool2d(pool), nn.BatchNorm2d(channels_out), nn.CELU(0.3))


class Reference(nn.Module):
    """Section 3, from the outputs of the whitening filters on."""

    def __init__(self) -> None:
        super().__init__()
        w = WIDTH
        self.prep = conv_norm(27, w, size=1)
        self.layer1 = conv_norm(w, 2 * w, pool=2)
        self.residual1 = nn.Sequential(conv_norm(2 * w, 2 * w), conv_norm(2 * w, 2 * w))
        self.layer2 = conv_norm(2 * w, 4 * w, pool=2)
        self.layer3 = conv_norm(4 * w, 8 * w, pool=2)
        self.residual3 = nn.Sequential(conv_norm(8 * w, 8 * w), conv_norm(8 * w, 8 * w))
        self.head = nn.Linear(8 * w, 10, bias=False)
        self.norms = [module for module in self.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in self.norms:
            norm.weight.requires_grad_(False)  # stays 1

    def forward(self, images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
        x = self.layer1(self.prep(F.conv2d(images, filters, padding=1)))
        x = self.layer3(self.layer2(x + self.residual1(x)))
        x = F.max_pool2d(x + self.residual3(x), 4).flatten(1)
        return self.head(x) / 16


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each image, section 4."""
    log_p = logits - logits.logsumexp(1, keepdim=True)
    return -0.8 * log_p[torch.arange(len(labels)), labels] - 0.2 * log_p.mean(1)


def rate(epoch: float) -> float:
    """Return L in section 4: to 1.5 at a fifth of the epochs, to 0.15 at `ema_ep` before the end, then constant."""
    peak, constant = EPOCHS / 5, EPOCHS - 1
    if epoch < peak:
        return 1.5 * epoch / peak
    return 1.5 + (0.15 - 1.5) * min(1, (epoch - peak) / (constant - peak))


def normalised(images: np.ndarray) -> np.ndarray:
    return (images.astype(np.float64) - MEAN) / STD


def cropped_and_mirrored(image: np.ndarray, crop: int, flip: int) -> np.ndarray:
    """Pad by reflection, cut, then mirror, section 2: an image [32, 32, 3] to [3, 32, 32]."""
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    y, x = divmod(crop, 9)
    cut = padded[y : y + 32, x : x + 32]
    return np.ascontiguousarray((cut[:, ::-1] if flip else cut).transpose(2, 0, 1))


def whitening_filters(images: np.ndarray) -> torch.Tensor:
    """Return the eigenvectors of section 3, scaled, of images [n, 32, 32, 3]; their signs are anyone's."""
    patches = F.unfold(torch.from_numpy(images).permute(0, 3, 1, 2), 3).transpose(1, 2).flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    filters = (vectors / np.sqrt(values + 0.01)).T[::-1].copy()
    return torch.from_numpy(filters).view(27, 3, 3, 3)


def plan(hyp: apple2019.Hyp, images: int, epoch: int, workers: int = WORKERS) -> list[torch.Tensor]:
    steps = images // workers // hyp.batch_size
    return apple2019.plan_epoch(hyp, images, steps, Team(0, 1, CPU, workers), SEED, epoch)


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory):
    """Return the images, and of the program the weights and the rows of all epochs; in one or two passes a step."""
    folder = tmp_path_factory.mktemp("apple2019")
    arrays = draw_shapes(WORKERS * BATCH * STEPS + 7, 41)
    data = write_npz_as_dealt(folder / "few.npz", *arrays)
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    how = [
        "--micro_batches",
        request.param,
        "--data",
        data,
        "--seed",
        SEED,
        "--precision",
        "fp64",
        "--save",
        folder / "w.pt",
        "--out",
        folder,
    ]
    # Its own mean and deviation would be taken for other images than CIFAR-10's.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("large_batch_cifar_10_fast.core.images.Images.normalization", (MEAN, STD))
        run_here("--recipe", "apple2019", *options, *how)
    weights = torch.load(folder / "w.pt", weights_only=True)["weights"]
    return arrays, weights, pd.read_csv(folder / "epochs.tsv", sep="\t")


def test_a_whole_run_is_the_method_to_nine_digits(trained):
    (images, labels, test_images, test_labels), weights, epochs = trained
    images, test = normalised(images), torch.from_numpy(normalised(test_images)).permute(0, 3, 1, 2)
    labels, test_labels = torch.from_numpy(labels), torch.from_numpy(test_labels)
    filters = whitening_filters(images[::WORKERS])
    found = weights["whitening.weight"]
    signs = (found * filters).sum((1, 2, 3)).sign().view(-1, 1, 1, 1)
    torch.testing.assert_close(found, signs * filters, rtol=1e-7, atol=1e-9)

    hyp = apple2019.Hyp(**OPTIONS)
    torch.manual_seed(SEED)
    initial = dict(apple2019.Network(hyp, 10).named_parameters())
    torch.manual_seed(SEED)
    reference = Reference().double()  # whose stock layers have PyTorch's initial weights
    trainable = [weight for weight in reference.parameters() if weight.requires_grad]
    for weight, value in zip(trainable, initial.values(), strict=True):
        assert torch.equal(weight.data, value.data.double())
    velocities = [torch.zeros_like(weight) for weight in trainable]
    for epoch in range(1, EPOCHS + 1):
        right, total = 0, 0.0
        for number, batch in enumerate(plan(hyp, len(images), epoch), 1):
            gradients = [torch.zeros_like(weight) for weight in trainable]
            for group in range(WORKERS * BATCH // GHOST):
                for norm in reference.norms:
                    norm.momentum = 0.1 if group == 0 else 0.0  # only worker 0's first group counts, section 5
                rows, crops, flips = batch[:, group * GHOST : (group + 1) * GHOST].tolist()
                x = [cropped_and_mirrored(images[row], *how) for row, *how in zip(rows, crops, flips, strict=True)]
                logits = reference(torch.from_numpy(np.stack(x)), found)
                losses = smoothed(logits, labels[rows])
                for sum_, gradient in zip(gradients, torch.autograd.grad(losses.sum(), trainable), strict=True):
                    sum_ += gradient / WORKERS
                right += int((logits.argmax(1) == labels[rows]).sum())
                total += losses.sum().item()
            lr = rate(epoch - 1 + number / STEPS) / BATCH
            for weight, gradient, v in zip(trainable, gradients, velocities, strict=True):
                own_lr, decay = (lr, 5e-4 * 1.5 * BATCH) if weight.ndim > 1 else (64 * lr, 5e-4 * 1.5 * BATCH / 64)
                d = -own_lr * (gradient + decay * weight.data)
                v.mul_(0.9).add_(d)
                weight.data += d + 0.9 * v
        reference.eval()
        with torch.no_grad():
            logits = (reference(test, found) + reference(test.flip(3), found)) / 2
        reference.train()
        row = epochs.iloc[epoch - 1]
        assert row["train_accuracy"] == right / (WORKERS * BATCH * STEPS)
        assert row["train_loss"] == pytest.approx(total / (WORKERS * BATCH * STEPS), rel=1e-9)
        assert row["validation_accuracy"] == (logits.argmax(1) == test_labels).double().mean().item()
        assert row["validation_loss"] == pytest.approx(smoothed(logits, test_labels).mean().item(), rel=1e-9)
    for name, weight in zip(initial, trainable, strict=True):
        torch.testing.assert_close(weights[name], weight.data, rtol=1e-9, atol=1e-11)


def test_each_worker_takes_its_own_images_once_an_epoch_cropped_and_mirrored_evenly():
    """Section 2."""
    hyp = apple2019.Hyp(batch_size=4, ghost_batch=2)
    seen = [torch.stack(plan(hyp, 8 * 100, epoch, workers=8)) for epoch in (1, 2)]  # [steps, 3, 8 * 4]
    for steps in seen:
        assert steps.shape == (25, 3, 32)
        orders = set()
        for worker, (rows, crops, flips) in enumerate(steps.view(25, 3, 8, 4).permute(2, 1, 0, 3).flatten(2)):
            assert (rows % 8 == worker).all()
            assert len(rows.unique()) == 100
            assert crops.bincount(minlength=81).tolist() == pytest.approx([100 / 81] * 81, abs=1)
            assert flips.sum().item() == pytest.approx(50, abs=1)
            assert rows.diff().abs().float().mean() > 100, "they are shuffled"
            orders.add(tuple((rows // 8).tolist()))
        assert len(orders) == 8, "each worker has random numbers of its own"
    assert not torch.equal(*seen)


def test_offsets_in_random_order_are_dealt_to_images_in_random_order():
    """Section 2. In order, the first offsets would have the images left over, and neighbours the same crop."""
    dealt = []
    for seed in (1, 2):
        draws = torch.Generator().manual_seed(seed)
        dealt.append({*apple2019.balanced_assignment(40, 81, draws).tolist()})
    assert len(dealt[0]) == len(dealt[1]) == 40
    assert dealt[0] != dealt[1]
    crops = apple2019.balanced_assignment(810, 81, draws)
    assert (crops.diff() == 0).double().mean() < 0.1


def test_an_epoch_has_24_steps_and_its_rates_are_the_published_ones():
    hyp = apple2019.Hyp()
    assert 50_000 // hyp.workers // hyp.batch_size == 24
    rates = {step: 256 * apple2019.learning_rate(hyp, step / 24) for step in (1, 86, 87, 384, 385, 432)}
    known = {1: 0.0173611, 86: 1.493056, 87: 1.497278, 384: 0.15, 385: 0.15, 432: 0.15}
    assert rates == pytest.approx(known, rel=1e-5)
    assert [apple2019.Hyp(batch_size=size).ghost_batch for size in (256, 512)] == [16, 32], "always 16 groups"
    parameters = sum(weight.numel() for weight in apple2019.Network(hyp, 10).parameters())
    assert parameters == 6_570_880
