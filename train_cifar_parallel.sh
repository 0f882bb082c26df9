#!/usr/bin/env bash
# Train on the GPUs or cores of this machine: ./cifar10-fast train (--help lists its options, --install makes .venv).
exec bash "$(dirname "$(readlink -f "$0")")/cifar10-fast" train "$@"
