"""A network and its optimizers, which each run begins with fresh values in the same memory."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import ConfigError
from .optim import set_rate
from .team import Team

Network = TypeVar("Network", bound=nn.Module)


class Model(Generic[Network]):
    """A network and its optimizers. Nothing that a run has trained is kept for the next one."""

    def __init__(self, fresh: Callable[[], tuple[Network, Sequence[Optimizer]]]) -> None:
        """`fresh()` makes a new network and its optimizers.

        Raise ConfigError if a parameter that can be trained is in no optimizer.
        """
        self.fresh = fresh
        self.network, self.optimizers = fresh()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = {id(weight) for group in groups for weight in group["params"]}
        for name, weight in self.network.named_parameters():
            if weight.requires_grad and id(weight) not in trained:
                raise ConfigError(f"no optimizer has the parameter {name}: add it, or freeze it")

    @torch.no_grad()
    def restart(self, seed: int, team: Team) -> None:
        """Begin a run as if it were the first: its seed alone determines its weights and random numbers.

        New values are copied to the same memory, so that compiled code and CUDA graphs stay valid. This concerns all
        parameters and buffers, and on a GPU the settings of the optimizers and their states. There a state becomes
        zeros, with which SGD, AdamW and our optimizers begin, but not NAdam. Finally seed and rank start torch's
        generators, for random numbers of the network, such as dropout.
        """
        torch.manual_seed(seed)
        network, optimizers = self.fresh()
        self.network.train().zero_grad()
        tensors = tensors_of(self.network)
        for name, value in tensors_of(network).items():
            tensors[name].copy_(value)
        for optimizer, new in zip(self.optimizers, optimizers, strict=True):
            if team.on_gpu:
                restart_in_place(optimizer, new)
            else:
                optimizer.load_state_dict(new.state_dict())
        torch.manual_seed(int(np.random.SeedSequence((seed, team.rank)).generate_state(1, np.uint64)[0] >> 1))


def restart_in_place(optimizer: Optimizer, new: Optimizer) -> None:
    """Give an optimizer the settings of a new one, and zeros as its state."""
    for group, new_group in zip(optimizer.param_groups, new.param_groups, strict=True):
        set_rate(group, new_group["lr"])
        group.update({name: value for name, value in new_group.items() if name not in ("params", "lr")})
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def checksum(network: nn.Module) -> str:
    """Return a checksum of all parameters. Wait for the device."""
    total = hashlib.sha256()
    for weight in network.parameters():
        total.update(weight.numpy(force=True).tobytes())
    return total.hexdigest()


def keep_rates_on_gpu(optimizers: Iterable[Optimizer], team: Team) -> None:
    """On a GPU, keep learning rates in tensors, which graphs and compiled code read, and fuse torch's SGD."""
    if not team.on_gpu:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros((), device=team.device)
            if isinstance(optimizer, SGD):
                group["fused"] = True
