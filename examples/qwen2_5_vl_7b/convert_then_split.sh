#!/usr/bin/env bash
# Qwen2.5-VL-7B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen2.5-VL-7B-Instruct}
FULL=${FULL:-checkpoints/qwen2_5_vl_7b-full}
SHARDS=${SHARDS:-checkpoints/qwen2_5_vl_7b-tp1-pp1}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 1 --pp 1 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 1 --pp 1 --out "$SHARDS"
