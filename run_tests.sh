#!/usr/bin/env bash
# Run all tests (under five minutes on two cores). Arguments go to pytest.
set -eu
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
needed="torch torchvision numpy pandas scipy matplotlib tqdm pytest"
. "$top/choose_python.sh"
choose_python
cd "$top"
if "$python" -m ruff --version >/dev/null 2>&1; then
    "$python" -m ruff check .
fi
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python"
exec "$python" -m pytest "$@"
