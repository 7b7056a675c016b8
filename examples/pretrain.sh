#!/usr/bin/env bash
# Trains a model. Run it on every node of the training: pretrain.sh qwen2_5_vl_7b [--section.field value ...]
# A stage of pretraining (docs/stages.md): pretrain.sh pretrain/qwen3_vl_8b_1_merger
#
#   GPUS         processes on this node (default: one per GPU; required on a node without GPUs)
#   NNODES       number of nodes (default 1; the YAML's first line says how many GPUs it needs)
#   MASTER_ADDR  host name of one of the nodes, the same on all; required for several nodes. HOST:PORT for another
#                port than 29500, which distinguishes this training from others on the same nodes
#
# On SIGTERM or SIGUSR1 to this process, the ranks finish the current step, save and end with exit code 0.
set -euo pipefail
if [ -z "${1:-}" ]; then
  echo "usage: pretrain.sh NAME|RUN.yaml [--section.field value ...]" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
config=$(config_of "$1")
shift
group=()
[ -z "${GPUS:-}" ] || group+=(--nproc-per-node "$GPUS")
[ -z "${NNODES:-}" ] || group+=(--nnodes "$NNODES")
[ -z "${MASTER_ADDR:-}" ] || group+=(--master-addr "$MASTER_ADDR")
exec megatron-vl train --config "$config" "${group[@]}" "$@"
