#!/usr/bin/env bash
# Measure this code on a machine with GPUs: GPU tests, speed, five runs of apple2019 and muon, and a picture of them.
#     bash measure_gpu.sh [--out DIR] [options of training, for instance --data DATA]
# Expected to take ten minutes (not measured yet). DIR (gpu_measured) gets summary.txt, with a line for each part, a log
# and the tables of each part, and timing.png. A part that fails, or takes too long, does not stop the others.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;; esac
set -u
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$top/choose_python.sh"
out=gpu_measured options=()
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -gt 1 ] || { echo "measure_gpu.sh: --out needs a folder" >&2; exit 2; }
            out=$2; shift 2 ;;
        *) options+=("$1"); shift ;;
    esac
done
choose_python pytest
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
export PYTHON="$python" PYTHONUNBUFFERED=1 PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
package=large_batch_cifar_10_fast
failed=0
: >"$out/summary.txt" || exit 2

part() { # NAME SECONDS COMMAND...: run within the limit; keep the log, and its last line in the summary
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" = 0 ] || failed=1
    printf '%-16s status %3d, %4d s: %s\n' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")" \
        | tee -a "$out/summary.txt"
}

facts='import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "GPUs", torch.cuda.device_count())'
part machine 60 bash -c 'nvidia-smi; nvidia-smi topo -m; exec "$@"' - "$python" -c "$facts"
part tests 600 bash "$top/run_tests.sh" tests/test_gpu.py
for recipe in apple2019 muon; do
    part "bench_$recipe" 300 "$python" -m $package.bench --recipe $recipe "${options[@]}"
    part $recipe 600 bash "$top/train_cifar_parallel.sh" --recipe $recipe --runs 5 --out "$out/$recipe" "${options[@]}"
done
part against 300 "$python" -m $package.bench --recipe muon --against apple2019 --repeats 20 "${options[@]}"
# Status 1 is an answer, too: worse than the published runs.
part compare 60 bash -c '"$@"; [ $? -le 1 ]' - "$python" -m $package.compare "$out/apple2019/runs.tsv" published
part plot 60 "$python" -m $package.plot "$out/muon/runs.tsv" "$out/apple2019/runs.tsv" --out "$out/timing.png"
echo "Results: $out/summary.txt; logs and tables beside it, a picture in $out/timing.png"
exit $failed
