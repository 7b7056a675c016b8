#!/usr/bin/env bash
# Speed on one machine, ours and that of transformers under FSDP2 in one call: bash tests/gpu/bench.sh OUT GPUS [ROWS_A_GPU] [OPTIONS OF OURS ...]
# 7B shape, rows of 8192 tokens, images and text. Writes OUT/ours.json, OUT/fsdp2.json and logs; prints both tables and the ratio.
set -uo pipefail
out=$1 gpus=$2 rows=${3:-4}
shift $(($# < 3 ? $# : 3))
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
config=${CONFIG:-tests/hf_configs/Qwen2.5-VL-7B-Instruct.json} python=${PYTHON:-python3}
seq_len=${SEQ_LEN:-8192} timed=${TIMED:-5} limit=${LIMIT:-270}
mkdir -p "$out"

bench() { # NAME, module, then its options
  local name=$1 module=$2 start=$SECONDS; shift 2
  timeout "$limit" "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m $module --model.hf "$config" \
    --data.seq_len "$seq_len" --global_batch_size $((rows * gpus)) --timed "$timed" \
    --out "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  local code=$?
  echo "== $name: exit $code after $((SECONDS - start)) s"
  if [ $code = 0 ]; then sed -n '/parameters/,$p' "$out/$name.log"; else grep -E "Error|failed" "$out/$name.log" | sort | uniq -c | tail -8; fi
  return $code
}

bench ours "toolkit bench" "$@"; ours=$?
given=()
if [ $ours = 0 ]; then given=(--ours "$out/ours.json"); fi
bench fsdp2 benchmarks.fsdp2 "${given[@]}"; fsdp2=$?
exit $((ours | fsdp2))
