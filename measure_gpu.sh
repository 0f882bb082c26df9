#!/usr/bin/env bash
# Measure this code on the GPUs of this machine and write a report. The parts are:
#   - the GPU tests
#   - 20 runs of apple2019 on one GPU
#   - muon and muon2024 in turn, with four launches each
#   - with several GPUs, the published 50 runs of apple2019 on all of them
#   - profiles of 20 steps, with and without CUDA graphs
#   - with NCCL 2.30 or later, eight processes on one GPU
#     bash measure_gpu.sh [--out DIR] [options of training, for instance --data DATA]
# It takes about ten minutes (the sum of its parts). DIR (default gpu_measured) gets report.md, a log of each part, the
# tables of the runs, clocks and power, and the traces. If a part fails or takes too long, the other parts continue, and
# its finished runs count. Ctrl-C ends the script.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;; esac
set -u
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$top/choose_python.sh"
out=gpu_measured options=()
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -gt 1 ] || fail "measure_gpu.sh: --out needs a folder"
            out=$2; shift 2 ;;
        *) options+=("$1"); shift ;;
    esac
done
choose_python pytest
export PYTHON="$python" PYTHONUNBUFFERED=1 PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
package=large_batch_cifar_10_fast child='' monitor='' failed=0 load=$(cut -d' ' -f1-3 /proc/loadavg)
count="import sys; from $package.core.devices import count_gpus; n = count_gpus(); print(n); sys.exit(not n)"
share="import sys; from $package.core.devices import may_share_gpus; sys.exit(not may_share_gpus())"
gpus=$("$python" -c "$count" 2>/dev/null) || fail "measure_gpu.sh: no GPU that torch can use: nothing to measure"
mkdir -p "$out" && out=$(cd "$out" && pwd) && : >"$out/parts.md" || exit 2
trap 'kill $child $monitor 2>/dev/null; wait; exit 130' INT TERM # `timeout` then kills all processes of its part

part() { # NAME SECONDS COMMAND...: run a command with a time limit; write a log, and a row with its last line
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 &
    child=$!
    wait $child || status=$?
    [ "$status" = 0 ] || failed=1
    printf '| %s | %d | %d | %s |\n' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log" | tr '|' '/')" \
        | tee -a "$out/parts.md"
}

train() { # NAME SECONDS OPTION...: make runs
    part "$1" "$2" bash "$top/train_cifar_parallel.sh" "${options[@]}" "${@:3}"
}

watched() { # NAME COMMAND...: run a command and record clocks (MHz), power (W) and load (%) of the GPUs
    nvidia-smi --query-gpu=clocks.sm,power.draw,utilization.gpu --format=csv,noheader,nounits -lms 500 \
        >"$out/$1.clocks" 2>/dev/null &
    monitor=$!
    "${@:2}"
    kill $monitor 2>/dev/null
}

in_turn() { # RECIPE...: four launches of each, with five runs. A launch chooses kernels, so it is one measurement
    local turn recipe
    for turn in 1 2 3 4; do
        for recipe; do
            train "${recipe}_$turn" 60 --nproc 1 --out "$out/in_turn" --recipe "$recipe" --campaign "$recipe" --runs $((5 * turn))
        done
    done
}

query=name,driver_version,clocks.max.sm,power.limit,memory.total
versions='import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())'
part machine 20 bash -c "nvidia-smi --query-gpu=$query --format=csv,noheader; exec \"\$@\"" - "$python" -c "$versions"
at_once=() # run the tests in parallel with pytest-xdist, because they take too long in sequence
"$python" -c "import xdist" 2>/dev/null && at_once=(-n logical --maxprocesses 16)
part tests 180 "$python" -m pytest -v "$top/tests/test_gpu.py" "${at_once[@]}"
watched apple2019 train apple2019 240 --nproc 1 --out "$out/apple2019" --recipe apple2019 --runs 20
watched in_turn in_turn muon muon2024
[ "$gpus" = 1 ] || watched apple2019_on_all train apple2019_on_all 240 --out "$out/apple2019_on_all" --recipe apple2019 --runs 50
for recipe in apple2019 muon; do
    for graph in "" --no_graph; do
        name=profile_$recipe${graph#-}
        mkdir -p "$out/$name"
        part "$name" 60 env -C "$out/$name" "$python" "$top/notebook/profile_steps.py" --recipe $recipe "${options[@]}" $graph
    done
done
if NCCL_MULTI_RANK_GPU_ENABLE=1 "$python" -c "$share" 2>/dev/null; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=1
    train eight_processes 90 --recipe apple2019 --nproc 8 --epochs 2 --ema_ep 0.5 --no_graph --out "$out/eight_processes"
    unset NCCL_MULTI_RANK_GPU_ENABLE NCCL_MAX_CTAS
fi
compare() { # NAME CAMPAIGN REFERENCE: compare two campaigns. Status 1 (one is worse) is not a failure
    part "compare_$1" 20 bash -c '"$@"; [ $? -le 1 ]' - "$python" -m $package compare "$2" "$3"
}
compare apple2019 "$out/apple2019/runs.tsv" published
compare in_turn "$out/in_turn/runs.tsv:muon" "$out/in_turn/runs.tsv:muon2024"
[ "$gpus" = 1 ] || compare apple2019_on_all "$out/apple2019_on_all/runs.tsv" published
describe='import glob, pandas as pd
for name in sorted(glob.glob("*.clocks")):
    table = pd.read_csv(name, names=["SM clock, MHz", "power, W", "load, %"])
    print(name, "while the load is above 50%", table[table["load, %"] > 50].describe().round(1), sep="\n")'
part clocks 20 env -C "$out" "$python" -c "$describe"
{
    printf '# Measured on %s GPU(s)\n\n%s UTC, load before %s, after %s, `%s`\n' "$gpus" "$(date -u '+%Y-%m-%d %H:%M')" \
        "$load" "$(cut -d' ' -f1-3 /proc/loadavg)" "$(sed -n 's/^# //p' "$out/apple2019.log" | head -n 1)"
    printf '\n| part | status (124: too long) | seconds | last line |\n| --- | --- | --- | --- |\n' && cat "$out/parts.md"
    printf '\n## Tests that ended\n\n```\n' && grep -E '(PASSED|FAILED|ERROR|SKIPPED)' "$out/tests.log"
    for log in "$out"/{machine,compare*,clocks,profile*}.log; do printf '```\n\n## %s\n\n```\n' "$(basename "$log" .log)" && cat "$log"; done
    echo '```'
} >"$out/report.md"
echo "Results: $out/report.md; logs and tables beside it"
exit $failed
