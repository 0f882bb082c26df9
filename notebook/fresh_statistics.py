"""Train as train.py does, and evaluate after each epoch twice: by running statistics, and by statistics taken anew.

    python notebook/fresh_statistics.py [options of train.py]

Those taken anew are averages over ten batches of training images, by the weights as they are. STDERR has both scores.
The first two lines are of the warm-up, on noise.
"""

import sys

import torch

from large_batch_cifar_10_fast import train
from large_batch_cifar_10_fast.evaluate import Score, evaluate
from large_batch_cifar_10_fast.layers import norms_of, running_statistics
from large_batch_cifar_10_fast.recipe import Model

prepare, latest = train.prepare, []


def keep_data(*arguments) -> train.Data:
    latest[:] = [prepare(*arguments)]
    return latest[0]


def evaluate_twice(model: Model, views, test) -> Score:
    network, score, batches = model.network, evaluate(model, views, test), []
    buffers = running_statistics(network)
    kept = [buffer.clone() for buffer in buffers]
    with torch.no_grad(), model.precision.autocast():
        for sample in latest[0].train.epoch(seed=999, epoch=1)[:10]:
            for images, _ in sample.micro_batches():
                network(images)
                batches.append([each.clone() for norm in norms_of(network) for each in norm.batch_statistics])
    torch._foreach_copy_(buffers, [torch.stack(values).mean(0) for values in zip(*batches, strict=True)])
    anew = evaluate(model, views, test)
    torch._foreach_copy_(buffers, kept)
    print(f"running {score.accuracy:.4f} {score.loss:.3f}, anew {anew.accuracy:.4f} {anew.loss:.3f}", file=sys.stderr)
    return score


train.prepare, train.evaluate = keep_data, evaluate_twice
train.main(sys.argv[1:])
