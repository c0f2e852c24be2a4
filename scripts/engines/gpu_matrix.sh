#!/bin/bash
# The runs of docs/serving/ on a machine with H200s, torch 2.11 (CUDA 13) and transformers 5, without a network:
#   scripts/engines/gpu_matrix.sh vllm|sglang ARCHIVE OUT [SECONDS [LINES]]
#
# ARCHIVE is what bundle.sh made. Everything happens in /tmp/run: the engine is unpacked, the controls are made
# (fixtures/controls.py), and the lines of LINES, by default gpu_ENGINE.txt, run, a dozen at once and spread over the GPUs.
# OUT gets reports.tar.xz with NAME.json, NAME.html and NAME.txt of each line. What still runs after SECONDS is ended and
# has no report: 480 s were enough for all of vLLM's lines, 400 s for SGLang's.
set -u
engine=$1 archive=$(realpath "$2") out=$(realpath -m "$3") seconds=${4:-540}
here=$(cd "$(dirname "$0")" && pwd) run=/tmp/run at_once=12
lines=$(realpath "${5:-$here/gpu_$engine.txt}")
mkdir -p "$out" $run/own $run/reports
cp -r "$here/../../ckptkit" "$here/../../recipes" "$here/../../fixtures" $run/
tar -C $run -ixJf "$archive" || exit
cd $run || exit

# Of what ckptkit needs, this machine has all but these.
for package in click pydantic pydantic_core annotated_types typing_inspection compressed_tensors loguru; do
    ln -sfn "$run/$engine/site/$package" "$run/$engine/site/$package"-*.dist-info own/
done
export PYTHONPATH=$run/own:$run:$run/fixtures OMP_NUM_THREADS=2 TVM_FFI_CACHE_DIR=$run/$engine/kernels
python3 -W ignore -m compileall -qq -j 0 "$engine/site" ckptkit >/dev/null 2>&1 &
python3 fixtures/controls.py . || exit
[ "$engine" != sglang ] || python3 "$here/sglang_controls.py" . || exit
wait
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "ready after $SECONDS s"

# Memory is not measured, so that servers on one GPU do not count each other's.
case $engine in
vllm)
    eager=--enforce-eager
    given="--max-model-len=1024 --max-num-seqs=4 --kv-cache-memory-bytes=1000000000 --gpu-memory-utilization=0.05"
    ;;
sglang)
    eager=--disable-cuda-graph
    given="--attention-backend=triton --sampling-backend=pytorch --grammar-backend=none --context-length=1024
        --mem-fraction-static=0.5 --max-total-tokens=8192 --max-running-requests=4"
    ;;
esac
asked=(--serve --engine "$engine" --engine-python "$engine/python" --prompts prompts.jsonl --max-tokens 48
    --timeout 300s --no-progress)
for word in $given; do asked+=("--engine-arg=$word"); done
for method in draft eagle3 dflash dspark; do asked+=(--draft "$method=$method"); done

one() { # NAME GPU eager|graphs WORDS…
    local name=$1 words=()
    export CUDA_VISIBLE_DEVICES=$2 VLLM_CACHE_ROOT=$run/cache/$name
    [ "$3" = graphs ] || words=("--engine-arg=$eager")
    shift 3
    timeout --kill-after=20 $((seconds - SECONDS)) python3 -m ckptkit verify "$@" "${asked[@]}" "${words[@]}" \
        --report "reports/$name.json" --report "reports/$name.html" >"reports/$name.txt" 2>&1
    echo "$name: exit $? after $SECONDS s"
}
gpus=$(nvidia-smi -L | wc -l) number=0
while read -r name words; do
    case $name in '' | '#'*) continue ;; esac
    while [ "$(jobs -rp | wc -l)" -ge $at_once ]; do wait -n; done
    [ $SECONDS -lt $((seconds - 120)) ] || break
    # shellcheck disable=SC2086  # words
    one "$name" $((number++ % gpus)) $words &
done <"$lines"
wait
tail -n 15 reports/*.txt
tar -cJf "$out/reports.tar.xz" reports
