#!/usr/bin/env bash
# Run all tests (about ten minutes on two cores), or with --quick those of one. Other arguments go to pytest.
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
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python"
if [ "${1:-}" = --quick ]; then
    shift
    set -- -m "not slow" "$@"
fi
exec "$python" -m pytest "$@"
