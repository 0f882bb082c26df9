"""A recipe against an independent one of PyTorch's stock layers, in float64; what minimal/apple2019.py does not cover.

Whole runs through `train_once` and `evaluate`, with an evaluation after each epoch. The reference takes the workers one
after the other, each with its own images, its own statistics and its own loss. Shared with our code are only initial
weights and the augmented batches, which test_shards.py is about.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder, prepared, train_prepared
from torch import nn

from large_batch_cifar_10_fast.data.cifar10 import Images
from large_batch_cifar_10_fast.data.synthetic import draw_shapes
from large_batch_cifar_10_fast.evaluate import TWO_VIEWS, evaluate
from large_batch_cifar_10_fast.layers import norms_of, whitening_buffers
from large_batch_cifar_10_fast.recipe import make_network, reset
from large_batch_cifar_10_fast.recipes.apple2019 import Apple2019

SEED = 11
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
            assert x.is_contiguous(memory_format=torch.channels_last)
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
        score = log.scores[epoch - 1][1]
        assert (score.correct, score.images) == ((logits.argmax(1) == labels).sum(), len(labels))
        assert score.loss == pytest.approx(losses(logits, labels).mean().item(), rel=1e-9)
    score = log.scores[-1][0]
    assert (score.correct, score.images) == (right, sum(size for size, _ in sizes) * recipe.workers)
    assert score.loss == pytest.approx(total / score.images, rel=1e-9)
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


def test_averaged_statistics_are_the_mean_of_those_of_all_groups():
    """Training is as with the first group's; minimal/apple2019.py is the reference of that."""
    images, sizes = Images("shapes", *draw_shapes(8 * 16 * 3, 40)), {"width": 3, "batch_size": 16, "ghost_batch": 8}
    networks, scores = {}, {}
    for name in ("first", "average"):
        model, data = prepared(Apple2019(eval_stats=name, epochs=2, ema_ep=0.3, **sizes), images)
        train_prepared(model, data, SEED, log := Recorder())
        networks[name], scores[name] = model.network, log.scores[-1][1]
    first, average = (norms_of(networks[name]) for name in ("first", "average"))
    for one, every in zip(first, average, strict=True):
        assert torch.equal(one.bias, every.bias)
        assert torch.equal(one.running_mean, every.running_mean[:1])
        assert (len(every.running_mean), len(every.running_var)) == (2, 2)
        one.running_mean.copy_(every.running_mean.mean(0))
        one.running_var.copy_((every.running_var[0] + every.running_var[1]) / 2)
    first_model, data = prepared(Apple2019(eval_stats="first", **sizes), images)
    first_model.network.load_state_dict(networks["first"].state_dict())
    score = evaluate(first_model, TWO_VIEWS, data.test)
    assert score.loss == pytest.approx(scores["average"].loss, rel=1e-12)
    assert score.loss != scores["first"].loss


@pytest.mark.parametrize(("batch_size", "ghost_batch"), [(256, 16), (512, 32), (64, 4)])
def test_a_batch_is_sixteen_ghost_groups_unless_told_otherwise(batch_size, ghost_batch):
    assert Apple2019(batch_size=batch_size).ghost_batch == ghost_batch
    assert {norm.ghost_batch for norm in norms_of(Apple2019(batch_size=batch_size, width=4).network())} == {ghost_batch}
    assert Apple2019(batch_size=batch_size, ghost_batch=8).ghost_batch == 8


def test_building_a_network_leaves_the_global_random_stream_alone():
    before = torch.get_rng_state()
    make_network(SMALL, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
