"""A recipe against an independent one of PyTorch's stock layers, in float64, and other tests of the default recipe.

Whole runs through `train_once` and `evaluate`, with an evaluation after each epoch. The reference takes the workers one
after the other, each with its own images, its own statistics and its own loss. Shared with our code are only initial
weights and the augmented batches, which test_shards.py is about.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, Recorder, prepared, train_prepared
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.devices import Precision
from large_batch_cifar_10_fast.layers import norms_of, update_running_statistics, whitening_buffers
from large_batch_cifar_10_fast.recipe import make_network, place, reset
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

WORKERS, BATCH, GHOST, WIDTH, SEED = 8, 16, 8, 3, 11
SMALL = Apple2019(width=4, batch_size=16, ghost_batch=8)


def one_view(network, images, last):
    return network(images)


def check_run(recipe, reference, update, losses, reduce, images, steps, predict=one_view) -> nn.Module:
    """Compare scores and weights of a run to nine digits; return our network.

    `reference` has its parameters in our order, the whitening's frozen filters anywhere. `update` returns a new weight;
    it takes the name, the weight, its mean gradient over the workers, a state, at first zero, and the time in epochs.
    `losses` returns those of images, `reduce` a worker's loss. `steps` are a worker's images and their pixels in each
    step, by epoch.
    """
    (model, data), reference, log = prepared(recipe, images), reference.double(), Recorder()
    reset(model.network, recipe, SEED)
    pairs = [*zip(filters_last(model.network), filters_last(reference), strict=True)]
    for ours, theirs in pairs:
        theirs.data.copy_(ours)
    train_prepared(model, data, SEED, log)

    state = {name: torch.zeros_like(w) for name, w in reference.named_parameters() if w.requires_grad}
    seen = torch.full((len(images.train_images),), torch.inf)  # each image's latest loss
    test, labels = normalised(images.test_images).permute(0, 3, 1, 2), torch.from_numpy(images.test_labels)
    for epoch, sizes in enumerate(steps, 1):
        right, total, now = 0, 0, epoch - 1
        for sample, (size, pixels) in zip(data.train.epoch(SEED, epoch, seen), sizes, strict=True):
            [(x, y)], now = sample.micro_batches(), now + 1 / len(sizes)
            assert x.shape == (size * recipe.workers, 3, pixels, pixels)
            gradients = dict.fromkeys(state, 0)
            for mine in torch.arange(len(y)).split(size):
                replica = reference if mine[0] == 0 else copy.deepcopy(reference)  # whose statistics are thrown away
                logits = replica(x[mine].contiguous())
                found = losses(logits, y[mine])
                of_worker = torch.autograd.grad(reduce(found), [replica.get_parameter(name) for name in state])
                for name, gradient in zip(state, of_worker, strict=True):
                    gradients[name] += gradient / recipe.workers
                seen[sample.indices[mine]] = found.detach().float()
                right += (logits.argmax(1) == y[mine]).sum()
                total += found.sum().item()
            for name, gradient in gradients.items():
                weight = reference.get_parameter(name).data
                weight.copy_(update(name, weight, gradient, state[name], now))
        reference.eval()
        with torch.no_grad():
            logits = predict(reference, test, epoch == len(steps))
        reference.train()
        score = log.validations[epoch - 1]
        assert (score.correct, score.images) == ((logits.argmax(1) == labels).sum(), len(labels))
        assert score.loss == pytest.approx(losses(logits, labels).mean().item(), rel=1e-9)
    assert (log.train.correct, log.train.images) == (right, sum(size for size, _ in sizes) * recipe.workers)
    assert log.train.loss == pytest.approx(total / log.train.images, rel=1e-9)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    return model.network


def filters_last(network: nn.Module) -> list[torch.Tensor]:
    """All weights, with the filters of the whitening at the end: buffers of ours, frozen parameters of a reference."""
    weights = sorted(network.parameters(), key=lambda weight: not weight.requires_grad)
    return [*weights, *whitening_buffers(network)]


def normalised(images: np.ndarray) -> torch.Tensor:
    mean, std = np.array([125.31, 122.95, 113.87]), np.array([62.99, 62.09, 66.70])
    return torch.from_numpy((images - mean) / std)


def check_whitening(filters: torch.Tensor, images: np.ndarray, epsilon: float) -> None:
    """Compare with scaled eigenvectors, whose sign is anyone's."""
    size = filters.shape[-1]
    patches = F.unfold(normalised(images).permute(0, 3, 1, 2), size).transpose(1, 2).flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(patches.T @ patches / (len(patches) - 1))
    expected = torch.from_numpy((vectors / np.sqrt(values + epsilon)).T[::-1].copy()).view(filters.shape)
    signs = (filters * expected).sum((1, 2, 3)).sign().view(-1, 1, 1, 1)
    torch.testing.assert_close(filters, signs * expected, rtol=1e-7, atol=1e-9)


class Norm(nn.Module):
    """A batch norm for each ghost group, of which evaluation uses the first ones' mean statistics; bias and CELU."""

    def __init__(self, channels, used):
        super().__init__()
        self.groups = nn.ModuleList(nn.BatchNorm2d(channels, affine=False) for _ in range(BATCH // GHOST))
        self.used, self.bias = self.groups[:used], nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        if self.training:
            y = torch.cat([norm(group) for norm, group in zip(self.groups, x.split(GHOST), strict=True)])
        else:
            mean = sum(norm.running_mean for norm in self.used) / len(self.used)
            variance = sum(norm.running_var for norm in self.used) / len(self.used)
            y = F.batch_norm(x, mean, variance, training=False, eps=1e-5)
        return F.celu(y + self.bias[:, None, None], 0.3)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Head(nn.Linear):
    def __init__(self, features, divisor):
        super().__init__(features, 10, bias=False)
        self.divisor = divisor

    def forward(self, x):
        return super().forward(x) / self.divisor


def stock_network(w, groups_used):
    """Method, section 3, written down from the text."""

    def layer(channels_in, channels_out, size=3, pool=1):
        convolution = nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.MaxPool2d(pool), Norm(channels_out, groups_used))

    layers = [layer(27, w, size=1)]
    layers += [layer(w, 2 * w, pool=2), Residual(layer(2 * w, 2 * w), layer(2 * w, 2 * w))]
    layers += [layer(2 * w, 4 * w, pool=2)]
    layers += [layer(4 * w, 8 * w, pool=2), Residual(layer(8 * w, 8 * w), layer(8 * w, 8 * w))]
    head = nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), Head(8 * w, 16))
    whitening = nn.Conv2d(3, 27, 3, padding=1, bias=False).requires_grad_(False)
    return nn.Sequential(whitening, *layers, head)


def _losses(logits, labels):
    log_p = logits.log_softmax(1)
    return -0.8 * log_p[torch.arange(len(labels)), labels] - 0.2 * log_p.mean(1)


def _update(name, w, g, v, epoch):
    """The rate is 0 at 0, 1.2 at 2/4, 0.24 at 1.7, constant to 2; biases have 64 times as much, and less decay."""
    rate = 1.2 * epoch / 0.5 if epoch <= 0.5 else max(0.24, 1.2 + (0.24 - 1.2) * (epoch - 0.5) / 1.2)
    factor = 64 if w.ndim == 1 else 1
    d = -rate / BATCH * factor * (g + 5e-4 * 1.2 * BATCH / factor * w)
    v.copy_(0.9 * v + d)
    return w + d + 0.9 * v


def _two_views(network, images, last):
    return (network(images) + network(images[:, :, :, torch.arange(31, -1, -1)])) / 2


@pytest.mark.parametrize(("eval_stats", "groups"), [("first", 1), ("average", BATCH // GHOST)])
def test_training_and_evaluation_are_the_methods_to_nine_digits(eval_stats, groups):
    images = Images("shapes", *draw_shapes(WORKERS * BATCH * 3 + 3, 40))
    sizes = {"batch_size": BATCH, "ghost_batch": GHOST, "width": WIDTH, "epochs": 2, "eval_stats": eval_stats}
    recipe = Apple2019(lr_scaler=1.2, lr_scaler_end_fraction=0.2, warmup_fraction=4, ema_ep=0.3, **sizes)
    torch.manual_seed(SEED)
    reference = stock_network(WIDTH, groups)
    for ours, theirs in zip(filters_last(make_network(recipe, SEED)), filters_last(reference), strict=True):
        assert torch.equal(ours, theirs), "initial weights"
    steps = 2 * [3 * [(BATCH, 32)]]
    network = check_run(recipe, reference, _update, _losses, torch.sum, images, steps, _two_views)
    check_whitening(network.whitening.weight, images.train_images[::WORKERS], epsilon=0.01)


@pytest.mark.parametrize(("batch_size", "ghost_batch"), [(256, 16), (512, 32), (64, 4)])
def test_a_batch_is_sixteen_ghost_groups_unless_told_otherwise(batch_size, ghost_batch):
    assert Apple2019(batch_size=batch_size).ghost_batch == ghost_batch
    assert {norm.ghost_batch for norm in norms_of(Apple2019(batch_size=batch_size, width=4).network())} == {ghost_batch}
    assert Apple2019(batch_size=batch_size, ghost_batch=8).ghost_batch == 8


def test_half_precision_keeps_norms_and_losses_in_float32():
    network = place(SMALL.network(), Precision("fp16", CPU))
    kinds = {name: p.dtype for name, p in network.named_parameters()}
    assert {kind for name, kind in kinds.items() if name.endswith("bias")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if name.endswith("weight")} == {torch.float16}
    assert norms_of(network)[0].running_var.dtype == torch.float32
    assert network.prep(torch.randn(8, 27, 4, 4).half()).dtype == torch.float16
    assert SMALL.loss(torch.zeros(1, 10).half(), torch.tensor([0])).dtype == torch.float32


def test_seed_alone_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed * 7)  # the global stream must not matter
        return torch.cat([weight.detach().flatten() for weight in make_network(SMALL, seed).parameters()])

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_network(SMALL, 0)
    assert torch.equal(torch.rand(1), expected), "building a network must leave the global stream alone"
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_reset_network_is_a_fresh_one_but_for_its_whitening():
    used = place(make_network(SMALL, seed=3), Precision("fp64", CPU))
    SMALL.whiten(used, torch.randn(9, 32, 32, 3, dtype=torch.float64))
    whitening = used.whitening.weight.clone()
    used(torch.randn(16, 3, 32, 32, dtype=torch.float64)).sum().backward()
    update_running_statistics(used)
    reset(used, SMALL, seed=4)
    fresh = place(make_network(SMALL, seed=4), Precision("fp64", CPU)).state_dict() | {"whitening.weight": whitening}
    for name, tensor in fresh.items():
        assert torch.equal(used.state_dict()[name], tensor), name
