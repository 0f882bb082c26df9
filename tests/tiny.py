"""A small program of the tests' own: two workers of plain PyTorch, whose network and optimizer are options."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from large_batch_cifar_10_fast.core import data, fast
from large_batch_cifar_10_fast.core.log import read_score, sums_of
from large_batch_cifar_10_fast.core.program import main


@dataclass(frozen=True)
class Hyp:
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


class Pass(NamedTuple):
    loss: Tensor
    sums: Tensor


def train(hyp, options, images, team, log) -> None:
    precision = fast.Precision(options.precision, team.device, half_weights=False)
    steps = len(images.train_images) // hyp.workers // hyp.batch_size

    def fresh():
        network = Network(hyp, images.classes)
        fast.place(network, precision)
        settings = {"momentum": 0.9} if hyp.optimizer == "SGD" else {}
        return network, [getattr(torch.optim, hyp.optimizer)(network.parameters(), lr=0.02, **settings)]

    network, (optimizer,) = fresh()

    def forward(x: Tensor, y: Tensor) -> Pass:
        logits = network(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        return Pass(losses.mean() * len(team.workers), sums_of(logits, y, losses))

    shards = data.upload(images, team, precision, log.clock)
    with log.clock.timed("whitening"):
        pass
    log.ready(hyp.epochs * [steps * hyp.workers * hyp.batch_size], compiled=False, graphs=False)
    for seed in log.missing_runs():
        fast.restart(network, [optimizer], fresh, team, seed)
        for epoch in range(1, hyp.epochs + 1):
            plans = []
            for number, worker in enumerate(team.workers):
                rows = data.shard(number, len(team.workers), len(shards.images), team.device)
                order = torch.randperm(len(rows), generator=data.generator(team.device, seed, worker, epoch))
                plans.append(rows[order][None])
            sums = torch.zeros(3, dtype=torch.float64)
            with log.clock.timed("training"):
                for _, (rows,) in log.progress(data.split_into_steps(plans, steps, hyp.batch_size)):
                    made = forward(shards.images[rows].permute(0, 3, 1, 2), shards.labels[rows])
                    made.loss.backward()
                    sums += made.sums
                    team.average_gradients(network.parameters())
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.param_groups[0]["lr"] *= 0.9
            with log.clock.timed("validation"), torch.no_grad():
                network.eval()
                team.broadcast(*network.buffers())
                logits = torch.cat([network(x) for x in fast.chunks(shards.test_images)])
                network.train()
                losses = F.cross_entropy(logits, shards.test_labels, reduction="none")
                validation = read_score(sums_of(logits, shards.test_labels, losses), team)
            log.epoch(read_score(sums, team), validation)
        log.finish(network.state_dict())


if __name__ == "__main__":
    main()
