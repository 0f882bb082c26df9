# Sourced by the scripts: sets `python` to an interpreter that has the needed packages.
#
# That is $PYTHON, or the active python3, if it has all packages in $needed, torch 2.10 or later and its torchvision.
# The torch of python3 must also be able to use this machine's GPUs. Otherwise it is .venv beside this file, made from
# requirements.txt. An interrupted installation is finished; another $PYTHON makes a new .venv.
# The current folder is not searched for modules.

has_what_is_needed() {
    [ "$("$1" -c '
import sys
sys.path[:] = [place for place in sys.path if place]
import importlib.metadata as m, re
assert sys.version_info >= (3, 11)
number = lambda version: [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]
have = {name: number(m.version(name)) for name in sys.argv[1:]}
assert have.get("torch", [9]) >= [2, 10]
for sign, version in re.findall(r"^torch *\(?([=>]=) *([\d.]+)", "\n".join(m.requires("torchvision") or []), re.M):
    assert have["torch"] == number(version) or (sign == ">=" and have["torch"] > number(version))
print("yes")
' $needed 2>/dev/null)" = yes ]
}

# Whether this machine shows NVIDIA GPUs, and CUDA_VISIBLE_DEVICES does not hide them.
has_gpus() {
    case ${CUDA_VISIBLE_DEVICES-all} in "" | -1* | NoDevFiles*) return 1 ;; esac
    compgen -G "/dev/nvidia[0-9]*" >/dev/null || nvidia-smi --list-gpus 2>/dev/null | grep -q GPU
}

# Whether an interpreter's torch can use them: the driver is new enough, and torch has kernels for each.
can_use_gpus() {
    PYTHONPATH="$top" PYTHONSAFEPATH=1 "$1" -c 'from large_batch_cifar_10_fast.devices import count_gpus; count_gpus()' 2>/dev/null
}

is_complete() { cmp -s "$top/requirements.txt" "$top/.venv/complete" && is_made_of "$1"; }

# Whether .venv runs, and is made from $PYTHON; without PYTHON any .venv is right.
is_made_of() {
    local which='import os, sys; print(os.path.realpath(sys.base_prefix), sys.version_info[:2])' ours
    ours=$("$top/.venv/bin/python" -I -c "$which" 2>/dev/null) || return
    [ -z "${PYTHON:-}" ] || [ "$ours" = "$("$1" -I -c "$which" 2>/dev/null)" ]
}

make_venv() { # INTERPRETER WHY
    [ -w "$top" ] || { echo "$2, and $top is read-only: name an interpreter in PYTHON" >&2; exit 2; }
    unset PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV # would install elsewhere, or not at all
    if ! is_made_of "$1" || ! "$top/.venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
        echo "Making $top/.venv: $2" >&2
        "$1" -I -m venv --clear "$top/.venv" >&2 || { echo "$1 cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 2; }
    else
        echo "Finishing $top/.venv" >&2
    fi
    "$top/.venv/bin/python" -I -m pip install --quiet --disable-pip-version-check -r "$top/requirements.txt" >&2 \
        || { echo "Installing requirements.txt into $top/.venv failed; start again to continue" >&2; exit 2; }
    cp "$top/requirements.txt" "$top/.venv/complete"
}

choose_python() {
    case $top in *:*) echo "$top has a colon in its name, which PYTHONPATH cannot name: move it" >&2; exit 2 ;; esac
    unset PYTHONOPTIMIZE # would remove checks
    export USER=${USER:-${LOGNAME:-uid$(id -u)}} # torch and Matplotlib ask for a name, and a container may have none
    python=${PYTHON:-python3}
    local why="$python lacks some of: $needed (torch from 2.10 on)"
    if has_what_is_needed "$python"; then
        if [ -n "${PYTHON:-}" ] || ! has_gpus || can_use_gpus "$python"; then return; fi
        why="the torch of $python cannot use the GPUs of this machine (PYTHON=$python uses it anyway)"
    fi
    command -v "$python" >/dev/null || { echo "There is no interpreter $python: name one in PYTHON" >&2; exit 2; }
    if ! is_complete "$python"; then
        [ "$("$python" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ] \
            || { echo "Python 3.11 or newer is needed; $python is not: name another in PYTHON" >&2; exit 2; }
        make_venv "$python" "$why"
    fi
    python=$top/.venv/bin/python
}
