#!/usr/bin/env bash
# Compares the checkpoint that comes back from the layout of a model's YAML with the original, up to benchmark
# scores, and scores the trained checkpoint if there is one. It needs the eval extra.
#   evaluate.sh qwen2_5_vl_7b [options of `megatron-vl evaluate`]
#
#   HF, RUN          folders (default: model.hf and checkpoint.dir of the YAML)
#   SHARDS           weights that convert_then_split.sh wrote (default: checkpoints/NAME-shards)
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
SHARDS=${SHARDS:-checkpoints/$(basename "$config" .yaml)-shards}
RUN=${RUN:-$(field "$config" checkpoint.dir)}
DATA=${DATA:-MMBench_DEV_EN_V11}
OUT=${OUT:-evaluation/$(basename "$config" .yaml)}

if compgen -G "$RUN/step_*" >/dev/null; then
  set -- --trained "$RUN" "$@"
fi
megatron-vl evaluate --original "$HF" --converted "$SHARDS" --data "$DATA" --out "$OUT" "$@"
