#!/usr/bin/env bash
# Qwen3-VL-235B-A22B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen3-VL-235B-A22B-Instruct}
FULL=${FULL:-checkpoints/qwen3_vl_235b_a22b-full}
SHARDS=${SHARDS:-checkpoints/qwen3_vl_235b_a22b-tp4-pp8-ep8}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 4 --pp 8 --layers 8,12,12,12,12,13,13,12 --ep 8 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 4 --pp 8 --layers 8,12,12,12,12,13,13,12 --ep 8 --out "$SHARDS"
