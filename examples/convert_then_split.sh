#!/usr/bin/env bash
# Converts a Hugging Face folder to Megatron weights in the layout of a model's YAML:
#   convert_then_split.sh qwen2_5_vl_7b
# It needs no GPU. Run it once, from the root of the checkout.
#
#   HF      Hugging Face folder (default: model.hf of the YAML)
#   FULL    unsplit Megatron weights (default: checkpoints/NAME-full), which are converted unless they exist; those that
#           exist must be the weights of HF
#   SHARDS  weights in the layout of the YAML (default: checkpoints/NAME-shards). A run starts from them with
#           --model.checkpoint; without it, from the Hugging Face folder.
set -euo pipefail
if [ -z "${1:-}" ]; then
  echo "usage: convert_then_split.sh NAME|RUN.yaml" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
config=$(config_of "$1")
HF=${HF:-$(field "$config" model.hf)}
FULL=${FULL:-checkpoints/$(basename "$config" .yaml)-full}
SHARDS=${SHARDS:-checkpoints/$(basename "$config" .yaml)-shards}

if [ -e "$FULL" ]; then
  echo "$FULL exists: it is compared with $HF, and then split"
  megatron-vl verify "$HF" "$FULL" || {
    echo "$FULL does not hold the weights of $HF: remove it, or set FULL to another folder" >&2
    exit 1
  }
else
  megatron-vl convert --hf "$HF" --out "$FULL"
fi
megatron-vl split --checkpoint "$FULL" --config "$config" --out "$SHARDS"
# To do both in one pass, without the unsplit copy:
#   megatron-vl convert --hf "$HF" --config "$config" --out "$SHARDS"
