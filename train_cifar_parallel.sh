#!/usr/bin/env bash
# Train on the GPUs or cores of this machine: picks an interpreter and starts the processes (see launch.py).
# --help lists the options. From the environment: PYTHON, CIFAR10_URL.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -eu
for n in 1 2; do [ -e /dev/fd/$n ] || eval "exec $n>/dev/null"; done # a closed STDOUT or STDERR
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$top/choose_python.sh"
choose_python
# The folder a user stands in may hold files named like modules: only the repository is searched for them.
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
export PYTHONIOENCODING=${PYTHONIOENCODING-} # a name of a folder that the log's encoding lacks must not end a campaign
PYTHONIOENCODING=${PYTHONIOENCODING%%:*}:backslashreplace
unset OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY # would bind all processes to the same core
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # an error is one line
exec "$python" -m large_batch_cifar_10_fast.launch "$@"
