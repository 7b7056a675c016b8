#!/usr/bin/env bash
# Qwen3-VL-32B-Instruct: is the checkpoint that comes back from the layout of pretrain.yaml the original, down to a benchmark's scores? And what does
# the trained one score, once there is one? Needs the eval extra. Options behind it go to `megatron-vl evaluate`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen3-VL-32B-Instruct}
SHARDS=${SHARDS:-checkpoints/qwen3_vl_32b-tp8-pp2}
RUN=${RUN:-runs/qwen3_vl_32b}
DATA=${DATA:-MMBench_DEV_EN_V11}
OUT=${OUT:-evaluation/qwen3_vl_32b}

megatron-vl export --checkpoint "$SHARDS" --hf "$HF" --out "$OUT/converted" --force
if [ -f "$RUN/latest.json" ]; then
  megatron-vl export --checkpoint "$RUN" --hf "$HF" --out "$OUT/trained" --force
  set -- --trained "$OUT/trained" "$@"
fi
megatron-vl evaluate --original "$HF" --converted "$OUT/converted" --data "$DATA" --out "$OUT/report" "$@"
