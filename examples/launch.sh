#!/usr/bin/env bash
# Starts the trainer on this node: launch.sh RUN.yaml [--section.field value ...]. Run it on every node of a training.
#
#   GPUS         processes on this node (default: its GPUs; give it where there are none)
#   NNODES       nodes (default 1)
#   MASTER_ADDR  host name of one of the nodes, the same on all; needed for more than one
#   MASTER_PORT  a free port there (default 29500)
#   JOB_ID       any word that tells this training from others on the same nodes (default megatron-vl)
#
# SIGTERM or SIGUSR1 to this process: the ranks save behind the step under way and end, with exit code 0.
set -euo pipefail
if [ -z "${1:-}" ]; then
  echo "usage: launch.sh RUN.yaml [--section.field value ...]" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" python
config=$1
shift
if [ -z "${GPUS:-}" ]; then
  command -v nvidia-smi > /dev/null || { echo "launch.sh: nvidia-smi is missing; set GPUS to the number of processes, also on CPU" >&2; exit 1; }
  GPUS=$(nvidia-smi --list-gpus | wc -l)
fi
NNODES=${NNODES:-1}
if [ "$NNODES" -gt 1 ]; then
  [ -n "${MASTER_ADDR:-}" ] || { echo "launch.sh: with NNODES=$NNODES set MASTER_ADDR to the host name of one node" >&2; exit 1; }
  rendezvous=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
              --rdzv-id "${JOB_ID:-megatron-vl}")
else
  rendezvous=(--standalone)
fi

# Core wants one work queue for overlap of communication with tensor parallelism; the allocator must not fragment, because
# the sizes of pictures differ from row to row.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec python -m megatron_vl.launch --nnodes "$NNODES" --nproc-per-node "$GPUS" "${rendezvous[@]}" -m megatron_vl.train --config "$config" "$@"
