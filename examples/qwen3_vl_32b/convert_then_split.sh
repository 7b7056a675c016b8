#!/usr/bin/env bash
# Qwen3-VL-32B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen3-VL-32B-Instruct}
FULL=${FULL:-checkpoints/qwen3_vl_32b-full}
SHARDS=${SHARDS:-checkpoints/qwen3_vl_32b-tp8-pp2}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 8 --pp 2 --layers 30,34 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 8 --pp 2 --layers 30,34 --out "$SHARDS"
