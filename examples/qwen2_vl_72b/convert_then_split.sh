#!/usr/bin/env bash
# Qwen2-VL-72B-Instruct from Hugging Face -> Megatron weights -> the layout of pretrain.yaml. CPU only; run it once, from the root of the checkout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh" megatron-vl
HF=${HF:-checkpoints/Qwen2-VL-72B-Instruct}
FULL=${FULL:-checkpoints/qwen2_vl_72b-full}
SHARDS=${SHARDS:-checkpoints/qwen2_vl_72b-tp8-pp4}

megatron-vl convert --hf "$HF" --out "$FULL"
megatron-vl split --checkpoint "$FULL" --tp 8 --pp 4 --vpp 2 --layers 8,10,10,10,10,10,11,11 --out "$SHARDS"
# Both in one stream, without the unsplit copy: megatron-vl convert --hf "$HF" --tp 8 --pp 4 --vpp 2 --layers 8,10,10,10,10,10,11,11 --out "$SHARDS"
