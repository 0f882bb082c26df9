#!/usr/bin/env bash
# Measure this code on one GPU: GPU tests, 20 runs of apple2019 and of muon, where their time goes, and a page on it.
#     bash measure_gpu.sh [--out DIR] [options of training, for instance --data DATA]
# It takes at most ten minutes, about eight on an H200 (the sum of its parts; not timed whole). DIR (gpu_measured) gets
# report.md, ready to be sent in, a log of each part, the tables of the runs, and traces of 20 steps. A part that fails
# or takes too long does not stop the others; runs that were made count.
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
SECONDS=0
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
export PYTHON="$python" PYTHONUNBUFFERED=1 PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*}
package=large_batch_cifar_10_fast failed=0 load=$(cut -d' ' -f1-3 /proc/loadavg)
: >"$out/parts.md" || exit 2

part() { # NAME SECONDS COMMAND...: run within the limit and, with three more, ten minutes; keep a log, and a row
    local name=$1 limit=$2 left=$((540 - SECONDS)) start=$SECONDS status=0
    shift 2
    [ "$limit" -lt "$left" ] || limit=$((left > 20 ? left : 20))
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" = 0 ] || failed=1
    printf '| %s | %d | %d | %s |\n' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log" | tr '|' '/')" \
        | tee -a "$out/parts.md"
}

query=name,driver_version,clocks.sm,clocks.max.sm,power.limit,memory.total
versions='import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())'
part machine 20 bash -c "nvidia-smi --query-gpu=$query --format=csv,noheader; exec \"\$@\"" - "$python" -c "$versions"
at_once=() # a test for each core, with pytest-xdist: one by one they take too long
"$python" -c "import xdist" 2>/dev/null && at_once=(-n logical --maxprocesses 16)
part tests 180 "$python" -m pytest "$top/tests/test_gpu.py" "${at_once[@]}"
for recipe in apple2019 muon; do
    part $recipe 240 bash "$top/train_cifar_parallel.sh" --recipe $recipe --runs 20 --out "$out/$recipe" "${options[@]}"
done
for recipe in apple2019 muon; do # in a folder of its own: --campaign among the options may name finished runs
    part "profile_$recipe" 60 bash "$top/train_cifar_parallel.sh" --recipe $recipe --profile 20 \
        --out "$out/profile_$recipe" "${options[@]}"
done
# Status 1 is an answer, too: worse than the published runs.
part compare 20 bash -c '"$@"; [ $? -le 1 ]' - "$python" -m $package.compare "$out/apple2019/runs.tsv" published
{
    printf '# Measured on one GPU\n\n%s UTC, load before %s, after %s, `%s`\n' "$(date -u '+%Y-%m-%d %H:%M')" "$load" \
        "$(cut -d' ' -f1-3 /proc/loadavg)" "$(sed -n 's/^# //p' "$out/apple2019.log" | head -n 1)"
    printf '\n| part | status | seconds | last line |\n| --- | --- | --- | --- |\n' && cat "$out/parts.md"
    for name in machine compare profile_apple2019 profile_muon; do printf '\n## %s\n\n```\n' $name && cat "$out/$name.log" && echo '```'; done
} >"$out/report.md"
echo "Results: $out/report.md; logs and tables beside it"
exit $failed
