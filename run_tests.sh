#!/usr/bin/env bash
# Run all tests (about four minutes on two idle cores with pytest-xdist), or with --quick one minute's worth. Other arguments go to pytest.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -eu
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
needed="torch torchvision numpy pandas scipy matplotlib tqdm pytest"
. "$top/choose_python.sh"
choose_python
cd "$top"
if "$python" -m ruff --version >/dev/null 2>&1; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
fi
if "$python" -m mypy --version >/dev/null 2>&1; then
    "$python" -m mypy
fi
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python"
if [ "${1:-}" = --quick ]; then
    shift
    set -- -m "not slow" "$@"
fi
# Where pytest-xdist is, two files at a time, a thread each: most of what a test waits for does not use two cores.
if "$python" -c "import xdist" 2>/dev/null; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    set -- -n 2 --dist loadfile "$@"
fi
exec "$python" -m pytest "$@"
