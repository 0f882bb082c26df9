# Sourced by the two scripts: sets `python` to an interpreter that has what is needed.
#
# That is $PYTHON, else the active python3, if it has every package named in requirements.txt, torchvision made
# for the torch beside it; else .venv beside this file, made from requirements.txt or finished where that was
# broken off. Nothing is imported for the look, so it takes a moment, and nothing is installed that is there.
# $needed names the distributions. The folder that a user stands in, where `-c` and `-m` look first, is not searched.

has_what_is_needed() {
    [ "$("$1" -c '
import sys
sys.path[:] = [place for place in sys.path if place]
import importlib.metadata as m, re
assert sys.version_info >= (3, 11)
have = {name: m.version(name).split("+")[0] for name in sys.argv[1:]}
wanted = re.findall(r"^torch *==([\d.]+)", "\n".join(m.requires("torchvision") or []), re.M)
assert not wanted or have["torch"] == wanted[0]
print("yes")
' $needed 2>/dev/null)" = yes ]
}

is_complete() { cmp -s "$top/requirements.txt" "$top/.venv/complete"; }

# Run a command that ends when this script is killed, where bash alone would leave it behind; after SIGKILL the kernel
# sees to it, where util-linux has setpriv.
attended() {
    local tied=""
    ! command -v setpriv >/dev/null || tied="setpriv --pdeathsig TERM"
    $tied "$@" &
    local child=$!
    trap 'kill "$child" 2>/dev/null; exit 143' TERM INT HUP
    wait "$child" || { local status=$?; trap - TERM INT HUP; return "$status"; }
    trap - TERM INT HUP
}

make_venv() {
    if [ ! -x "$top/.venv/bin/python" ] || ! "$top/.venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
        echo "Making $top/.venv: $1 lacks some of: $needed" >&2
        attended "$1" -I -m venv --clear "$top/.venv" >&2 || { echo "$1 cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 2; }
    else
        echo "Finishing $top/.venv" >&2
    fi
    attended "$top/.venv/bin/python" -I -m pip install --quiet --disable-pip-version-check -r "$top/requirements.txt" >&2 \
        || { echo "Installing requirements.txt into $top/.venv failed; start again to go on" >&2; exit 2; }
    cp "$top/requirements.txt" "$top/.venv/complete"
}

choose_python() {
    python=${PYTHON:-python3}
    has_what_is_needed "$python" && return
    command -v "$python" >/dev/null || { echo "There is no interpreter $python: name one in PYTHON" >&2; exit 2; }
    if [ -n "${PYTHON:-}" ] || ! is_complete; then
        [ "$("$python" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ] \
            || { echo "Python 3.11 or newer is needed; $python is not: name another in PYTHON" >&2; exit 2; }
    fi
    is_complete || make_venv "$python"
    python=$top/.venv/bin/python
}
