# Sourced by the scripts. `choose_python [PACKAGE...]` sets `python` to an interpreter with these packages and the
# dependencies in pyproject.toml: $PYTHON, or python3 if its torch can use this machine's GPUs. Otherwise it is .venv
# beside this file, made from requirements.txt: finished after an interruption, made anew for another $PYTHON.
install=yes # with "no", `python` is left without the packages instead

fail() { echo "$1" >&2; exit 2; }

# Print the first package that an interpreter lacks, or "nothing". The current folder is not searched for modules.
what_is_lacking() { # INTERPRETER PACKAGE...
    "$1" -P - "$top/pyproject.toml" "${@:2}" 2>/dev/null <<'END' | tail -n 1
import importlib.metadata as m, re, sys, tomllib
def number(version):
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]
def requirements():
    yield from tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"] + sys.argv[2:]
    yield from (each for each in m.requires("torchvision") or [] if re.match(r"torch\b", each))
for requirement in requirements():
    print(requirement)
    name, sign, wanted = re.match(r"([\w-]+) *\(?([=>]=)? *([\d.]*)", requirement).groups()
    found, wanted = number(m.version(name)), number(wanted)
    assert found == wanted or (sign != "==" and found > wanted)
print("nothing")
END
}

# Whether an interpreter's torch can use this machine's GPUs: the driver is new enough, and torch has kernels for each.
can_use_gpus() {
    compgen -G "/dev/nvidia[0-9]*" >/dev/null || nvidia-smi --list-gpus 2>/dev/null | grep -q GPU || return 0 # no GPU
    PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" "$1" -P -c \
        "from large_batch_cifar_10_fast.core.devices import count_gpus; count_gpus()" 2>/dev/null
}

# Whether .venv runs, and is made from $PYTHON; without PYTHON any .venv is right.
is_made_of() {
    local which='import os, sys; print(os.path.realpath(sys.base_prefix), sys.version_info[:2])' ours
    ours=$("$top/.venv/bin/python" -I -c "$which" 2>/dev/null) || return
    [ -z "${PYTHON:-}" ] || [ "$ours" = "$("$1" -I -c "$which" 2>/dev/null)" ]
}

make_venv() { # INTERPRETER WHY
    [ ! -L "$top/.venv" ] || fail "$2, and .venv is a link, which is not changed: set PYTHON to another interpreter"
    [ -w "$top" ] || fail "$2, and $top is read-only: set PYTHON to an interpreter that has the packages"
    if is_made_of "$1" && "$top/.venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
        echo "Finishing $top/.venv" >&2
    else
        echo "Making $top/.venv: $2" >&2
        "$1" -I -m venv --clear "$top/.venv" >&2 || fail "$1 cannot make .venv (on Debian: apt install python3-venv)"
    fi
    echo "About 4 GB are downloaded, and take 7.4 GiB in .venv. This takes some minutes." \
        "To avoid it, set PYTHON to an interpreter that has the packages" >&2
    # Keep variables that name sources of packages; drop others, such as PIP_CONSTRAINT in NVIDIA's containers.
    unset $(compgen -e PIP_ | grep -vE 'INDEX|LINKS|CERT|HOST|PROXY|TIMEOUT|RETRIES|CACHE|CONFIG|KEYRING')
    "$top/.venv/bin/python" -I -m pip install --quiet --disable-pip-version-check -r "$top/requirements.txt" >&2 \
        || fail "Installing requirements.txt into $top/.venv failed; start again to continue. Without a network, set \
PIP_INDEX_URL to a mirror, or PYTHON to an interpreter that has the packages"
    cp "$top/requirements.txt" "$top/.venv/complete"
}

choose_python() { # PACKAGE...
    case $top in *:*) fail "$top has a colon in its name, which PYTHONPATH cannot name: move it" ;; esac
    unset PYTHONOPTIMIZE # would remove checks
    export USER=${USER:-${LOGNAME:-uid$(id -u)}} # torch and Matplotlib ask for a name, and a container may have none
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null || fail "There is no interpreter $python: set PYTHON to one"
    local lacking
    lacking=$(what_is_lacking "$python" "$@")
    if [ "$lacking" != nothing ]; then
        unset PYTHONPATH PYTHONHOME # may hide packages, or break the interpreter
        lacking=$(what_is_lacking "$python" "$@")
    fi
    if [ "$lacking" = nothing ]; then
        if [ -n "${PYTHON:-}" ] || can_use_gpus "$python"; then return; fi
        lacking="a torch that can use the GPUs of this machine (to use $python anyway, set PYTHON=$python)"
    fi
    if ! is_made_of "$python" || ! cmp -s "$top/requirements.txt" "$top/.venv/complete"; then
        [ -n "$lacking" ] || fail "Python 3.11 or newer is needed, and $python is older: set PYTHON to another"
        [ "$install" = yes ] || return 0
        make_venv "$python" "$python lacks $lacking"
    fi
    unset PYTHONPATH # would hide packages of .venv
    python=$top/.venv/bin/python
}
