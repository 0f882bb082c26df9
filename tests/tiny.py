"""A small program of the tests' own: two workers of plain PyTorch, whose network and optimizer are options."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from large_batch_cifar_10_fast.core import data, fast
from large_batch_cifar_10_fast.core.hyp import BaseHyp
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
        fast.place(network, precision)
        settings = {"momentum": 0.9} if hyp.optimizer == "SGD" else {}
        return network, [getattr(torch.optim, hyp.optimizer)(network.parameters(), lr=0.02, **settings)]

    network, (optimizer,) = fresh()
    model = fast.Model(network, [optimizer], fresh)
    shards = data.upload(images, machine.clock, team, precision)

    def step(x: Tensor, y: Tensor) -> None:
        logits = network(x)
        losses = losses_of(hyp, logits, y)
        (losses.mean() * len(team.workers)).backward()
        sums.add_(sums_of(logits, y, losses))
        team.average_gradients(network.parameters())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9

    def run(seed):
        machine.restart(model, seed)
        for epoch in range(1, hyp.epochs + 1):
            plans = []
            for number, worker in enumerate(team.workers):
                rows = data.shard(number, len(team.workers), len(shards.images), team.device)
                order = torch.randperm(len(rows), generator=data.generator(team.device, seed, worker, epoch))
                plans.append(rows[order][None])
            sums.zero_()
            with machine.clock.timed("training"):
                for _, (rows,) in machine.steps(data.split_into_steps(plans, steps, hyp.batch_size)):
                    step(shards.images[rows].permute(0, 3, 1, 2), shards.labels[rows])
            with machine.clock.timed("validation"), fast.evaluating(network, precision, team):
                logits = data.predict_all(network, shards.test_images, "one")
                losses = losses_of(hyp, logits, shards.test_labels)
                validation = read_score(sums_of(logits, shards.test_labels, losses), team)
            yield Epoch(epoch, machine.clock.total, read_score(sums, team), validation, network)

    return run
