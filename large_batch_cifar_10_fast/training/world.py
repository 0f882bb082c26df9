"""The process group: which workers live on which process, and how gradients are averaged."""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm


@dataclass(frozen=True)
class World:
    """The process group that trains a run together: this process's rank, the world size, its device and the number of
    workers of all processes."""

    rank: int
    world_size: int
    device: torch.device
    total_workers: int
    store: dist.Store | None = None  # for messages; a single process has none

    @property
    def workers(self) -> range:
        """The workers of this process: equal consecutive parts, so that worker 0 is on rank 0."""
        share = self.total_workers // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which has worker 0 and writes tables and log."""
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def warn(self, text: str) -> None:
        """Print a line to STDERR, from rank 0 alone."""
        if self.is_main:
            warn(text)

    def synchronize(self) -> None:
        """Return when the devices of all processes have finished what they were given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, *tensors: Tensor) -> None:
        """Give all processes the main one's values, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def average_gradients(self, network: nn.Module, loss_scale: int) -> None:
        """The mean over all workers, in place; a process's gradients are sums over its own workers, of scaled losses.

        Divided before they are summed, as published: half precision does not reach as far as the sum. All of one
        type go in one message, at the end: a compiled backward hands over nothing earlier.
        """
        gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            # A gradient has its weight's strides, which leave no gaps: as a line of numbers it needs no copy.
            lines = [g.as_strided((g.numel(),), (1,)) for g in gradients if g.dtype == dtype]
            torch._foreach_div_(lines, self.total_workers * loss_scale)
            if self.world_size > 1:
                message = torch.cat(lines)
                dist.all_reduce(message)
                torch._foreach_copy_(lines, message.split([len(line) for line in lines]))

    def all_gather_words(self, subject: str, word: str) -> list[str]:
        """Return what each process says about a subject, by rank, when all have said it; each subject once."""
        if self.store is None:
            return [word]
        self.store.set(f"{subject}/{self.rank}", word)
        return [self.store.get(f"{subject}/{other}").decode() for other in range(self.world_size)]


def warn(text: str) -> None:
    """A line on STDERR, clear of the progress bar."""
    with tqdm.external_write_mode():
        print(f"Warning: {text}", file=sys.stderr, flush=True)
