#!/usr/bin/env bash
# Trains a model: pretrain.sh qwen2_5_vl_7b [--section.field value ...]. Run it on every node of a training.
#
#   GPUS         processes on this node (default: its GPUs; give it where there are none)
#   NNODES       nodes (default 1; the YAML's first line says how many GPUs it is made for)
#   MASTER_ADDR  host name of one of the nodes, the same on all; needed for more than one
#   MASTER_PORT  a free port there (default 29500)
#   JOB_ID       any word that tells this training from others on the same nodes (default megatron-vl)
#
# SIGTERM or SIGUSR1 to this process: the ranks save after the step under way and end, with exit code 0.
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
[ -z "${MASTER_PORT:-}" ] || group+=(--master-port "$MASTER_PORT")
[ -z "${JOB_ID:-}" ] || group+=(--job-id "$JOB_ID")
exec megatron-vl train --config "$config" "${group[@]}" "$@"
