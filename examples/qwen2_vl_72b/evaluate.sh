#!/usr/bin/env bash
# Qwen2-VL-72B-Instruct: is the checkpoint that comes back from the layout of pretrain.yaml the original, down to a benchmark's scores? And what does
# the trained one score, once there is one? Needs the eval extra. Options behind it go to `megatron-vl evaluate`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen2-VL-72B-Instruct}
SHARDS=${SHARDS:-checkpoints/qwen2_vl_72b-tp8-pp4}
RUN=${RUN:-runs/qwen2_vl_72b}
DATA=${DATA:-MMBench_DEV_EN_V11}
OUT=${OUT:-evaluation/qwen2_vl_72b}

megatron-vl export --checkpoint "$SHARDS" --hf "$HF" --out "$OUT/converted" --force
if [ -f "$RUN/latest.json" ]; then
  megatron-vl export --checkpoint "$RUN" --hf "$HF" --out "$OUT/trained" --force
  set -- --trained "$OUT/trained" "$@"
fi
megatron-vl evaluate --original "$HF" --converted "$OUT/converted" --data "$DATA" --out "$OUT/report" --gpus-per-process 4 "$@"
