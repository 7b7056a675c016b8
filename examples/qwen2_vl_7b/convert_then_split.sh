#!/usr/bin/env bash
# Qwen2-VL-7B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen2-VL-7B-Instruct}
FULL=${FULL:-checkpoints/qwen2_vl_7b-full}
SHARDS=${SHARDS:-checkpoints/qwen2_vl_7b-tp2-pp2}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 2 --pp 2 --layers 10,18 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 2 --pp 2 --layers 10,18 --out "$SHARDS"
