#!/usr/bin/env bash
# Compares the checkpoint that comes back from the layout of a model's YAML with the original, up to benchmark
# scores, and scores the trained checkpoint if there is one. It needs the eval extra.
#   evaluate.sh qwen2_5_vl_7b [options of `megatron-vl evaluate`]
#
#   HF, SHARDS, RUN  folders (default: model.hf, model.checkpoint and checkpoint.dir of the YAML)
#   DATA             data set of VLMEvalKit, or your own table (default MMBench_DEV_EN_V11)
#   OUT              folder of the exports and the report (default: evaluation/NAME)
set -euo pipefail
if [ -z "${1:-}" ]; then
  echo "usage: evaluate.sh NAME|RUN.yaml [options of megatron-vl evaluate]" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
config=$(config_of "$1")
shift
HF=${HF:-$(field "$config" model.hf)}
SHARDS=${SHARDS:-$(field "$config" model.checkpoint)}
RUN=${RUN:-$(field "$config" checkpoint.dir)}
DATA=${DATA:-MMBench_DEV_EN_V11}
OUT=${OUT:-evaluation/$(basename "$config" .yaml)}

megatron-vl export --checkpoint "$SHARDS" --hf "$HF" --out "$OUT/converted" --force
if compgen -G "$RUN/step_*" >/dev/null; then
  megatron-vl export --checkpoint "$RUN" --hf "$HF" --out "$OUT/trained" --force
  set -- --trained "$OUT/trained" "$@"
fi
# Spread a model of more than 72 GB over 2, 4 or 8 GPUs.
bytes=$(find -L "$HF" -maxdepth 1 -name "*.safetensors" -printf "%s\n" | awk "{sum += \$1} END {printf \"%d\", sum}")
gpus=1
while [ $((gpus * 72000000000)) -lt "$bytes" ] && [ "$gpus" -lt 8 ]; do gpus=$((gpus * 2)); done
megatron-vl evaluate --original "$HF" --converted "$OUT/converted" --data "$DATA" --out "$OUT/report" \
  --gpus-per-process "$gpus" "$@"
