#!/usr/bin/env bash
# Measure this code on a machine with GPUs.
#     bash measure_gpu.sh [--data DATA] [--out DIR] [PART...]
# Default parts, about nine minutes (expected, not measured yet): facts tests bench first compare profile nccl.
# Other parts, best in a call each:
#     campaign  fifty runs of the default recipe; an interrupted campaign is continued
#     modern    muon: bench, speed against apple2019, profile, twenty runs; twenty runs of muon2024
#     lineage   a run of each recipe of 2018, and the input-pipeline comparison
#     teams     ten runs on one GPU, one after the other, and two at a time
# A dot names a part of a part: first.bf16, lineage.fastai. DATA is as for train_cifar_parallel.sh. Each part has a time limit and
# a log DIR/PART.log (DIR: gpu_measured); a part that fails does not stop the others. DIR/summary.txt has a line for each.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -u
top=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
needed="torch torchvision numpy pandas scipy matplotlib tqdm pytest"
. "$top/choose_python.sh"
data=$top/data out=gpu_measured parts=""
names="facts tests bench first first.fp16 first.bf16 compare compare.plain compare.compiled compare.said profile nccl campaign
modern modern.bench modern.against modern.profile modern.muon modern.muon2024 lineage lineage.input_pipelines lineage.basenet lineage.page
lineage.fastai teams teams.alone teams.sharing"
while [ $# -gt 0 ]; do
    case $1 in
        --data | --out)
            [ $# -gt 1 ] || { echo "measure_gpu.sh: $1 needs a value" >&2; exit 2; }
            [ "$1" = --data ] && data=$2 || out=$2
            shift 2 ;;
        *)
            printf '%s\n' $names | grep -qxF -e "$1" || { echo "measure_gpu.sh: $1 is no part: choose from" $names >&2; exit 2; }
            parts="$parts $1"
            shift ;;
    esac
done
[ -n "$parts" ] || parts="facts tests bench first compare profile nccl"
mkdir -p "$out" || { echo "measure_gpu.sh: --out $out cannot be written" >&2; exit 2; }
choose_python
out=$(cd "$out" && pwd)
case $data in synthetic | /*) ;; *) data=$PWD/$data ;; esac
export PYTHON="$python" PYTHONUNBUFFERED=1 PYTHONPATH="$top${PYTHONPATH:+:$PYTHONPATH}"
# For a trial without a GPU, MEASURE_OPTIONS, MEASURE_MODERN, MEASURE_AGAINST and MEASURE_LINEAGE make every run small.
small=(${MEASURE_OPTIONS:-})
train=(bash "$top/train_cifar_parallel.sh" --data "$data" "${small[@]}")
short=(--data "$data" "${small[@]}" --epochs 3 --ema_ep 0.3)
cd "$top"
touch "$out/summary.txt"
failed=0
# Download CIFAR-10 if it is missing, outside the parts' time limits.
"$python" -c 'import sys; from large_batch_cifar_10_fast.data.cifar10 import count_training_images as see; see(sys.argv[1])' \
    "$data" 2>&1 >/dev/null | tail -n 1 >&2

part() { # NAME SECONDS PATTERN COMMAND...: run within the limit, keep the log, and its last line like PATTERN
    local name=$1 limit=$2 pattern=$3 start=$SECONDS
    shift 3
    case " $parts " in *" ${name%%.*} "* | *" $name "*) ;; *) return ;; esac
    sed -i "/^$name /d" "$out/summary.txt"
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ "$status" = 0 ] || failed=1
    printf '%-23s status %3d, %4d s  %s\n' "$name" "$status" $((SECONDS - start)) \
        "$(grep -aE "$pattern" "$out/$name.log" | tail -n 1 | cut -c 1-150)" | tee -a "$out/summary.txt"
}

part facts 120 '^torch' bash -c 'nvidia-smi; nvidia-smi topo -m; git log -1 --format=%H; exec "$0" -c "
import torch, torchvision
print(\"torch\", torch.__version__, \"CUDA\", torch.version.cuda, \"cuDNN\", torch.backends.cudnn.version(),
      \"torchvision\", torchvision.__version__, \"GPUs\", torch.cuda.device_count())"' "$python"
"$python" -c "import xdist" 2>/dev/null && several="-n 4 --dist load" || several="" # most of a test is starting and compiling
part tests 500 "passed|failed|error" bash run_tests.sh tests/test_gpu.py -v $several
part bench 180 '^step ' "$python" -m large_batch_cifar_10_fast.bench "${small[@]}"
part first.fp16 150 '^Train acc' "${train[@]}" --precision ${MEASURE_PRECISION:-fp16} --runs 2 --out "$out/fp16"
part first.bf16 150 '^Train acc' "${train[@]}" --precision bf16 --runs 2 --out "$out/bf16"
part compare.plain 240 'runs reached' "${train[@]}" --runs 5 --no_compile --out "$out/plain"
part compare.compiled 180 'runs reached' "${train[@]}" --runs 5 --compile --out "$out/compiled"
part compare.said 30 '^Time' bash -c '"$0" -m large_batch_cifar_10_fast.compare "$@"; [ $? -le 1 ]' \
    "$python" "$out/compiled/runs.tsv" "$out/plain/runs.tsv" # 1: worse is an answer, too
profiled='
import sys
from torch.profiler import ProfilerActivity, profile
from large_batch_cifar_10_fast import train
with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
    train.main(sys.argv[1:])
by = "cuda_time_total" if train.torch.cuda.is_available() else "cpu_time_total"
print(seen.key_averages().table(sort_by=by, row_limit=40))'
part profile 150 '(CPU|CUDA) time total' "$python" -c "$profiled" "${short[@]}" --out "$out/profile"
# Two NCCL ranks on one GPU, slow, over sockets, but real: each names a host of its own.
part nccl 240 '^Train acc' "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 --no-python \
    bash -c 'NCCL_HOSTID=$RANK LOCAL_RANK=0 exec "$0" "$@"' "$python" -m large_batch_cifar_10_fast.train \
    "${short[@]}" --out "$out/nccl"
# Continue the campaign; start a new one if there is none, or if other code made it (status 2).
going_on='status=2; [ ! -s "$0" ] || { "$@" --resume; status=$?; }; [ $status != 2 ] || exec "$@"; exit $status'
part campaign 580 'runs reached' bash -c "$going_on" "$out/campaign/runs.tsv" "${train[@]}" --runs 50 --out "$out/campaign"
part modern.bench 240 '^training of a run' "$python" -m large_batch_cifar_10_fast.bench --recipe muon ${MEASURE_MODERN:-}
part modern.against 240 'times as long' "$python" -m large_batch_cifar_10_fast.bench --recipe muon --against apple2019 --repeats 20 \
    ${MEASURE_AGAINST:-}
part modern.profile 150 '(CPU|CUDA) time total' "$python" -c "$profiled" --recipe muon --data "$data" \
    --out "$out/modern_profile" ${MEASURE_MODERN:-}
for recipe in muon muon2024; do
    part modern.$recipe 240 'Lowest accuracy' bash "$top/train_cifar_parallel.sh" --data "$data" --recipe $recipe \
        --runs 20 --out "$out/$recipe" ${MEASURE_MODERN:-}
done
part lineage.input_pipelines 300 '^.e. ' "$python" -m large_batch_cifar_10_fast.bench --input_pipelines ${MEASURE_LINEAGE:-}
for recipe in basenet page fastai; do
    part lineage.$recipe 400 '^Train acc' bash "$top/train_cifar_parallel.sh" --data "$data" --recipe $recipe \
        --out "$out/$recipe" ${MEASURE_LINEAGE:-}
done
one_gpu=(env CUDA_VISIBLE_DEVICES="$(echo "${CUDA_VISIBLE_DEVICES-0}" | cut -d , -f 1)")
ten=(bash "$top/train_cifar_parallel.sh" --data "$data" --recipe muon --runs 10 ${MEASURE_MODERN:-})
part teams.alone 180 'runs reached' "${one_gpu[@]}" "${ten[@]}" --nproc 1 --out "$out/alone"
part teams.sharing 180 'runs reached' "${one_gpu[@]}" "${ten[@]}" --teams 2 --out "$out/sharing"
exit "$failed"
