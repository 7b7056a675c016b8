#!/usr/bin/env bash
# Qwen3-VL-30B-A3B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen3-VL-30B-A3B-Instruct}
FULL=${FULL:-checkpoints/qwen3_vl_30b_a3b-full}
SHARDS=${SHARDS:-checkpoints/qwen3_vl_30b_a3b-tp1-pp1-ep8}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 1 --pp 1 --ep 8 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 1 --pp 1 --ep 8 --out "$SHARDS"
