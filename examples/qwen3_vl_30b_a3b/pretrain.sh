#!/usr/bin/env bash
# Trains Qwen3-VL-30B-A3B-Instruct on one node of 8 GPUs by default (see ../launch.sh for more). Options behind it override pretrain.yaml.
set -euo pipefail
export NNODES=${NNODES:-1}
here=$(dirname "${BASH_SOURCE[0]}")
exec "$here/../launch.sh" "$here/pretrain.yaml" "$@"
