#!/usr/bin/env bash
# Train on the GPUs or cores of this machine: picks an interpreter and starts torchrun (see launch.py).
# --help lists the options. From the environment: PYTHON, CIFAR10_URL.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -eu
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
needed="torch torchvision numpy pandas scipy matplotlib tqdm"
. "$top/choose_python.sh"
choose_python
imports_numpy() { "$python" -P -c "import numpy" 2>/dev/null; }
if [ -n "${PYTHONPATH:-}" ] && ! imports_numpy && PYTHONPATH="" imports_numpy; then
    echo "PYTHONPATH=$PYTHONPATH has packages of another Python than $python: unset it" >&2
    exit 2
fi
# The folder a user stands in may hold files named like modules: only the repository is searched for them.
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 LARGE_BATCH_LAUNCH=0 # see __init__.py
{ : >&1; } 2>/dev/null || exec >/dev/null # a closed STDOUT
export PYTHONIOENCODING=${PYTHONIOENCODING-} # a name of a folder that the log's encoding lacks must not end a campaign
PYTHONIOENCODING=${PYTHONIOENCODING%%:*}:backslashreplace
# Left over from a launcher around this one; and what would bind all processes to the same core.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT ${!TORCHELASTIC_@}
unset OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # launch.py reports an error in one line
exec "$python" -m large_batch_cifar_10_fast.launch "$@"
