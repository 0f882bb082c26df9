"""CIFAR-10 to 94%, eight workers at a time: a living reproduction of the 2019 result."""

__version__ = "0.1.0"
