#!/usr/bin/env bash
# Qwen3-VL-8B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen3-VL-8B-Instruct}
FULL=${FULL:-checkpoints/qwen3_vl_8b-full}
SHARDS=${SHARDS:-checkpoints/qwen3_vl_8b-tp2-pp2}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 2 --pp 2 --layers 16,20 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 2 --pp 2 --layers 16,20 --out "$SHARDS"
