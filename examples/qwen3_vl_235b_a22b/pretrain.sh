#!/usr/bin/env bash
# Trains Qwen3-VL-235B-A22B-Instruct on 8 nodes of 8 GPUs by default (see ../launch.sh for more). Options behind it override pretrain.yaml.
set -euo pipefail
export NNODES=${NNODES:-8}
here=$(dirname "${BASH_SOURCE[0]}")
exec "$here/../launch.sh" "$here/pretrain.yaml" "$@"
