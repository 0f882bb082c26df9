#!/usr/bin/env bash
# Train on the GPUs or cores of this machine: picks an interpreter and starts `train` (--help lists its options).
# From the environment: PYTHON, CIFAR10_URL.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -eu
for n in 1 2; do [ -e /dev/fd/$n ] || eval "exec $n>/dev/null"; done # a closed STDOUT or STDERR
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$top/choose_python.sh"
case " $* " in *" --help "* | *" -h "* | *" --version "*) install=no ;; esac
choose_python
# The folder a user stands in may hold files named like modules: only the repository is searched for them.
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
exec "$python" -m large_batch_cifar_10_fast train "$@"
