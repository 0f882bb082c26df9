"""A small program of the tests' own: two workers of plain PyTorch, whose network and optimizer are options."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from large_batch_cifar_10_fast.core import data
from large_batch_cifar_10_fast.core.hyp import BaseHyp
from large_batch_cifar_10_fast.core.model import Model
from large_batch_cifar_10_fast.core.precision import move
from large_batch_cifar_10_fast.core.score import Epoch, read_score, sums_of


@dataclass(frozen=True)
class Hyp(BaseHyp):
    """Two workers of 16 images."""

    epochs: int = 2  # passes over the training images
    batch_size: int = 16  # images a worker takes each step
    norm: Literal["batch", "no"] = "batch"  # norm
    dropout: float = 0.0  # part of the features that is left out
    optimizer: Literal["SGD", "AdamW", "NAdam", "Adagrad"] = "SGD"  # torch's
    workers: int = 2  # replicas


class Network(nn.Sequential):
    def __init__(self, hyp: Hyp, classes: int) -> None:
        norm = nn.BatchNorm2d(6) if hyp.norm == "batch" else nn.Identity()
        pool = nn.AdaptiveAvgPool2d(1)
        features = [nn.Conv2d(3, 6, 3), norm, nn.ReLU(), pool, nn.Flatten(), nn.Dropout(hyp.dropout)]
        super().__init__(*features, nn.Linear(6, classes))


def losses_of(hyp, logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def train(hyp, images, machine):
    team = machine.assign_workers(hyp.workers)
    precision = machine.choose_precision("bf16", half_weights=False)
    steps = len(images.train_images) // hyp.workers // hyp.batch_size
    sums = torch.zeros(3, dtype=torch.float64)

    def fresh():
        network = Network(hyp, images.classes)
        move(network, precision)
        settings = {"momentum": 0.9} if hyp.optimizer == "SGD" else {}
        return network, [getattr(torch.optim, hyp.optimizer)(network.parameters(), lr=0.02, **settings)]

    model = Model(fresh)
    network = model.network
    (optimizer,) = model.optimizers
    load = partial(data.upload, team=team, precision=precision)

    def make_batch(images: Tensor, labels: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        (rows,) = batch
        return images[rows].permute(0, 3, 1, 2), labels[rows]

    def train_step(batch: Tensor) -> None:
        x, y = machine.make_batch(batch)
        logits = machine.forward(x, y)
        losses = losses_of(hyp, logits, y)
        (losses.mean() * len(team.workers)).backward()
        sums.add_(sums_of(logits, y, losses))
        team.average_gradients(network.parameters())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9

    machine.set_up(images, model, make_batch, lambda x, y: network(x), load, train_step, [])

    def run(seed):
        machine.restart(model, seed)
        for epoch in range(1, hyp.epochs + 1):
            plans = []
            for number, worker in enumerate(team.workers):
                rows = data.shard(number, len(team.workers), len(machine.shards.images), team.device)
                order = torch.randperm(len(rows), generator=data.generator(team.device, seed, worker, epoch))
                plans.append(rows[order][None])
            sums.zero_()
            with machine.clock.timed("training"):
                for batch in data.split_into_steps(plans, steps, hyp.batch_size):
                    machine.step(batch)
            with machine.clock.timed("validation"):
                validation = machine.evaluate(network, partial(losses_of, hyp), "one")
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
