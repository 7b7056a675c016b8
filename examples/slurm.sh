#!/usr/bin/env bash
# A training under Slurm: sbatch --nodes 4 examples/slurm.sh examples/qwen2_5_vl_72b [--section.field value ...]
#SBATCH --job-name=megatron-vl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --requeue
# A requeued job goes on from its latest checkpoint, also where its options name a checkpoint.step that it rolled back to before. Slurm sends SIGTERM before it takes nodes back, and
# the training then saves and ends; the partition's GraceTime (at preemption) must leave time for a step and a save.
set -euo pipefail
usage="usage: sbatch --nodes N examples/slurm.sh EXAMPLE_FOLDER [--section.field value ...]"
[ -n "${1:-}" ] || { echo "$usage" >&2; exit 2; }
[ -n "${SLURM_JOB_NUM_NODES:-}" ] || { echo "slurm.sh: it is started with sbatch; $usage" >&2; exit 2; }
example=$1
shift
NNODES=$SLURM_JOB_NUM_NODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
JOB_ID=$SLURM_JOB_ID
GPUS=${SLURM_GPUS_ON_NODE:-8}
export NNODES MASTER_ADDR JOB_ID GPUS
srun --kill-on-bad-exit=1 "$example/pretrain.sh" "$@"
