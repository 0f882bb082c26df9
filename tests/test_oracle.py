"""The composition of the default recipe against an independent one of PyTorch's stock layers, in float64.

Eight workers one after the other, each with its own shard, its own norms and its own loss; two epochs of three steps
with an evaluation after each, through `train_once` and `evaluate`. Shared with our code are only the initial seeds
and the augmented batches, which test_shards.py is about.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.distributed import DistContext
from large_batch_cifar_10_fast.log import Clock
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019
from large_batch_cifar_10_fast.train import make_model, make_step, prepare, train_once

WORKERS, BATCH, GHOST, WIDTH, STEPS, EPOCHS, SEED = 8, 16, 8, 3, 3, 2, 11
ALONE = DistContext(0, 1, torch.device("cpu"), WORKERS)


class Reference:
    """Method, sections 3 to 5, written down from the text."""

    def __init__(self, seed: int, filters: torch.Tensor, eval_stats: str):
        torch.manual_seed(seed)
        w = WIDTH
        shapes = [(27, w, 1), (w, 2 * w, 3), (2 * w, 2 * w, 3), (2 * w, 2 * w, 3)]
        shapes += [(2 * w, 4 * w, 3), (4 * w, 8 * w, 3), (8 * w, 8 * w, 3), (8 * w, 8 * w, 3)]
        self.convolutions = [nn.Conv2d(i, o, k, padding=k // 2, bias=False).double() for i, o, k in shapes]
        self.linear = nn.Linear(8 * w, 10, bias=False).double()
        self.biases = [nn.Parameter(torch.zeros(o, dtype=torch.float64)) for _, o, _ in shapes]
        self.filters, self.eval_stats = filters, eval_stats
        # norms[layer][worker][group]
        self.norms = [
            [[nn.BatchNorm2d(o, affine=False).double() for _ in range(BATCH // GHOST)] for _ in range(WORKERS)]
            for _, o, _ in shapes
        ]
        self.weights = [c.weight for c in self.convolutions] + [self.linear.weight]
        self.velocities = [torch.zeros_like(p) for p in (*self.weights, *self.biases)]
        self.celu = nn.CELU(alpha=0.3)

    def norm(self, layer: int, x, worker: int | None):
        if worker is not None:
            groups = zip(x.split(GHOST), self.norms[layer][worker], strict=True)
            y = torch.cat([norm(group) for group, norm in groups])
        else:
            kept = self.norms[layer][0][: 1 if self.eval_stats == "first" else None]
            mean = sum(norm.running_mean for norm in kept) / len(kept)
            variance = sum(norm.running_var for norm in kept) / len(kept)
            y = F.batch_norm(x, mean, variance, training=False, eps=1e-5)
        return self.celu(y + self.biases[layer][:, None, None])

    def logits(self, x, worker: int | None):
        """A worker's training batch, or test images where no worker is named."""
        c, pool = self.convolutions, nn.MaxPool2d(2)
        x = F.conv2d(x, self.filters, padding=1)
        x = self.norm(0, c[0](x), worker)
        x = self.norm(1, pool(c[1](x)), worker)
        x = x + self.norm(3, c[3](self.norm(2, c[2](x), worker)), worker)
        x = self.norm(4, pool(c[4](x)), worker)
        x = self.norm(5, pool(c[5](x)), worker)
        x = x + self.norm(7, c[7](self.norm(6, c[6](x), worker)), worker)
        return self.linear(nn.MaxPool2d(4)(x).flatten(1)) / 16

    def losses(self, logits, labels):
        log_p = logits.log_softmax(1)
        return -0.8 * log_p[torch.arange(len(labels)), labels] - 0.2 * log_p.mean(1)

    def step(self, images, labels, number: int):
        """One step of all workers; how many were right, and the losses' sum."""
        parameters = [*self.weights, *self.biases]
        mean = [torch.zeros_like(p) for p in parameters]
        right = total = 0
        for worker, (x, y) in enumerate(zip(images.split(BATCH), labels.split(BATCH), strict=True)):
            logits = self.logits(x, worker)
            loss = self.losses(logits, y).sum()
            for m, g in zip(mean, torch.autograd.grad(loss, parameters), strict=True):
                m += g / WORKERS
            right += (logits.argmax(1) == y).sum().item()
            total += loss.item()
        rate = self.rate(number / STEPS)
        decay = 5e-4 * 1.2 * BATCH
        with torch.no_grad():
            for i, (w, g, v) in enumerate(zip(parameters, mean, self.velocities, strict=True)):
                bias = i >= len(self.weights)
                lr, wd = (64 * rate / BATCH, decay / 64) if bias else (rate / BATCH, decay)
                d = -lr * (g + wd * w)
                v.copy_(0.9 * v + d)
                w += d + 0.9 * v
        return right, total

    def rate(self, epoch: float) -> float:
        """0 at 0, 1.2 at 2/4, 0.24 at 1.7, constant to 2."""
        if epoch <= 0.5:
            return 1.2 * epoch / 0.5
        if epoch <= 1.7:
            return 1.2 + (0.24 - 1.2) * (epoch - 0.5) / 1.2
        return 0.24

    @torch.no_grad()
    def evaluate(self, images, labels):
        logits = (self.logits(images, None) + self.logits(images[:, :, :, torch.arange(31, -1, -1)], None)) / 2
        return (logits.argmax(1) == labels).sum().item(), self.losses(logits, labels).mean().item()


def normalised(images: np.ndarray) -> torch.Tensor:
    mean, std = np.array([125.31, 122.95, 113.87]), np.array([62.99, 62.09, 66.70])
    return torch.from_numpy((images - mean) / std)


def whitening(images: np.ndarray) -> torch.Tensor:
    patches = F.unfold(normalised(images).permute(0, 3, 1, 2), 3).transpose(1, 2).reshape(-1, 27).numpy()
    values, vectors = np.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    return torch.from_numpy((vectors / np.sqrt(values + 0.01)).T[::-1].copy()).view(27, 3, 3, 3)


@pytest.mark.parametrize("eval_stats", ["first", "average"])
def test_training_and_evaluation_are_the_methods_to_nine_digits(eval_stats):
    images = Images("shapes", *draw_shapes(WORKERS * BATCH * STEPS + 3, 40))
    sizes = {"batch_size": BATCH, "ghost_batch": GHOST, "width": WIDTH, "epochs": EPOCHS, "eval_stats": eval_stats}
    recipe = Apple2019(lr_scaler=1.2, lr_scaler_end_fraction=0.2, warmup_fraction=4, ema_ep=0.3, **sizes)
    model = make_model(recipe, ALONE, "fp64")
    data, log = prepare(images, model, Clock(ALONE.synchronize)), Recorder()
    train_once(1, SEED, model, data, make_step(model, data), Clock(ALONE.synchronize), log)

    filters = whitening(images.train_images[::WORKERS])
    # An eigenvector's sign is anyone's: ours are taken over, once they are seen to be the same but for that.
    ours = model.network.whitening.weight.data
    signs = (ours * filters).sum((1, 2, 3)).sign().view(-1, 1, 1, 1)
    torch.testing.assert_close(ours, signs * filters, rtol=1e-7, atol=1e-9)
    reference, test = Reference(SEED, ours, eval_stats), normalised(images.test_images).permute(0, 3, 1, 2)
    for epoch in range(1, EPOCHS + 1):
        metrics = []
        for step, [(x, y)] in enumerate(data.train.epoch(SEED, epoch), (epoch - 1) * STEPS + 1):
            metrics.append(reference.step(x.contiguous(), y, step))
        assert len(metrics) == STEPS
        right, loss = reference.evaluate(test, torch.from_numpy(images.test_labels))
        told = log.validations[epoch - 1]
        assert (told.correct, told.images) == (right, 40)
        assert told.loss == pytest.approx(loss, rel=1e-9)
    assert (log.train.correct, log.train.images) == (sum(right for right, _ in metrics), WORKERS * BATCH * STEPS)
    assert log.train.loss == pytest.approx(sum(loss for _, loss in metrics) / log.train.images, rel=1e-9)

    trained = {name: weight for name, weight in model.network.named_parameters() if weight.requires_grad}
    weights = [weight for weight in trained.values() if weight.ndim > 1]
    biases = [weight for weight in trained.values() if weight.ndim == 1]
    expected = [*reference.weights, *reference.biases]
    for ours, theirs in zip([*weights, *biases], expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-9
