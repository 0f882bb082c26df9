#!/usr/bin/env bash
# Check style, types and imports with the installed tools, then run all tests. This takes about four minutes on two idle
# cores with pytest-xdist. --quick skips the slow tests and takes half a minute. Other arguments go to pytest.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;; esac
set -eu
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$top/choose_python.sh"
choose_python pytest
cd "$top"
export PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python"

run_if_installed() { # MODULE WORD...: if the module is installed, print the command `python WORD...` and run it
    "$python" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$1'))" || return 0
    shift
    echo "+ $python $*"
    "$python" "$@"
}
run_if_installed ruff -m ruff check .
run_if_installed ruff -m ruff format --check .
run_if_installed mypy -m mypy
run_if_installed importlinter -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-logo
[ "${1:-}" != --quick ] || { shift; set -- -m "not slow" "$@"; }
# Use pytest-xdist to run two test files at a time with one thread each, because most tests do not use two cores.
if "$python" -c "import xdist" 2>/dev/null; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    set -- -n 2 --dist loadfile "$@"
fi
echo "+ $python -m pytest $*"
exec "$python" -m pytest "$@"
