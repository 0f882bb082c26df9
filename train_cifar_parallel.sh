#!/usr/bin/env bash
# Train on all devices of this machine: picks an interpreter and starts torchrun (see launch.py).
# --help lists the options. From the environment: PYTHON, CIFAR10_URL.
set -eu
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
needed="torch torchvision numpy pandas scipy matplotlib tqdm"
. "$top/choose_python.sh"
choose_python
# The folder a user stands in may hold files named like modules: only the repository is searched for them.
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 LARGE_BATCH_LAUNCH=0 # see __init__.py
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # what goes wrong is told in one line, by launch.py
exec "$python" -m large_batch_cifar_10_fast.launch "$@"
